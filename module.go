// Package openailb is a load balancer for OpenAI and Azure OpenAI endpoints, as
// modules for Caddy. Clients use one address. Behind it are many backends, each
// with its own key, priority and weight. A backend that throttles gets no
// requests for as long as it asked, and the refused request fails over to
// another backend.
//
// The words to learn, as docs/glossary.md has them:
//
//   - Account: what a provider bills, and where it stores objects: responses, conversations, files, batches.
//     Backends with the same host and credential share one.
//   - Attempt: one request to one backend.
//   - Bench: the time in which a backend gets no requests, for one model or for all. Other projects call it a
//     cooldown, or an ejection.
//   - Caller: who sends requests, known by a client key. Callers have limits.
//   - Class: what a reply means, such as served, throttled or failed.
//   - Hint: what a reply says of the time when its backend accepts requests again.
//   - Intent: what a request asks for, and who asks. It is read once, before a backend is chosen.
//   - Member: a backend as one pool sees it, with a priority and a weight.
//   - Owner: the account that has a stored object. Requests that name the object go there.
//   - Pool: the backends of one openai_lb block, with one name in logs and metrics.
//   - Probe: the one request that goes first after a bench. If it is refused, another bench begins. Other projects
//     call this state half-open.
//   - Reply: what came of an attempt: a response, or the reason why there is none.
//   - Suspect: a backend that is benched because it failed: it could not be reached, timed out or answered with a
//     server error. It is tried only when no other backend is left.
//   - Throttle: a reply that asks for a pause, mostly a 429 with a Retry-After. The backend is benched for exactly
//     as long as it asked, and is not called before.
//   - Tier: how important requests are. Those of a better one go first.
package openailb

import (
	"encoding/json"

	"github.com/openai-lb/caddy-openai-lb/internal/backend"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"go.uber.org/zap"

	_ "github.com/openai-lb/caddy-openai-lb/internal/admin" // /openai_lb/ in the admin API, `caddy openai-lb`, openai_lb_handover
	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/callers"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/replicas"
	_ "github.com/openai-lb/caddy-openai-lb/internal/statuspage" // openai_lb_status
	_ "github.com/openai-lb/caddy-openai-lb/internal/upstreams"  // lb_policy openai_lb, transport openai_lb
	"github.com/openai-lb/caddy-openai-lb/internal/waiting"
)

func init() {
	caddy.RegisterModule(new(Handler))
}

// Handler balances requests for OpenAI's API over several backends. It is a
// reverse_proxy with its own selection policy and transport.
//
// In JSON it has the options of the Caddyfile. Options that can be repeated are
// lists:
//
//	{
//		"handler": "openai_lb",
//		"backends": [
//			{"url": "https://contoso-ptu.openai.azure.com", "priority": 1, "api_key": "{env.PTU_KEY}"},
//			{"url": "https://api.openai.com/v1", "priority": 2, "api_key": "{env.OPENAI_KEY}", "model": [{"name": "gpt-4o"}]}
//		],
//		"client_keys": [{"name": "alice", "key": "{env.ALICE_KEY}"}]
//	}
//
// It sets these placeholders, for access logs, header_down and deferred headers:
//
// Placeholder | Description
// ------------|-------------
// `{http.openai_lb.backend}` | The name of the backend that replied, or of the last one that was tried. It is empty if the answer is not about one backend
// `{http.openai_lb.class}` | What the reply means, like served, client_error, throttled or failed: a class of docs/replies.md. The balancer's own answers are all_throttled, owner_throttled, all_busy, retry_later, caller_limited, no_such_model, unauthenticated, invalid_request, models, ready, not_ready or error
// `{http.openai_lb.attempts}` | How many backends were tried
// `{http.openai_lb.classes}` | The class of the reply to each attempt, like `ptu=throttled,east=served`
// `{http.openai_lb.affinity}` | Why that backend was chosen: owner (it stores the objects that the request names), asked (it was asked for them), cache (where the session's prompt is cached), learned (a free choice, and the reply named objects) or none
// `{http.openai_lb.affinity_result}` | The outcome: hit, move or miss, as in metrics. It is empty if the choice was free
// `{http.openai_lb.model}` | The model that the request asks for, as the client named it
// `{http.openai_lb.caller}` | The name of the caller, by its client key
// `{http.openai_lb.tier}` | The number of the request's tier, counted from 1 in order of importance. It is empty if there is none
// `{http.openai_lb.limit}` | The limit of the caller that refused the request, like tokens/minute. It is empty if none did
// `{http.openai_lb.pool}` | The name of the pool
// `{http.openai_lb.waited}` | The seconds that the request has waited because of the option wait. It is empty if it did not wait
// `{http.openai_lb.time_to_first_byte}` | The seconds from the request's arrival to the first byte of the reply's body
// `{http.openai_lb.tokens_input}`, `{http.openai_lb.tokens_cached}` | The tokens of the prompt, and those of them that came from a cache
// `{http.openai_lb.tokens_output}`, `{http.openai_lb.tokens_reasoning}` | The tokens of the answer, and those of them that were not shown
type Handler struct {
	// Pool names the pool of backends in logs, metrics and the admin API. No two
	// pools have the same name, unless all of their options are the same.
	// Default: openai_lb; further pools of a Caddyfile are openai_lb_2,
	// openai_lb_3 and so on, in the order of the file.
	Pool string `json:"pool,omitempty"`

	// Backends are the endpoints to choose from. At least one is required,
	// here or by backends_from_env.
	Backends []*backend.Backend `json:"backends,omitempty"`

	// BackendsFromEnv is the prefix of environment variables that describe
	// Azure backends. The variables of Microsoft's sample openai-aca-lb have
	// the prefix `BACKEND`: `BACKEND_<n>_URL`, `BACKEND_<n>_PRIORITY`,
	// `BACKEND_<n>_APIKEY` (without it, auth is `azure_identity`) and
	// `BACKEND_<n>_DEPLOYMENT_NAME`. `<n>` is a number, or a word without an
	// underscore. HTTP_TIMEOUT_SECONDS (100 if it is not set) becomes the
	// default of response_header_timeout, stream_first_event_timeout and
	// stream_idle_timeout. The variables are read at load and never appear in
	// the config. Default: no variables are read.
	BackendsFromEnv string `json:"backends_from_env,omitempty"`

	// ReadyPath is a path at which GET reports whether requests can be served: 200
	// if any backend can be used, 503 if each one cannot be reached, refuses its
	// credential, has no budget left, or fails active health checks. An unreachable
	// backend counts as unreachable until it is reached, which the balancer tries
	// in the background. A model that every backend throttles does not count:
	// another replica could not serve it either. A matcher before the handler must
	// let the path through. Default: none.
	ReadyPath string `json:"ready_path,omitempty"`

	// RatelimitHeaders is what the x-ratelimit headers of replies are about: `caller`
	// for the limits of a caller that has some, and otherwise those of the backend
	// that replied; `backend` always for the latter; `pool` for the sums of all
	// backends that serve the model; `off` for none. Default: `caller`.
	RatelimitHeaders string `json:"ratelimit_headers,omitempty"`

	// LBPolicyRaw chooses among the backends of a priority. It is any selection
	// policy of reverse_proxy except weighted_round_robin, whose weights belong
	// to positions. It does not apply to requests with a key of the option prompt_cache.
	// Default: at random, by weight.
	LBPolicyRaw json.RawMessage `json:"lb_policy,omitempty" caddy:"namespace=http.reverse_proxy.selection_policies inline_key=policy"`

	// LBRetries is how many further backends a request may try. Default: all.
	LBRetries *int `json:"lb_retries,omitempty"`

	// LBTryDuration is how long after the request's arrival a further attempt
	// may start. Default: no limit.
	LBTryDuration caddy.Duration `json:"lb_try_duration,omitempty"`

	// Wait has requests wait for a short time instead of refusing them: while each
	// backend that may get a request throttles, or while a limit of its caller by the
	// second or the minute is reached. Waiting requests go one by one, by tier and then
	// in the order in which they began to wait. Default: no request waits.
	Wait *waiting.Options `json:"wait,omitempty"`

	// Affinity sends related requests to the same account or backend, and
	// requests that name stored objects (responses, conversations, files and
	// similar) to the account that stores them. Default: the defaults of its
	// options.
	Affinity *affinity.Options `json:"affinity,omitempty"`

	attempt.PassiveHealth
	attempt.Options

	// ClientKeys are the keys with which callers may use the balancer. They are
	// accepted wherever SDKs put a key, and no backend gets them. Without these
	// and a ClientKeysFile, anyone may use the balancer. An empty list is an
	// error. Default: none.
	ClientKeys []ClientKey `json:"client_keys,omitempty"`

	// ClientKeysFile is the path of a file with more client keys. Each line has a
	// name, white space and a key, plain or as a digest. Empty lines and lines that
	// begin with # are ignored. The file is reloaded when it changes. A last line
	// without a line feed counts only when the file has not changed for a second.
	// If the file is missing or malformed, the previous keys stay valid and an
	// error is logged. A file without keys admits no one. An empty path is an
	// error. Default: none.
	ClientKeysFile *string `json:"client_keys_file,omitempty"`

	callers.Config

	// ReverseProxy holds options that are passed on to the reverse_proxy
	// handler. Its transport must be `http`, and configures the connections to
	// the backends. Upstreams, load balancing, passive health checks and
	// request buffers are not allowed, because openai_lb has its own options
	// for them. All replies pass through it, also openai_lb's own errors.
	// Default: none.
	ReverseProxy *reverseproxy.Handler `json:"reverse_proxy,omitempty"`

	replicas.State

	// Sender makes the attempts at the backends. Provision creates it from
	// the options of attempts, of passive health, and the transport of ReverseProxy.
	Sender *attempt.Sender `json:"-"`

	balancer *balancer
	reader   *reader
	link     *replicas.Link // nil without state
	proxy    *reverseproxy.Handler
	logger   *zap.Logger

	// keyFiles reads keys again that come from files.
	keyFiles keys.Reloader

	// splitsHeaders reports whether reverse_proxy gets only the fields of a request's
	// header that it reads.
	splitsHeaders bool
}

// ClientKey is a key with which a caller may use the balancer. A caller may
// have several keys.
type ClientKey struct {
	// Name identifies the caller in logs, metrics and placeholders. It has at
	// most 64 bytes. Required.
	Name string `json:"name"`

	// Key is the key itself, of at least 16 characters, or `sha256:` and its
	// SHA-256 digest in hex, which `printf %s "$KEY" | sha256sum` prints. {env.X}
	// and {file.X} are resolved at load. A file is reloaded when it changes.
	// Required.
	Key string `json:"key"`
}

// defaultPool is the name of a pool without one.
const defaultPool = "openai_lb"

// CredentialSource supplies the credentials that authenticate requests to a
// backend. Caddy modules in the namespace http.openai_lb.credentials implement
// it: `auth <name>` uses the module of that name.
type CredentialSource = keys.Source

// Credential authenticates a request: a header and its value, and the secret in
// the value.
type Credential = keys.Credential
