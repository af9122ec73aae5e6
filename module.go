// Package openailb is a load balancer for OpenAI and Azure OpenAI endpoints,
// as modules for Caddy: one address for clients, many backends behind it, each
// with its own key, priority and weight. A backend that throttles rests for as
// long as it asked to, and the request that met the 429 goes to another one.
package openailb

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

func init() {
	caddy.RegisterModule(new(Handler))
}

// Handler balances requests for OpenAI's API over backends.
//
// It is a reverse_proxy with a selection policy and a transport of its own,
// and sets these placeholders:
//
// Placeholder | Description
// ------------|-------------
// `{http.openai_lb.backend}` | The name of the last backend tried, which is the one that answered
// `{http.openai_lb.class}` | What its reply was taken for: served, client_error, throttled, quota, too_large, overloaded, failed, credential, not_permitted, no_model, unreachable, timeout, broken_stream; unauthenticated if it had no client key, and nothing if no backend was tried
// `{http.openai_lb.caller}` | The name of the caller, by its client key
// `{http.openai_lb.attempts}` | How many backends were tried
// `{http.openai_lb.model}` | The model that the request asks for, as the client named it
type Handler struct {
	// Backends are the endpoints to choose from. At least one is required,
	// here or by backends_from_env.
	Backends []*Backend `json:"backends,omitempty"`

	// BackendsFromEnv adds the Azure backends that environment variables
	// describe whose names begin with this, `BACKEND` for those of Microsoft's
	// sample openai-aca-lb: `BACKEND_<n>_URL`, `BACKEND_<n>_PRIORITY`,
	// `BACKEND_<n>_APIKEY` (without it, auth is `azure_identity`) and
	// `BACKEND_<n>_DEPLOYMENT_NAME`, where `<n>` is a number or any word
	// without an underscore. It also makes HTTP_TIMEOUT_SECONDS (100 if it is
	// not set) the default of response_header_timeout,
	// stream_first_event_timeout and stream_idle_timeout. The variables are
	// read at load and stand in no config. Default: none are read.
	BackendsFromEnv string `json:"backends_from_env,omitempty"`

	// ReadyPath is a path at which GET tells whether requests can be served:
	// 200 if any backend can be used, 503 if all are unreachable, refuse their
	// credential, have no budget left, or fail active health checks. A model
	// that is throttled everywhere does not count: the 429 its clients get is
	// the right answer, and another replica would have no better one. A
	// matcher before the handler must let the path through. Default: none.
	ReadyPath string `json:"ready_path,omitempty"`

	// LBPolicyRaw chooses among the backends of a priority: any selection
	// policy of reverse_proxy's. Default: at random, by weight.
	LBPolicyRaw json.RawMessage `json:"lb_policy,omitempty" caddy:"namespace=http.reverse_proxy.selection_policies inline_key=policy"`

	// LBRetries is how many further backends a request may try. Default: all.
	LBRetries *int `json:"lb_retries,omitempty"`

	// LBTryDuration is how long after its arrival a request may still be sent
	// to a further backend. Default: without end.
	LBTryDuration caddy.Duration `json:"lb_try_duration,omitempty"`

	Failover

	// ClientKeys are the keys of those who may use the balancer. They are
	// accepted wherever SDKs put a key, and go to no backend. Default: none,
	// and without a ClientKeysFile everybody may.
	ClientKeys []ClientKey `json:"client_keys,omitempty"`

	// ClientKeysFile is a file with more of them: on each line a name, white
	// space and a key, plain or as a digest; empty lines and those that begin
	// with # mean nothing. It is read again when it changes. Default: none.
	ClientKeysFile string `json:"client_keys_file,omitempty"`

	// ReverseProxy holds options of the reverse_proxy handler, which are
	// passed on to it. A transport there must be `http` and configures the
	// connections to the backends. Upstreams, load balancing, passive health
	// checks and request buffers are openai_lb's own. Default: none.
	ReverseProxy *reverseproxy.Handler `json:"reverse_proxy,omitempty"`

	pool      *pool
	proxy     *reverseproxy.Handler
	transport *Transport
	logger    *zap.Logger

	// callers are those who may use the balancer. nil: everybody.
	callers *callers

	// secretFiles are those that the keys come from.
	secretFiles secretFiles

	// passesThrough tells that a backend wants the callers' own credentials.
	passesThrough bool

	// models are all models there are. It is nil unless every backend names
	// its own.
	models []string
}

// CaddyModule returns the Caddy module information.
func (*Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.handlers.openai_lb",
		New: func() caddy.Module { return new(Handler) },
	}
}

// Provision sets up the handler. It makes no request and starts no goroutine
// of its own.
func (h *Handler) Provision(ctx caddy.Context) error {
	h.logger = ctx.Logger()
	h.secretFiles.logger = h.logger
	if err := h.provisionCallers(); err != nil {
		return err
	}
	if h.ReadyPath != "" {
		if err := checkReadyPath(h.ReadyPath); err != nil {
			return err
		}
	}
	if err := h.provisionFromEnv(); err != nil {
		return err
	}
	if err := h.provisionBackends(ctx); err != nil {
		return err
	}
	if h.LBRetries != nil && *h.LBRetries < 0 {
		return fmt.Errorf("lb_retries %d: expected 0 or more", *h.LBRetries)
	}
	if h.LBTryDuration < 0 {
		return fmt.Errorf("lb_try_duration %s: expected a duration above 0", time.Duration(h.LBTryDuration))
	}
	var policy reverseproxy.Selector
	if h.LBPolicyRaw != nil {
		module, err := ctx.LoadModule(h, "LBPolicyRaw")
		if err != nil {
			return fmt.Errorf("lb_policy: %w", err)
		}
		policy = module.(reverseproxy.Selector)
	}
	if err := h.provisionTransport(ctx); err != nil {
		return err
	}
	members := make([]*member, len(h.Backends))
	for i, b := range h.Backends {
		members[i] = b.member(h.logger)
		h.passesThrough = h.passesThrough || members[i].passesThrough()
	}
	for _, b := range h.Backends {
		if key, ok := b.source.(*apiKey); ok && key.inFile {
			h.secretFiles.add("api_key of backend "+b.Name, key.read)
		}
	}
	h.models = served(h.Backends)
	h.pool = newPool(members, policy, h.AllThrottled == forwardThrottled)
	if err := registerMetrics(ctx.GetMetricsRegistry()); err != nil {
		return err
	}
	return h.provisionProxy(ctx)
}

func (h *Handler) provisionBackends(ctx caddy.Context) error {
	if len(h.Backends) == 0 {
		return errors.New("no backend: expected at least one `backend <url>`")
	}
	names := make(map[string]bool)
	for i, b := range h.Backends {
		if b == nil {
			return fmt.Errorf("backend %d is null", i+1)
		}
		if err := b.provision(ctx); err != nil {
			return fmt.Errorf("%s: %w", b.label(i), err)
		}
		if b.Name != "" && names[b.Name] {
			return fmt.Errorf("%s: the name is taken by another backend", b.label(i))
		}
		names[b.Name] = true
	}
	for _, b := range h.Backends {
		for n := 1; b.Name == ""; n++ {
			name := b.url.Hostname()
			if n > 1 {
				name += "-" + strconv.Itoa(n)
			}
			if !names[name] {
				names[name] = true
				b.Name = name
			}
		}
	}
	return nil
}

// provisionTransport sets up the transport, and with it what Failover says.
func (h *Handler) provisionTransport(ctx caddy.Context) error {
	h.transport = &Transport{Failover: h.Failover, schemes: make(map[string]string)}
	if h.ReverseProxy != nil && h.ReverseProxy.TransportRaw != nil {
		h.transport.HTTP = new(reverseproxy.HTTPTransport)
		if err := decodeHTTPTransport(h.ReverseProxy.TransportRaw, h.transport.HTTP); err != nil {
			return fmt.Errorf("reverse_proxy: transport: %w", err)
		}
	}
	for _, b := range h.Backends {
		h.transport.schemes[b.dial()] = b.url.Scheme
	}
	return h.transport.Provision(ctx)
}

// decodeHTTPTransport reads the config of reverse_proxy's http transport.
func decodeHTTPTransport(raw json.RawMessage, into *reverseproxy.HTTPTransport) error {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(raw, &fields); err != nil {
		return err
	}
	if string(fields["protocol"]) != `"http"` {
		return fmt.Errorf("protocol %s: expected \"http\"", fields["protocol"])
	}
	delete(fields, "protocol")
	rest, err := json.Marshal(fields)
	if err != nil {
		return err
	}
	return caddy.StrictUnmarshalJSON(rest, into)
}

// provisionProxy sets up the reverse_proxy that carries the requests.
func (h *Handler) provisionProxy(ctx caddy.Context) error {
	proxy := new(reverseproxy.Handler)
	if h.ReverseProxy != nil {
		*proxy = *h.ReverseProxy
		if err := refuseOwnOptions(proxy); err != nil {
			return err
		}
	}
	proxy.TransportRaw = nil
	proxy.Transport = h.transport
	proxy.LoadBalancing = &reverseproxy.LoadBalancing{
		SelectionPolicy: chosen{},
		Retries:         len(h.Backends),
	}
	for _, m := range h.pool.members {
		proxy.Upstreams = append(proxy.Upstreams, m.upstream)
	}
	h.proxy = proxy
	return proxy.Provision(ctx)
}

// chosen hands out the member that the handler or the transport has chosen.
type chosen struct{}

// Select implements reverseproxy.Selector.
func (chosen) Select(_ reverseproxy.UpstreamPool, r *http.Request, _ http.ResponseWriter) *reverseproxy.Upstream {
	if m := r.Context().Value(exchangeCtxKey{}).(*exchange).take(); m != nil {
		return m.upstream
	}
	return nil
}

// refuseOwnOptions refuses options of reverse_proxy's that openai_lb sets itself.
func refuseOwnOptions(proxy *reverseproxy.Handler) error {
	for _, option := range []struct {
		name string
		used bool
	}{
		{"upstreams (to)", len(proxy.Upstreams) > 0},
		{"dynamic_upstreams (dynamic)", proxy.DynamicUpstreamsRaw != nil},
		{"load_balancing (lb_…)", proxy.LoadBalancing != nil},
		{"passive health checks", proxy.HealthChecks != nil && proxy.HealthChecks.Passive != nil},
		{"request_buffers", proxy.RequestBuffers != 0},
	} {
		if option.used {
			return fmt.Errorf("reverse_proxy: %s is not allowed there: use openai_lb's own options", option.name)
		}
	}
	return nil
}

// Cleanup gives back what Provision took. It runs after a Provision that
// failed halfway, too.
func (h *Handler) Cleanup() error {
	var errs []error
	if h.pool != nil {
		for _, m := range h.pool.members {
			_, err := healths.Delete(m.backend.health)
			errs = append(errs, err)
		}
	}
	// a reverse_proxy that did not come to its upstreams has nothing to give back
	if h.proxy != nil && h.proxy.Upstreams[0].Host != nil {
		errs = append(errs, h.proxy.Cleanup())
	}
	if h.transport != nil {
		errs = append(errs, h.transport.Cleanup())
	}
	return errors.Join(errs...)
}

// ServeHTTP reads the request once and has reverse_proxy send it to the
// backends, one after the other, until one serves it.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	h.secretFiles.refresh(time.Now())
	if h.asksReady(r) {
		return writeResponse(w, h.answerReady(r))
	}
	ex := newExchange(h.pool, w, r, h.maxAttempts(), h.tryDuration(r))
	ex.transport = h.transport
	defer ex.finish()
	defer ex.report()

	proxied := ex.proxied()
	if refusal, refused := h.admit(ex); refused {
		return refusal.write(w, r)
	}
	if problem := openaiapi.CheckPath(r.URL.EscapedPath()); problem != "" {
		return apiError{http.StatusBadRequest, problem,
			"invalid_request_error", "invalid_path"}.write(w, r)
	}
	// the body of an extended CONNECT is a WebSocket's stream (RFC 8441)
	if r.Method != http.MethodConnect {
		if err := ex.body.read(r, h.transport.RequestBuffers); err != nil {
			return writeResponse(w, ex.refuseBody(r, err))
		}
		proxied.Body, proxied.ContentLength = http.NoBody, 0
		if ex.body.length != 0 {
			proxied.Body, proxied.ContentLength = goneBody{}, ex.body.length
		}
	}
	ex.asked = readAsked(r, ex.body.prefix)
	ex.asked.anonymous = h.passesThrough && ex.credentials.none()
	if h.models != nil {
		if res := answerModels(r, h.models); res != nil {
			return writeResponse(w, res)
		}
	}
	if ex.next() == nil {
		return writeResponse(w, ex.answer(r))
	}
	return h.proxy.ServeHTTP(w, proxied, next)
}

func (h *Handler) maxAttempts() int {
	if h.LBRetries == nil {
		return 0
	}
	return *h.LBRetries + 1
}

// tryDuration is how long further backends may be tried for a request: no
// longer than lb_try_duration, nor than its caller waits. OpenAI's SDK for
// Python says how long that is, in seconds.
func (h *Handler) tryDuration(r *http.Request) time.Duration {
	duration := time.Duration(h.LBTryDuration)
	seconds, err := strconv.ParseFloat(r.Header.Get("X-Stainless-Read-Timeout"), 64)
	if err != nil || !(seconds > 0 && seconds < time.Hour.Seconds()) {
		return duration
	}
	if patience := time.Duration(seconds * float64(time.Second)); duration == 0 || patience < duration {
		return patience
	}
	return duration
}

// Interface guards
var (
	_ caddy.Provisioner           = (*Handler)(nil)
	_ caddy.CleanerUpper          = (*Handler)(nil)
	_ caddyhttp.MiddlewareHandler = (*Handler)(nil)
	_ caddyfile.Unmarshaler       = (*Handler)(nil)
)
