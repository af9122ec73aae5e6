// Package openailb is a load balancer for OpenAI and Azure OpenAI endpoints, as
// modules for Caddy. Clients use one address. Behind it are many backends, each
// with its own key, priority and weight. A backend that throttles gets no
// requests for as long as it asked, and the refused request fails over to
// another backend.
//
// # Usage
//
// A Caddyfile with two backends, the second of which gets the requests that the
// first one refuses:
//
//	llm.example.com {
//		openai_lb {
//			backend https://contoso-ptu.openai.azure.com {
//				api_key {env.PTU_KEY}
//			}
//			backend https://api.openai.com/v1 {
//				priority 2
//				api_key {env.OPENAI_KEY}
//			}
//			client_key alice {env.ALICE_KEY}
//		}
//	}
//
// The page docs/options.md describes the options in a Caddyfile, and the types
// [Handler], [Selection] and [Transport] those in JSON.
//
// # Modules
//
//   - http.handlers.openai_lb is [Handler], the directive openai_lb. It needs
//     no other module.
//   - http.reverse_proxy.selection_policies.openai_lb is [Selection], and
//     http.reverse_proxy.transport.openai_lb is [Transport]. Together, they
//     bring cooldowns and failover to a plain reverse_proxy, which keeps its
//     own upstreams and options: see docs/reverse-proxy.md. Selection without
//     Transport only chooses by priority and weight. Transport without
//     Selection has no effect.
//
// Importing this package registers them, and the packages in modules/, which
// add limits of callers and backends, replicas, WebSockets, the status page,
// the bill, the handover and commands. A build with the tag openai_lb_core has
// only the optional packages that further tags name: the tag openai_lb_status,
// for instance, adds modules/status.
//
// # Promises
//
//   - A backend that named a time in a 429 gets no request before that time
//     (TestAThrottledBackendRestsExactlyAsLongAsItAsked), unless the time is
//     longer than retry_after_max
//     (TestABackendCannotSayWhenItIsBackBeyondTheLimit).
//   - A request that may have been executed is not sent again, unless it is
//     inference without other effects (TestNothingIsDoneTwice,
//     TestARequestStopsWhereItMayHaveRun).
//   - A reply passes byte for byte, except for the rules in docs/replies.md
//     (TestRandomRepliesReachClientsAsTheyAre).
//   - A reply that its backend cut is cut for the client, too
//     (TestACutReplyIsCutForTheClient).
//   - A backend sees no other credential than its own
//     (TestInNoOrderDoesABackendSeeAnothersCredential), and no log, error or
//     reply shows a key (TestNoKeyIsEverShown).
//   - A request that names a stored object goes only to the account that stores
//     it (TestTheOwnerIsNeverReplaced).
//   - One request that is too large for every backend takes none of them from
//     other callers (TestOneHugeRequestTakesThePoolFromNobody).
//   - A reload keeps cooldowns (TestACooldownSurvivesReloadsUnderLoad). It cuts
//     no stream over HTTP/1.1 or HTTP/2 (TestAReloadLosesNoOpenStream).
//
// SECURITY.md has further promises, each with its tests.
//
// # Extensions
//
// Other Go modules can supply credentials for backends ([CredentialSource]),
// identify callers by tokens ([CallerIdentity]), and connect replicas with
// another store ([github.com/openai-lb/caddy-openai-lb/state.Engine]).
//
// # Terms
//
// A backend is drained by an operator or by weight 0, and silent if it accepts
// requests and sends nothing. The terms to know, as docs/glossary.md has them:
//
//   - Account: what a provider bills, and where it stores objects: responses,
//     conversations, files, batches. Backends with the same host and credential
//     share an account. With `account <name>`, other backends share one, too.
//   - Attempt: one request to one backend.
//   - Caller: a client with a name, which its client key or token says. Callers
//     may have limits.
//   - Class: what a reply means, such as served, throttled or failed.
//   - Cooldown: the time in which a backend gets no requests, for one model or
//     for all. Other projects call it an ejection.
//   - Hint: the part of a reply that says when its backend accepts requests
//     again.
//   - Member: a backend as one pool sees it, with a priority and a weight.
//   - Owner: the account that has a stored object. Requests that name the
//     object go there.
//   - Pool: the backends of one openai_lb block, with one name in logs and
//     metrics.
//   - Probe: the one request that goes first after a cooldown. If it is
//     refused, another cooldown begins. Other projects call this state
//     half-open.
//   - Reply: the result of an attempt: a response, or the reason why there is
//     none.
//   - Suspect: a backend with a cooldown because it failed: it could not be
//     reached, timed out or answered with a server error. A backend that is
//     silent, or fails its health checks, is a suspect, too. It is tried only
//     when no ready or drained backend is left.
//   - Throttle: a cooldown that a backend asked for, mostly by a 429 with a
//     Retry-After. It lasts as long as the backend asked, up to
//     retry_after_max, and the backend is not called before its end. If no time
//     was named, its length is a guess, and single requests may try earlier.
//   - Tier: a class of callers, and of their requests: what each caller may
//     use, and which share of the backends the tier keeps. A request over a
//     limit may get a less important tier.
package openailb

//go:generate go run ./docs/generate

import (
	"encoding/json"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/backend"
	"github.com/openai-lb/caddy-openai-lb/internal/calleroptions"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

func init() {
	caddy.RegisterModule(new(Handler))
	caddy.RegisterModule(new(Selection))
	caddy.RegisterModule(new(Transport))
}

// Handler balances requests for OpenAI's API over several backends.
//
// In JSON it has the options of the Caddyfile. Options that can be repeated are
// lists:
//
//	{
//		"handler": "openai_lb",
//		"backends": [
//			{"url": "https://contoso-ptu.openai.azure.com", "priority": 1, "api_key": "{env.PTU_KEY}"},
//			{"url": "https://api.openai.com/v1", "priority": 2, "api_key": "{env.OPENAI_KEY}", "model": [{"name": "gpt-5.5"}]}
//		],
//		"client_keys": [{"name": "alice", "key": "{env.ALICE_KEY}"}]
//	}
//
// The options of embedded structs are its options, too: docs/options.md lists
// all of them. Requests use a Handler concurrently after Provision.
//
// It sets these placeholders, for access logs and deferred headers:
//
//   - {http.openai_lb.backend}: the name of the backend that replied, or of the
//     last one that was tried. It is empty if the answer is not about one
//     backend.
//   - {http.openai_lb.class}: what the reply means, like served, client_error,
//     throttled or failed: a class of docs/replies.md. The balancer's own
//     answers are all_throttled, owner_throttled, all_busy, retry_later,
//     caller_limited, no_such_model, unauthenticated, invalid_request, models,
//     usage, ready, not_ready or error.
//   - {http.openai_lb.attempts}: how many backends were tried.
//   - {http.openai_lb.classes}: the class of the reply to each attempt, like
//     `ptu=throttled,east=served`.
//   - {http.openai_lb.affinity}: why that backend was chosen: owner (it stores
//     the objects that the request names), asked (their owner was not known, so
//     it was asked for them), home (the caller's objects are made there), cache
//     (the session's prompt is cached there), learned (a free choice, and the
//     reply named objects) or none.
//   - {http.openai_lb.affinity_result}: the outcome: hit, move or miss, as in
//     metrics. It is empty if the choice was free.
//   - {http.openai_lb.model}: the model that the request asks for, as the
//     client named it.
//   - {http.openai_lb.caller}: the name of the caller, by its client key or
//     token.
//   - {http.openai_lb.tier}: the number of the request's tier, counted from 1
//     in order of importance. It is empty if there is none.
//   - {http.openai_lb.tier_requested}, {http.openai_lb.tier_served}: the
//     service tiers, as in metrics. Both are empty if the request named none
//     and default served it.
//   - {http.openai_lb.limit}: the limit of the caller that refused the request,
//     like tokens/minute. It is empty if none did.
//   - {http.openai_lb.limit_allowed}, {http.openai_lb.limit_used},
//     {http.openai_lb.limit_requested}: how much of that limit may be used, how
//     much was used, and how much the request needs, as in its error.
//   - {http.openai_lb.pool}: the name of the pool.
//   - {http.openai_lb.waited}: the seconds that the request has waited because
//     of the option wait. It is empty if it did not wait.
//   - {http.openai_lb.time_to_first_byte}: the seconds from the request's
//     arrival to the first byte of the reply's body.
//   - {http.openai_lb.tokens_input}, {http.openai_lb.tokens_cached}: the tokens
//     of the prompt, and those of them that came from a cache.
//   - {http.openai_lb.tokens_output}, {http.openai_lb.tokens_reasoning}: the
//     tokens of the answer, and those of them that were not shown.
//   - {http.openai_lb.tokens_estimated}: true if the tokens are an estimate,
//     because the stream was aborted.
//   - {http.openai_lb.aborted_after}: the seconds until an aborted reply ended.
type Handler struct {
	// Pool is the name of the pool in logs, metrics and the admin API. Default:
	// `openai_lb`; further pools of a file are `openai_lb_2` and so on.
	//
	// Two pools may have the same name only if all of their options are the
	// same.
	//
	//	pool <name>
	Pool string `json:"pool,omitempty"`

	// Backends are the endpoints to choose from. Required, here or by
	// backends_from_env.
	//
	//	backend <url> {
	Backends []*backend.Backend `json:"backends,omitempty"`

	// BackendsFromEnv is the prefix of environment variables that describe
	// Azure backends. Default: none are read.
	//
	// docs/options.md lists the variables. They are read at load, and their
	// values never appear in the config.
	//
	//	backends_from_env [<prefix>]
	BackendsFromEnv string `json:"backends_from_env,omitempty"`

	// LBPolicyRaw is the selection policy of `reverse_proxy` that chooses among
	// the ready backends of one priority. Default: at random, by `weight`.
	//
	//	lb_policy <name> [<args...>]
	LBPolicyRaw json.RawMessage `json:"lb_policy,omitempty" caddy:"namespace=http.reverse_proxy.selection_policies inline_key=policy"`

	// LBRetries is how many further backends a request may try, each once at
	// most. Default: all.
	//
	//	lb_retries <n>
	LBRetries *int `json:"lb_retries,omitempty"`

	// LBTryDuration is the time after a request's arrival within which a
	// further attempt may start. Default: no limit.
	//
	//	lb_try_duration <duration>
	LBTryDuration caddy.Duration `json:"lb_try_duration,omitempty"`

	// FairShares is whether the callers of a tier get equal parts of what the
	// tier gets while backends throttle; a caller that asks for less than its
	// part gets nearly all of that. Callers without a tier count as one tier.
	// Default: a caller that sends more requests gets a larger part.
	//
	//	fair_shares
	FairShares bool `json:"fair_shares,omitempty"`

	// Wait is how long requests wait while all backends throttle, up to 10s.
	// Only as many wait as the backends are known to accept in that time.
	// Default: no request waits.
	//
	//	wait <duration>
	Wait caddy.Duration `json:"wait,omitempty"`

	// Affinity sends related requests to the same account or backend. Default:
	// the defaults of its options.
	//
	//	affinity {
	Affinity *affinity.Options `json:"affinity,omitempty"`

	attempt.PassiveHealth

	// RatelimitHeaders is whose limits the headers `x-ratelimit-*` show:
	// `caller`, `pool` or `off`. Default: `caller`.
	//
	//	ratelimit_headers caller|pool|off
	RatelimitHeaders string `json:"ratelimit_headers,omitempty"`

	// ReadyPath is the path of readiness probes. Default: none.
	//
	//	ready_path <path>
	ReadyPath string `json:"ready_path,omitempty"`

	attempt.Options

	// ClientKeys are names of callers, and keys with which they may use the
	// balancer; repeatable. Default: anyone may use it.
	//
	// An empty list is an error.
	//
	//	client_key <name> <key>
	ClientKeys []ClientKey `json:"client_keys,omitempty"`

	// ClientKeysFile is a file with a name and a key on each line. Default:
	// none.
	//
	// It is reloaded when it changes. An empty path is an error. A file without
	// keys admits no one.
	//
	//	client_keys_file <path>
	ClientKeysFile *string `json:"client_keys_file,omitempty"`

	keys.TokenOption

	calleroptions.Config

	// TransportRaw is Caddy's own `http` transport, which connects to the
	// backends: TLS, proxies, timeouts. Default: its defaults.
	//
	// It adds no compression. Without options, it has a larger write buffer,
	// more idle connections, which are closed before providers close theirs,
	// and pings that find dead HTTP/2 connections. `proxy_protocol` is not
	// available.
	//
	//	transport http {
	//	    <options of the http transport...>
	//	}
	TransportRaw json.RawMessage `json:"transport,omitempty" caddy:"namespace=http.reverse_proxy.transport inline_key=protocol"`

	attempt.WebSocketOptions

	// StateRaw is the engine by which replicas share their state, such as
	// `redis`. Default: replicas share nothing.
	//
	//	state <engine> [{...}]
	StateRaw json.RawMessage `json:"state,omitempty" caddy:"namespace=http.openai_lb.state inline_key=engine"`

	// Sender makes the attempts at the backends. It is not an option: Provision
	// creates it.
	Sender *attempt.Sender `json:"-"`

	logger      *zap.Logger
	trail       *observe.Trail
	warnAtEnd   func()        // warns of the sites of a config that has not started
	keyFiles    keys.Reloader // reads keys again that come from files
	clientKeys  *keys.Clients // nil if callers need no key
	shared      seam.SharedOptions
	replication seam.Replication
	balancer    *balancer
	admission   seam.Admission // nil if callers have no limits
	reader      *reader
}

// ClientKey is a key with which a caller may use the balancer. A caller may
// have several keys.
type ClientKey struct {
	// Name identifies the caller in logs, metrics and placeholders. It has at
	// most 64 bytes. Required.
	Name string `json:"name"`

	// Key is the key itself, of at least 16 characters, or `sha256:` and its
	// SHA-256 digest in hex, which `printf %s "$KEY" | sha256sum` prints.
	// {env.X} and {file.X} are resolved at load. A file is reloaded when it
	// changes. Required.
	Key string `json:"key"`
}

// defaultPool is the name of a pool without one.
const defaultPool = "openai_lb"

// CredentialSource supplies the credentials that authenticate requests to a
// backend. Caddy modules in the namespace http.openai_lb.credentials implement
// it: `auth <name>` uses the module of that name. Many requests use a source
// concurrently.
//
// A source has these methods, which package keys describes:
//
//	// Credential returns the credential for one attempt. If the source has a
//	// valid one, it must return immediately. After an error, the request
//	// fails over, and the backend gets a cooldown of a minute, or less if the
//	// error has a method RetryAfter() time.Duration that returns less.
//	Credential(ctx context.Context) (Credential, error)
//
//	// Renew returns another credential after the backend refused this one
//	// with status 401, or the same one if there is no other.
//	Renew(ctx context.Context, refused Credential) (Credential, error)
//
//	// Identity identifies the account, and contains no secret. State of the
//	// backend survives a reload while its URL and Identity stay the same.
//	Identity() string
type CredentialSource = keys.Source

// Credential authenticates a request. Its fields are strings: Header and Value
// are the header, and Secret is the key or token in Value, which no reply or
// log may repeat. If Secret is empty, all of Value counts as the secret, except
// its scheme, such as Bearer.
type Credential = keys.Credential

// CallerIdentity identifies callers by tokens, as an Identity. Caddy modules in
// the namespace http.openai_lb.caller_identity implement it: `caller_identity
// <name>` uses the module of that name. Many requests use it concurrently.
//
// It has these methods, which package keys describes:
//
//	// Identify returns the caller of a token. The token has the form of a
//	// JWT, and is not checked. The context ends with the request, or 5 s
//	// after its first token. After an error, the client gets a 401, and the
//	// token reaches no backend.
//	Identify(ctx context.Context, token string) (*Identity, error)
//
//	// Tiers returns the tiers that Identify may return. It is never nil.
//	Tiers() []string
type CallerIdentity = keys.CallerIdentity

// Identity has the claims of a token about its caller. Name is the caller's
// name, and Tier its tier, or empty if the token names none. Issued is the time
// when the token was issued: if a caller has several tokens, the newest one
// decides the tier.
type Identity = keys.Identity
