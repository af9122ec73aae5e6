// Package simulator is a Caddy handler that behaves like an OpenAI or Azure
// OpenAI deployment, without a model: it checks its key, counts requests and
// tokens, throttles in any of the styles that providers use, replies with or
// without a stream, and fails on demand. The quickstart, the tests and the
// benchmarks run against it. You can also try a configuration with it before
// you add real keys.
//
// A request passes three packages: internal/limits admits it or makes a 429,
// internal/model says what the reply is, and internal/wire sends it, with the
// fault that is due. What is stored and counted is in the state of this
// package.
//
// # What it promises
//
//   - It calls no other server. All objects that it stores are in memory, and
//     are gone when the configuration is unloaded.
//   - Each simulated deployment counts for itself. A request is charged before
//     it is served, with the most that it may cost.
//   - Without a valid key, a request meets no fault but silence. The status
//     counts the faults that took effect.
//   - A reply that hangs ends when its client leaves, or when the configuration
//     is unloaded.
//   - Many requests use a [Handler] concurrently.
package simulator

import (
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/simulator/internal/limits"
)

func init() {
	caddy.RegisterModule(Handler{})
}

// Handler is a simulated deployment, or a whole resource of them: limits are
// counted separately for each deployment. docs/simulator.md lists the paths
// that it answers, its styles and its faults.
//
// Its limits, counters and stored objects live in the memory of this module
// instance: a config reload starts fresh.
type Handler struct {
	// Name identifies the simulator: it is sent as `x-simulator` on every reply
	// and shown in the status. Default: `simulator`
	Name string `json:"name,omitempty"`

	// APIKey lists the accepted keys, in `api-key` or as `Authorization:
	// Bearer`. Placeholders such as `{env.KEY}` and `{file./run/secrets/key}`
	// are resolved when the config is loaded. Default: keys are not checked
	APIKey []string `json:"api_key,omitempty"`

	// Deployments lists the deployments (or models) that exist; any other gets
	// a 404 `DeploymentNotFound`, or `model_not_found` under `/v1`. Default:
	// any name exists
	Deployments []string `json:"deployments,omitempty"`

	// RequestsPerMinute is the request limit of a pay-as-you-go deployment,
	// over fixed windows of 10 s. Refused requests count, too. Default: no
	// limit
	RequestsPerMinute int `json:"requests_per_minute,omitempty"`

	// TokensPerMinute is the token limit of a pay-as-you-go deployment, over
	// fixed windows of 60 s. The estimate made on arrival counts: the prompt
	// and its tools, plus the `max_tokens` asked for, or 16. Default: no limit
	TokensPerMinute int `json:"tokens_per_minute,omitempty"`

	// PTU makes this a provisioned deployment of that many units: a leaky
	// bucket instead of the two limits above. Default: none, pay-as-you-go
	PTU int `json:"ptu,omitempty"`

	// BucketSeconds is how many seconds of work the bucket holds before
	// requests are refused, from 0.000001 to 1000000. Default: `10`
	BucketSeconds float64 `json:"bucket_seconds,omitempty"`

	// Hints is the style of the headers of a 429 that say when to retry.
	// Default: `azure_both`
	Hints string `json:"hints,omitempty"`

	// ErrorBody is the style of the body of a 429. Default: `azure_classic`, or
	// `azure_ptu` for a provisioned deployment
	ErrorBody string `json:"error_body,omitempty"`

	// FirstTokenLatency is the time before the first token. Default: `0`
	FirstTokenLatency caddy.Duration `json:"first_token_latency,omitempty"`

	// FirstTokenLatencyP95 is the time within which 95 % of the first tokens
	// come. They then take times of a log-normal distribution, of which
	// FirstTokenLatency is the median. Default: all take FirstTokenLatency
	FirstTokenLatencyP95 caddy.Duration `json:"first_token_latency_p95,omitempty"`

	// TokenLatency is the time between two streamed tokens; a reply that is not
	// streamed waits that long for each of its tokens. Default: `0`
	TokenLatency caddy.Duration `json:"token_latency,omitempty"`

	// OutputTokens is how many tokens a reply has, unless the request allows
	// fewer. Default: `16`
	OutputTokens int `json:"output_tokens,omitempty"`

	// FlexCapacity and PriorityCapacity are the percentages of the requests for
	// these service tiers that are served in them. Others get a 429, or are
	// served as `default`. Default: `100`
	FlexCapacity     *int `json:"flex_capacity,omitempty"`
	PriorityCapacity *int `json:"priority_capacity,omitempty"`

	// NoFlex answers requests for flex with a 400. Default: only with PTU
	NoFlex bool `json:"no_flex,omitempty"`

	// FlexLatency is how long a flex request waits before anything else.
	// Default: `0`
	FlexLatency caddy.Duration `json:"flex_latency,omitempty"`

	// PromptCache is how many prompts each deployment remembers, the most
	// recently used. A prompt that begins with one of them, up to the end of a
	// message, has that many `cached_tokens`: its first token comes sooner, and
	// a provisioned deployment does not charge them. Default: none
	PromptCache int `json:"prompt_cache,omitempty"`

	// Fault lists faults and how often each happens. If several are due for one
	// request, the first one happens. Default: none
	Fault []Fault `json:"fault,omitempty"`

	// AllowFaultHeader lets a request ask for a fault, in the header
	// `X-Simulator-Fault: <action>`. Default: `false`
	AllowFaultHeader bool `json:"allow_fault_header,omitempty"`

	// EarlyGrace is how long after a 429 a request is not counted as early: its
	// sender may not have received the 429 yet. Default: `0`
	EarlyGrace caddy.Duration `json:"early_grace,omitempty"`

	running
}

// running is the state of a loaded Handler.
type running struct {
	keys  map[[sha256.Size]byte]struct{} // digests, so that the time of a lookup reveals no key
	rules limits.Rules
	state *state
	ctx   caddy.Context

	now    func() time.Time
	loaded time.Time
	normal func() float64 // a random number of the normal distribution
}

// CaddyModule returns the Caddy module information.
func (Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.handlers.openai_simulator",
		New: func() caddy.Module { return new(Handler) },
	}
}

// Provision sets the defaults, resolves the keys and starts with empty limits.
func (h *Handler) Provision(ctx caddy.Context) error {
	h.ctx = ctx
	if h.now == nil {
		h.now = time.Now
	}
	h.loaded, h.normal = h.now(), rand.NormFloat64

	h.Name = cmp.Or(h.Name, "simulator")
	h.BucketSeconds = cmp.Or(h.BucketSeconds, 10)
	h.Hints = cmp.Or(h.Hints, "azure_both")
	if h.PTU > 0 {
		h.ErrorBody = cmp.Or(h.ErrorBody, "azure_ptu")
	}
	h.ErrorBody = cmp.Or(h.ErrorBody, "azure_classic")
	h.OutputTokens = cmp.Or(h.OutputTokens, 16)
	h.FlexCapacity, h.PriorityCapacity = cmp.Or(h.FlexCapacity, new(100)), cmp.Or(h.PriorityCapacity, new(100))

	for i := range h.Fault {
		if err := h.Fault[i].provision(); err != nil {
			return err
		}
	}
	h.keys = make(map[[sha256.Size]byte]struct{}, len(h.APIKey))
	for i, raw := range h.APIKey {
		key, err := keys.ResolveKey(raw)
		if err != nil {
			return fmt.Errorf("api_key %d: %w", i+1, err)
		}
		h.keys[sha256.Sum256([]byte(key))] = struct{}{}
	}

	const inputTPMPerPTU = 2500
	drain := float64(h.PTU) * inputTPMPerPTU / 60
	h.rules = limits.Rules{
		RequestsPerMinute: h.RequestsPerMinute,
		TokensPerMinute:   h.TokensPerMinute,
		Drain:             drain,
		Capacity:          drain * h.BucketSeconds,
		Style:             limits.Style{Hints: h.Hints, ErrorBody: h.ErrorBody},
		Grace:             time.Duration(h.EarlyGrace),
	}
	h.state = newState(h.rules)
	return nil
}

// Validate rejects options that cannot be simulated.
func (h *Handler) Validate() error {
	if h.PTU > 0 && (h.RequestsPerMinute > 0 || h.TokensPerMinute > 0) {
		return errors.New("ptu replaces requests_per_minute and tokens_per_minute: set one or the other")
	}
	if h.BucketSeconds < 1e-6 || h.BucketSeconds > 1e6 {
		return fmt.Errorf("bucket_seconds must be from 0.000001 to 1000000, got %v", h.BucketSeconds)
	}
	if h.FirstTokenLatencyP95 > 0 && h.FirstTokenLatencyP95 <= h.FirstTokenLatency {
		return fmt.Errorf("first_token_latency_p95 must be more than first_token_latency, got '%s' and '%s'",
			time.Duration(h.FirstTokenLatencyP95), time.Duration(h.FirstTokenLatency))
	}
	if !slices.Contains(limits.HintStyles, h.Hints) {
		return fmt.Errorf("hints '%s' is not one of %s", h.Hints, strings.Join(limits.HintStyles, ", "))
	}
	if !slices.Contains(limits.BodyStyles, h.ErrorBody) {
		return fmt.Errorf("error_body '%s' is not one of %s", h.ErrorBody, strings.Join(limits.BodyStyles, ", "))
	}
	return nil
}

// ServeHTTP answers like the deployment. It never calls the next handler.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, _ caddyhttp.Handler) error {
	if r.URL.Path == statusPath {
		return h.serveStatus(w, r)
	}
	x := h.open(w, r)
	defer x.close()
	if rep := x.refuse(); rep != nil {
		x.reply(rep)
	} else {
		x.answer()
	}
	return nil
}

// authorized reports whether r carries one of the keys. If both headers are
// set, one valid key is enough.
func (h *Handler) authorized(r *http.Request) bool {
	if len(h.keys) == 0 || h.isKey(r.Header.Get("api-key")) {
		return true
	}
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	return strings.EqualFold(scheme, "bearer") && h.isKey(token)
}

func (h *Handler) isKey(key string) bool {
	_, ok := h.keys[sha256.Sum256([]byte(strings.TrimSpace(key)))]
	return ok
}

// serves reports whether the deployment exists here.
func (h *Handler) serves(deployment string) bool {
	return len(h.Deployments) == 0 || slices.Contains(h.Deployments, deployment)
}

// Interface guards
var (
	_ caddy.Provisioner           = (*Handler)(nil)
	_ caddy.Validator             = (*Handler)(nil)
	_ caddyhttp.MiddlewareHandler = (*Handler)(nil)
)
