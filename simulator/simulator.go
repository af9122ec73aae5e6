// Package simulator is a Caddy handler that behaves like an OpenAI or Azure
// OpenAI deployment, without a model: it checks its key, counts requests and
// tokens, throttles in any of the styles that providers use, replies with or
// without a stream, and fails on demand. The quickstart, the tests and the
// benchmarks run against it. You can also try a configuration with it before
// you add real keys.
//
// The exchange takes a request through three packages: internal/limits admits it
// or makes a 429, internal/model says what the reply is, and internal/wire sends
// it, with the fault that is due. What is stored and counted is in the state of
// this package.
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

	"github.com/openai-lb/caddy-openai-lb/simulator/internal/limits"
)

func init() {
	caddy.RegisterModule(Handler{})
}

// Handler is a simulated deployment, or a whole resource of them: limits are
// counted separately for each deployment. It answers
//
//   - `POST /openai/deployments/{deployment}/…?api-version=` (Azure classic),
//   - `POST /openai/v1/…` (Azure v1) and `POST /v1/…` (OpenAI), each with
//     `chat/completions`, `completions`, `embeddings` and
//     `audio/transcriptions`,
//   - `POST responses`, `GET` and `DELETE responses/{id}` and `GET models`
//     under both v1 roots,
//   - files, batches, vector stores and conversations there as well: it stores
//     the objects that it creates, and answers 404 for all others,
//
// and the WebSockets of `GET realtime` there, and of Azure's
// `/openai/realtime?api-version=`: sessions with text in and text out. Any
// other request gets a 404.
//
// Its limits, counters and stored objects live in the memory of this module
// instance: a config reload starts fresh.
type Handler struct {
	// Name identifies the simulator: it is sent as `x-simulator` on every reply
	// and shown in the status. Default: `simulator`
	Name string `json:"name,omitempty"`

	// APIKey lists the accepted keys. A caller sends one in `api-key` or as
	// `Authorization: Bearer`; other callers get OpenAI's 401 under `/v1`, and
	// Azure's elsewhere. Placeholders such as `{env.KEY}` and
	// `{file./run/secrets/key}` are resolved when the config is loaded.
	// Default: keys are not checked
	APIKey []string `json:"api_key,omitempty"`

	// Deployments lists the deployments (or models) that exist; any other gets
	// a 404 `DeploymentNotFound`, or `model_not_found` under `/v1`.
	// Default: any name exists
	Deployments []string `json:"deployments,omitempty"`

	// Region is sent as `x-ms-region`. Default: `Simulated`
	Region string `json:"region,omitempty"`

	// RequestsPerMinute is the request limit of a pay-as-you-go deployment. It
	// is enforced over `request_window`, and refused requests count too.
	// Default: no limit
	RequestsPerMinute int `json:"requests_per_minute,omitempty"`

	// RequestWindow is the fixed window in which requests are counted, `1s` or
	// `10s`. A window opens with the first request while none is open.
	// Default: `10s`
	RequestWindow caddy.Duration `json:"request_window,omitempty"`

	// TokensPerMinute is the token limit of a pay-as-you-go deployment, over fixed
	// windows of 60 s that open as request windows do. The estimate made on
	// arrival counts: a token for every four characters of prompt, and of the JSON
	// of tools, plus the `max_tokens` asked for, or 16, for each reply that `n` or
	// `best_of` asks for. Default: no limit
	TokensPerMinute int `json:"tokens_per_minute,omitempty"`

	// PTU makes this a provisioned deployment of that many units: a leaky
	// bucket instead of the two limits above. Default: none, pay-as-you-go
	PTU int `json:"ptu,omitempty"`

	// InputTPMPerPTU is how many input tokens a minute one unit processes.
	// Default: `2500`, which is gpt-4o's
	InputTPMPerPTU int `json:"input_tpm_per_ptu,omitempty"`

	// OutputRatio is how many input tokens one output token counts for, from
	// 0.000001 to 1000000. Default: `4`
	OutputRatio float64 `json:"output_ratio,omitempty"`

	// BucketSeconds is how many seconds of work the bucket holds before requests
	// are refused, from 0.000001 to 1000000. Azure does not publish its own
	// value. Default: `10`
	BucketSeconds float64 `json:"bucket_seconds,omitempty"`

	// Hints is the style of the headers of a 429 that say when to retry:
	// `azure_ms`, `azure_both`, `azure_s`, `azure_none`, `azure_neg1`,
	// `azure_day`, `date`, `openai_dur`, `garbage`, `negative` or `zero`.
	// Default: `azure_both`
	Hints string `json:"hints,omitempty"`

	// ErrorBody is the body of a 429: `azure_classic`, `azure_new`,
	// `azure_capacity`, `azure_ptu`, `openai_tokens`, `insufficient_quota`,
	// `mistral_flat`, `openrouter_num`, `html`, `empty` or `string_error`.
	// Default: `azure_classic`, or `azure_ptu` for a provisioned deployment
	ErrorBody string `json:"error_body,omitempty"`

	// FirstTokenLatency is the time before the first token. Default: `0`
	FirstTokenLatency caddy.Duration `json:"first_token_latency,omitempty"`

	// FirstTokenLatencyP95 is the time within which 95 % of the first tokens come.
	// They then take times of a log-normal distribution, of which
	// FirstTokenLatency is the median. Default: all take FirstTokenLatency
	FirstTokenLatencyP95 caddy.Duration `json:"first_token_latency_p95,omitempty"`

	// TokenLatency is the time between two streamed tokens; a reply that is not
	// streamed waits that long for each of its tokens. Default: `0`
	TokenLatency caddy.Duration `json:"token_latency,omitempty"`

	// OutputTokens is how many tokens a reply has, unless the request allows
	// fewer. Default: `16`
	OutputTokens int `json:"output_tokens,omitempty"`

	// PromptCache is how many prompts each deployment remembers, the most
	// recently used. A prompt that begins with one of them, up to the end of a
	// message, is reported to have that many `cached_tokens`, and its first token
	// comes up to 80 % sooner. As at OpenAI, it requires 1,024 tokens, and steps
	// of 128 count. A provisioned deployment does not charge them. Default: none
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

	// StatusPath is where `GET` shows the counters and the latest requests, and
	// `DELETE` or `POST` resets counters and limits. It needs no key.
	// Default: `/_simulator/status`
	StatusPath string `json:"status_path,omitempty"`

	running
}

// running is what a loaded Handler works with.
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
	h.Region = cmp.Or(h.Region, "Simulated")
	h.RequestWindow = cmp.Or(h.RequestWindow, caddy.Duration(10*time.Second))
	h.InputTPMPerPTU = cmp.Or(h.InputTPMPerPTU, 2500)
	h.OutputRatio = cmp.Or(h.OutputRatio, 4)
	h.BucketSeconds = cmp.Or(h.BucketSeconds, 10)
	h.Hints = cmp.Or(h.Hints, "azure_both")
	if h.PTU > 0 {
		h.ErrorBody = cmp.Or(h.ErrorBody, "azure_ptu")
	}
	h.ErrorBody = cmp.Or(h.ErrorBody, "azure_classic")
	h.OutputTokens = cmp.Or(h.OutputTokens, 16)
	h.StatusPath = cmp.Or(h.StatusPath, "/_simulator/status")

	for i := range h.Fault {
		if err := h.Fault[i].provision(); err != nil {
			return err
		}
	}
	if err := h.resolveKeys(); err != nil {
		return err
	}

	drain := float64(h.PTU) * float64(h.InputTPMPerPTU) / 60
	h.rules = limits.Rules{
		RequestsPerMinute: h.RequestsPerMinute,
		RequestWindow:     time.Duration(h.RequestWindow),
		TokensPerMinute:   h.TokensPerMinute,
		Drain:             drain,
		Capacity:          drain * h.BucketSeconds,
		OutputRatio:       h.OutputRatio,
		Style:             limits.Style{Hints: h.Hints, ErrorBody: h.ErrorBody, Simulator: h.Name, Region: h.Region},
		Grace:             time.Duration(h.EarlyGrace),
	}
	h.state = newState(h.rules)
	return nil
}

func (h *Handler) resolveKeys() error {
	repl := caddy.NewReplacer()
	h.keys = make(map[[sha256.Size]byte]struct{}, len(h.APIKey))
	for i, key := range h.APIKey {
		// A key that is read from a file often ends in a newline.
		key = strings.TrimSpace(repl.ReplaceKnown(key, ""))
		if key == "" {
			return fmt.Errorf("api_key %d is empty after its placeholders were replaced", i+1)
		}
		h.keys[sha256.Sum256([]byte(key))] = struct{}{}
	}
	return nil
}

// Validate rejects options that cannot be simulated.
func (h *Handler) Validate() error {
	if h.PTU > 0 && (h.RequestsPerMinute > 0 || h.TokensPerMinute > 0) {
		return errors.New("ptu replaces requests_per_minute and tokens_per_minute: set one or the other")
	}
	for _, option := range []struct {
		name  string
		value float64
	}{
		{"requests_per_minute", float64(h.RequestsPerMinute)},
		{"tokens_per_minute", float64(h.TokensPerMinute)},
		{"ptu", float64(h.PTU)},
		{"input_tpm_per_ptu", float64(h.InputTPMPerPTU)},
		{"first_token_latency", float64(h.FirstTokenLatency)},
		{"first_token_latency_p95", float64(h.FirstTokenLatencyP95)},
		{"token_latency", float64(h.TokenLatency)},
		{"output_tokens", float64(h.OutputTokens)},
		{"prompt_cache", float64(h.PromptCache)},
		{"early_grace", float64(h.EarlyGrace)},
	} {
		if option.value < 0 {
			return fmt.Errorf("%s must not be negative, got %v", option.name, option.value)
		}
	}
	for _, option := range []struct {
		name  string
		value float64
	}{
		{"output_ratio", h.OutputRatio},
		{"bucket_seconds", h.BucketSeconds},
	} {
		if option.value < 1e-6 || option.value > 1e6 {
			return fmt.Errorf("%s must be from 0.000001 to 1000000, got %v", option.name, option.value)
		}
	}
	if h.FirstTokenLatencyP95 > 0 && h.FirstTokenLatencyP95 <= h.FirstTokenLatency {
		return fmt.Errorf("first_token_latency_p95 must be more than first_token_latency, got '%s' and '%s'",
			time.Duration(h.FirstTokenLatencyP95), time.Duration(h.FirstTokenLatency))
	}
	if err := checkWindow(h.RequestWindow); err != nil {
		return err
	}
	if !slices.Contains(limits.HintStyles, h.Hints) {
		return fmt.Errorf("hints '%s' is not one of %s", h.Hints, strings.Join(limits.HintStyles, ", "))
	}
	if !slices.Contains(limits.BodyStyles, h.ErrorBody) {
		return fmt.Errorf("error_body '%s' is not one of %s", h.ErrorBody, strings.Join(limits.BodyStyles, ", "))
	}
	if !strings.HasPrefix(h.StatusPath, "/") {
		return fmt.Errorf("status_path '%s' is not a path that begins with '/'", h.StatusPath)
	}
	return nil
}

// checkWindow allows the two windows that "Manage Azure OpenAI quota" names.
func checkWindow(window caddy.Duration) error {
	if w := time.Duration(window); w != time.Second && w != 10*time.Second {
		return fmt.Errorf("request_window '%s' is not 1s or 10s", w)
	}
	return nil
}

// ServeHTTP answers like the deployment. It never calls the next handler.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, _ caddyhttp.Handler) error {
	if r.URL.Path == h.StatusPath {
		return h.serveStatus(w, r)
	}
	x := h.open(w, r)
	defer x.close()
	x.serve()
	return nil
}

// authorized reports whether r carries one of the keys. If both headers are set,
// one valid key is enough.
func (h *Handler) authorized(r *http.Request) bool {
	if len(h.keys) == 0 {
		return true
	}
	if h.isKey(r.Header.Get("api-key")) {
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
