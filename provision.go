package openailb

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/backend"
	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/ledger"
	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/replicas"
	"github.com/openai-lb/caddy-openai-lb/internal/waiting"
)

// CaddyModule returns the Caddy module information.
func (*Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.handlers.openai_lb",
		New: func() caddy.Module { return new(Handler) },
	}
}

// UnmarshalJSON implements json.Unmarshaler.
func (h *Handler) UnmarshalJSON(data []byte) error {
	type options Handler
	return directive.UnmarshalJSON(data, (*options)(h))
}

// Provision sets up the handler. It makes no request and starts no goroutine.
func (h *Handler) Provision(ctx caddy.Context) error {
	h.logger = ctx.Logger()
	h.keyFiles.Logger = h.logger
	h.reader = &reader{readyPath: h.ReadyPath}
	unnamed := h.Pool == "" || pools.IsNumbered(h.Pool, defaultPool)
	h.Pool = cmp.Or(h.Pool, defaultPool)
	if err := pools.Default.Claim(ctx, h.Pool, h); err != nil {
		return err
	}
	config, err := replicas.ConfigDigest(h)
	if err != nil {
		return err
	}
	if unnamed && pools.Default.Unnamed(ctx, h.Pool, h.namesCallers()) {
		h.logger.Warn("several pools have no name: give each one a name, because reordering them in the file would give callers the stored objects of others")
	}
	if err := provisionTrail(ctx, h, config); err != nil {
		return err
	}
	if err := provisionClientKeys(ctx, h); err != nil {
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
	if err := backend.Provision(ctx, h.Backends); err != nil {
		return err
	}
	if h.RatelimitHeaders = cmp.Or(h.RatelimitHeaders, rateLimitsOfCaller); !slices.Contains(rateLimitsOf, h.RatelimitHeaders) {
		return fmt.Errorf("ratelimit_headers '%s' is not one of %s", h.RatelimitHeaders, strings.Join(rateLimitsOf, ", "))
	}
	if h.LBRetries != nil && *h.LBRetries < 0 {
		return fmt.Errorf("lb_retries '%d' is not a whole number of 0 or more", *h.LBRetries)
	}
	if h.LBTryDuration < 0 {
		return fmt.Errorf("lb_try_duration '%s' is not a duration above 0", time.Duration(h.LBTryDuration))
	}
	if err := h.Wait.Check(); err != nil {
		return err
	}
	if pools.HasCountingFallback(h.LBPolicyRaw) {
		h.logger.Warn(pools.FallbackCountsNothing)
	}
	policy, err := pools.LoadPolicy(ctx, h, h.LBPolicyRaw)
	if err != nil {
		return err
	}
	if policy != nil && slices.ContainsFunc(h.Backends, func(b *backend.Backend) bool { return *b.Weight > 1 }) {
		h.logger.Warn(pools.WeightIgnored)
	}
	for _, warning := range backend.Mistakes(h.Backends) {
		h.logger.Warn(warning)
	}
	if err := h.warnOfSites(ctx); err != nil {
		return err
	}
	if err := h.provisionSender(ctx); err != nil {
		return err
	}
	if err := h.provisionBalancer(ctx, policy); err != nil {
		return err
	}
	if err := metrics.Register(ctx.GetMetricsRegistry()); err != nil {
		return err
	}
	if err := h.provisionProxy(ctx); err != nil {
		return err
	}
	pools.Default.Add(&h.balancer.Entry) // whose upstreams are set up: the admin API and the metrics read them
	for _, t := range h.balancer.targets {
		t.startFresh(h.link, h.trail)
	}
	h.link.Configured(h.Pool, config)
	h.link.Open(h.balancer.Pool)
	return nil
}

func (h *Handler) provisionBalancer(ctx caddy.Context, policy reverseproxy.Selector) error {
	events, err := observe.NewEvents(ctx, h.Pool)
	if err != nil {
		return err
	}
	if h.link, err = h.Join(ctx); err != nil {
		return err
	}
	if h.link != nil {
		if err := observe.On(ctx, observe.Started, h.link.Start); err != nil {
			return err
		}
	}
	d, targets := h.reader, make([]*target, len(h.Backends))
	for i, b := range h.Backends {
		targets[i] = targetOf(b)
		h.link.Name(targets[i].Member, b.NameForReplicas())
		d.passesThrough = d.passesThrough || b.Credentials.Passthrough
		d.tellsModels = d.tellsModels || b.Models != nil || b.Deployment != ""
		if key := b.Key(); key != nil && key.InFile() {
			h.keyFiles.Add("api_key of backend "+b.Name, key.Read)
		}
	}
	h.link.Secrets(h.keyFiles.Add)
	d.buffers, d.models = h.Sender.RequestBuffers, backend.ModelsOf(h.Backends)
	d.rechecker = backend.Rechecker{Context: ctx, Transport: h.Sender.RoundTripper, Backends: h.Backends, HeaderUp: attempt.HeaderUpOf(h.ReverseProxy)}
	listeners, lists := []pool.Listener{h.link, &d.rechecker}, waiting.New(h.Wait, h.QuotaTiers() != nil)
	if lists != nil {
		if err := observe.On(ctx, observe.Stopping, lists.Close); err != nil {
			return err
		}
		listeners = append(listeners, wakes{lists})
	}
	h.balancer = newBalancer(h.Pool, targets, h.Sender, events, listeners...)
	h.balancer.waiting, h.balancer.ledger = lists, ledger.Open(h.Pool, ctx.Storage(), h.logger)
	h.balancer.Rechecker, h.balancer.Secrets = &d.rechecker, &h.keyFiles
	h.balancer.reader, h.balancer.policy, h.balancer.rateLimits = h.reader, policy, h.RatelimitHeaders
	var prompts *affinity.PromptCache // nil: with one account, or a policy of the operator's, there is none by default
	if policy == nil && slices.ContainsFunc(h.Backends, func(b *backend.Backend) bool { return b.AccountKey != h.Backends[0].AccountKey }) {
		prompts = new(affinity.PromptCache)
	}
	if d.promptCache, err = h.Affinity.OpenPromptCache(h.Pool, h.balancer.Pool, prompts); err != nil {
		return err
	}
	if err := provisionCallers(ctx, h); err != nil {
		return err
	}
	return h.provisionAffinity(ctx)
}

// checkAffinity checks what depends on other options: whether callers are named.
func (h *Handler) checkAffinity(named bool) error {
	if h.Affinity != nil && h.Affinity.Callers == affinity.Strict && !named {
		return errors.New("affinity: callers strict requires client_key, client_keys_file or caller_identity, because callers need names")
	}
	return nil
}

func (h *Handler) provisionAffinity(ctx caddy.Context) (err error) {
	if err := h.checkAffinity(h.reader.clientKeys != nil); err != nil {
		return err
	}
	config := affinity.Config{Options: h.Affinity, Pool: h.Pool, Link: h.link, Logger: h.logger}
	var backends []*backend.Backend // in the order of targets
	for _, t := range h.balancer.targets {
		backends, config.Accounts = append(backends, t.backend), append(config.Accounts, t.backend.AccountKey)
	}
	if h.reader.affinity, err = affinity.New(ctx, config); err != nil {
		return err
	}
	for _, names := range h.reader.callers.Sets() {
		h.reader.entitlements = append(h.reader.entitlements, affinity.Entitle(names, backends, h.reader.affinity))
	}
	return observe.On(ctx, observe.Started, func() { h.reader.affinity.Start(); h.balancer.ledger.Start() })
}

// provisionFromEnv adds the backends that the environment describes. That
// happens here and not when the Caddyfile is read, so that they never appear in
// the config.
func (h *Handler) provisionFromEnv() error {
	if h.BackendsFromEnv == "" {
		return nil
	}
	backends, variables, idle, err := backend.FromEnv(h.BackendsFromEnv)
	if err != nil {
		return err
	}
	if h.Backends = append(h.Backends, backends...); len(h.Backends) == 0 {
		return fmt.Errorf("backends_from_env found no backend: expected variables like %s", backend.ExampleVariables(h.BackendsFromEnv))
	}
	// the sample has one limit for how long a request may be idle
	for _, d := range []*caddy.Duration{&h.ResponseHeaderTimeout, &h.StreamFirstEventTimeout, &h.StreamIdleTimeout} {
		*d = cmp.Or(*d, caddy.Duration(idle))
	}
	h.logger.Info("read backends from the environment", zap.Strings("variables", variables), zap.Duration("timeout", idle))
	return nil
}

// Cleanup releases what Provision acquired. It also runs after a Provision that
// failed halfway.
func (h *Handler) Cleanup() error {
	errs := []error{h.link.Close()}
	if h.balancer != nil {
		h.balancer.waiting.Close()
		pools.Default.Remove(&h.balancer.Entry)
		h.balancer.Pool.Close()
		metrics.Left()
		errs = append(errs, h.balancer.ledger.Close())
		for _, t := range h.balancer.targets {
			errs = append(errs, pools.UnloadHealth(t.backend.HealthKey))
		}
	}
	if d := h.reader; d != nil {
		errs = append(errs, d.affinity.Close(), d.callers.Close(), d.promptCache.Close())
	}
	// a reverse_proxy that failed before its upstreams has nothing to clean up
	if h.proxy != nil && h.proxy.Upstreams[0].Host != nil {
		errs = append(errs, h.proxy.Cleanup())
	}
	if h.Sender != nil {
		errs = append(errs, h.Sender.Cleanup())
	}
	return errors.Join(errs...)
}

// provisionSender sets up the connections, and with them passive health.
func (h *Handler) provisionSender(ctx caddy.Context) error {
	h.Sender = &attempt.Sender{PassiveHealth: h.PassiveHealth, Options: h.Options}
	if h.ReverseProxy != nil && h.ReverseProxy.TransportRaw != nil {
		h.Sender.HTTP = new(reverseproxy.HTTPTransport)
		if err := attempt.DecodeConnections(h.ReverseProxy.TransportRaw, h.Sender.HTTP); err != nil {
			return fmt.Errorf("reverse_proxy: transport: %w", err)
		}
	}
	return h.Sender.Provision(ctx, h.ReverseProxy)
}

// provisionProxy sets up the reverse_proxy that carries the requests.
func (h *Handler) provisionProxy(ctx caddy.Context) error {
	proxy := new(reverseproxy.Handler)
	if h.ReverseProxy != nil {
		*proxy = *h.ReverseProxy
		if err := attempt.RefuseOwnOptions(proxy); err != nil {
			return err
		}
	}
	if attempt.NamesUpstream(proxy) {
		h.logger.Warn("header_up has a placeholder of the upstream, which openai_lb chooses later: use the option header of each backend")
	}
	proxy.TransportRaw = nil
	schemes := make(map[string]string)
	for _, b := range h.Backends {
		schemes[b.Dial()] = b.Origin.Scheme
	}
	proxy.Transport = loop{h.Sender, schemes}
	proxy.LoadBalancing = &reverseproxy.LoadBalancing{SelectionPolicy: attempt.Ourselves} // the loop chooses a backend
	for _, t := range h.balancer.targets {
		proxy.Upstreams = append(proxy.Upstreams, t.upstream)
	}
	h.proxy = proxy
	logsHeaders := ctx.Logger(proxy).Core().Enabled(zap.DebugLevel)
	h.balancer.hidesHeader = !logsHeaders
	h.splitsHeaders = !logsHeaders && proxy.Headers == nil && proxy.Rewrite == nil && proxy.HandleResponse == nil
	if err := proxy.Provision(ctx); err != nil {
		return fmt.Errorf("reverse_proxy: %w", err)
	}
	return nil
}

// checkReadyPath says what is wrong with ready_path, if anything is.
func checkReadyPath(path string) error {
	if !strings.HasPrefix(path, "/") || strings.ContainsAny(path, "?#*{}") {
		return fmt.Errorf("ready_path '%s' is not a path that begins with / and has no wildcard or query, such as /readyz", path)
	}
	return nil
}

// Interface guards
var (
	_ caddy.Provisioner           = (*Handler)(nil)
	_ caddy.CleanerUpper          = (*Handler)(nil)
	_ caddyhttp.MiddlewareHandler = (*Handler)(nil)
)
