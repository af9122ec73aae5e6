package openailb

import (
	"cmp"
	"context"
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
	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
	"github.com/openai-lb/caddy-openai-lb/internal/waiting"
	"github.com/openai-lb/caddy-openai-lb/state"
)

// CaddyModule returns the Caddy module information.
func (*Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.handlers.openai_lb",
		New: func() caddy.Module { return new(Handler) },
	}
}

// Provision sets up the handler. It makes no request and starts no goroutine.
func (h *Handler) Provision(ctx caddy.Context) error {
	h.logger = ctx.Logger()
	places := h.takePlaces()
	err := h.provision(ctx)
	if err == nil || places == nil {
		return err
	}
	// Caddy prefixes the error with its path to the module, which hides the
	// line.
	err = places.WrapErr(err)
	h.logger.Error("the configuration is not valid", zap.Error(err))
	return err
}

// provision sets up the parts of the handler, each from those before it: the
// callers' keys, the backends, the connections, the pool, the limits of
// callers, and the reader of requests. After an error, Cleanup releases the
// parts that were made.
func (h *Handler) provision(ctx caddy.Context) error {
	h.keyFiles.Logger, h.replication = h.logger, seam.Alone{}
	config, err := h.claimName(ctx)
	if err != nil {
		return err
	}
	if h.trail, err = h.newTrail(ctx, config); err != nil {
		return err
	}
	if h.shared, err = seam.Callers().Shared(&h.Config); err != nil {
		return err
	}
	if h.clientKeys, err = h.newClientKeys(ctx); err != nil {
		return err
	}
	if err := h.checkOptions(); err != nil {
		return err
	}
	if err := h.provisionBackends(ctx); err != nil {
		return err
	}
	policy, err := h.loadPolicy(ctx)
	if err != nil {
		return err
	}
	if h.Sender, err = h.newSender(ctx); err != nil {
		return err
	}
	if h.replication, err = h.joinReplicas(ctx); err != nil {
		return err
	}
	if h.balancer, err = h.newBalancer(ctx, policy); err != nil {
		return err
	}
	if err := h.newQuotas(ctx); err != nil {
		return err
	}
	if h.admission, err = h.newAdmission(ctx); err != nil {
		return err
	}
	if h.reader, err = h.newReader(ctx, policy); err != nil {
		return err
	}
	if err := metrics.Register(ctx.GetMetricsRegistry()); err != nil {
		return err
	}
	if err := h.warnOfSites(ctx); err != nil {
		return err
	}
	h.publish(config)
	return nil
}

// claimName registers the pool's name, and returns the digest of its options.
func (h *Handler) claimName(ctx caddy.Context) (config string, err error) {
	unnamed := h.Pool == "" || pools.IsNumbered(h.Pool, defaultPool)
	h.Pool = cmp.Or(h.Pool, defaultPool)
	if err := pools.Default.Claim(ctx, h.Pool, h); err != nil {
		return "", err
	}
	if unnamed && pools.Default.Unnamed(ctx, h.Pool, h.namesCallers()) {
		h.logger.Warn("several pools have no name: give each one a name, because reordering them in the file would give callers the stored objects of others")
	}
	return observe.ConfigDigest(h)
}

// checkOptions checks the options that no other part checks, and sets their
// defaults.
func (h *Handler) checkOptions() error {
	if h.ReadyPath != "" {
		if err := checkReadyPath(h.ReadyPath); err != nil {
			return err
		}
	}
	h.RatelimitHeaders = cmp.Or(h.RatelimitHeaders, rateLimitsOfCaller)
	switch {
	case !slices.Contains(rateLimitsOf, h.RatelimitHeaders):
		return fmt.Errorf("ratelimit_headers '%s' is not one of %s", h.RatelimitHeaders, strings.Join(rateLimitsOf, ", "))
	case h.LBRetries != nil && *h.LBRetries < 0:
		return fmt.Errorf("lb_retries '%d' is not a whole number of 0 or more", *h.LBRetries)
	case h.LBTryDuration < 0:
		return fmt.Errorf("lb_try_duration '%s' is not a duration above 0", time.Duration(h.LBTryDuration))
	}
	return errors.Join(checkWait(h.Wait), h.WebSocketOptions.Check(), h.checkNamed())
}

// provisionBackends sets up the backends, including those that the environment
// describes.
func (h *Handler) provisionBackends(ctx caddy.Context) error {
	if err := h.provisionFromEnv(); err != nil {
		return err
	}
	if err := backend.Provision(ctx, h.Backends); err != nil {
		return err
	}
	for _, warning := range backend.Mistakes(h.Backends) {
		h.logger.Warn(warning)
	}
	return nil
}

// loadPolicy loads the option lb_policy. It returns nil if there is none.
func (h *Handler) loadPolicy(ctx caddy.Context) (reverseproxy.Selector, error) {
	if pools.HasCountingFallback(h.LBPolicyRaw) {
		h.logger.Warn(pools.FallbackCountsNothing)
	}
	policy, err := pools.LoadPolicy(ctx, h, h.LBPolicyRaw)
	if policy != nil && slices.ContainsFunc(h.Backends, func(b *backend.Backend) bool { return *b.Weight > 1 }) {
		h.logger.Warn(pools.WeightIgnored)
	}
	return policy, err
}

// newSender sets up the connections to the backends, and passive health checks.
func (h *Handler) newSender(ctx caddy.Context) (*attempt.Sender, error) {
	transport, err := attempt.DecodeTransport(h.TransportRaw)
	if err != nil {
		return nil, err
	}
	s := &attempt.Sender{PassiveHealth: h.PassiveHealth, Options: h.Options, HTTP: transport,
		CloseDelay: time.Duration(h.StreamCloseDelay)}
	return s, s.Provision(ctx)
}

// joinReplicas connects the pool with the other replicas, if the option state
// says how.
func (h *Handler) joinReplicas(ctx caddy.Context) (seam.Replication, error) {
	engine, err := directive.Load[state.Engine](ctx, h, "StateRaw", h.StateRaw)
	if err != nil {
		return seam.Alone{}, err
	}
	replication, err := seam.JoinReplicas(ctx, engine)
	if err != nil {
		return replication, err
	}
	return replication, observe.On(ctx, observe.Started, replication.Start)
}

// newBalancer makes the balancer, with the pool of the backends.
func (h *Handler) newBalancer(ctx caddy.Context, policy reverseproxy.Selector) (*balancer, error) {
	events, err := observe.NewEvents(ctx, h.Pool)
	if err != nil {
		return nil, err
	}
	rechecker := &backend.Rechecker{Context: ctx, Transport: h.Sender.RoundTripper, Backends: h.Backends}
	listeners := []pool.Listener{h.replication, rechecker}
	queues := waiting.New(time.Duration(h.Wait), h.shared.Tiers != nil)
	if queues != nil {
		if err := observe.On(ctx, observe.Stopping, queues.Close); err != nil {
			return nil, err
		}
		listeners = append(listeners, wakes{queues})
	}
	targets := make([]*target, len(h.Backends))
	for i, b := range h.Backends {
		targets[i] = targetOf(b)
		h.replication.Name(targets[i].Member, b.NameForReplicas())
		if key := b.Key(); key != nil && key.InFile() {
			h.keyFiles.Add("api_key of backend "+b.Name, key.Read)
		}
	}
	h.replication.Secrets(h.keyFiles.Add)
	others, err := seam.Listeners(ctx, h.Pool)
	if err != nil {
		return nil, err
	}
	b := newBalancer(h.Pool, targets, h.Sender, events, append(listeners, others...)...)
	b.Pool.Watches = h.Silence == nil || *h.Silence
	b.Pool.Steers = h.QuotaSteering == nil || *h.QuotaSteering
	b.Pool.Replicas = h.replication.Replicas
	if h.FairShares {
		b.Pool.Callers = new(quota.Callers)
	}
	b.settings = settings{
		policy: policy, rateLimits: h.RatelimitHeaders, waiting: queues, fields: attempt.Public{}, loops: newLoopMark(),
	}
	b.webSocketOptions = seam.WebSocketOptions{
		Closing: h.Sender.Closing(), Timeout: time.Duration(h.StreamTimeout), Log: h.logger,
	}
	if b.webSockets, err = seam.LoadWebSockets(ctx); err != nil {
		return b, err
	}
	if b.usage, err = seam.OpenUsage(ctx, h.Pool); err != nil {
		return b, err
	}
	b.Rechecker, b.Secrets = rechecker, &h.keyFiles
	return b, observe.On(ctx, observe.Started, func() { rechecker.Start(b.Pool) })
}

// newReader makes the reader of requests.
func (h *Handler) newReader(ctx caddy.Context, policy reverseproxy.Selector) (*reader, error) {
	var prompts *affinity.PromptCache // with one account, or a policy of the operator's, there is none by default
	if policy == nil &&
		slices.ContainsFunc(h.Backends,
			func(b *backend.Backend) bool { return b.AccountKey != h.Backends[0].AccountKey }) {
		prompts = new(affinity.PromptCache)
	}
	d := &reader{
		readyPath: h.ReadyPath, buffers: h.Sender.RequestBuffers,
		clientKeys: h.clientKeys, replaced: ctx, keyFiles: &h.keyFiles,
		admission: h.admission, everything: &seam.Grant{Listed: backend.ModelsOf(h.Backends)},
		rechecker: h.balancer.Rechecker.(*backend.Rechecker),
	}
	for _, b := range h.Backends {
		d.passesThrough = d.passesThrough || b.Credentials.Passthrough
		d.tellsModels = d.tellsModels || b.Models != nil || b.Deployment != ""
	}
	var err error
	if d.promptCache, err = h.Affinity.OpenPromptCache(h.Pool, h.balancer.Pool, prompts); err != nil {
		return d, err
	}
	config := affinity.Config{Options: h.Affinity, Pool: h.Pool, Logger: h.logger}
	var backends []*backend.Backend // in the order of targets
	for _, t := range h.balancer.targets {
		backends, config.Accounts = append(backends, t.backend), append(config.Accounts, t.backend.AccountKey)
	}
	config.Others = h.replication.Owners(h.Pool, config.Accounts)
	if d.affinity, err = affinity.New(ctx, config); err != nil {
		return d, err
	}
	lists := [][]string{nil}
	if h.admission != nil {
		lists = h.admission.Backends()
	}
	for _, names := range lists {
		d.entitlements = append(d.entitlements, affinity.Entitle(names, backends, d.affinity))
	}
	context.AfterFunc(ctx, func() { readers.CompareAndDelete(h.Pool, d) })
	return d, observe.On(ctx, observe.Started, func() {
		readers.Store(h.Pool, d)
		d.affinity.Start()
		for _, r := range h.balancer.usage {
			r.Start()
		}
	})
}

// publish makes the pool, which is complete now, visible to operators and other
// replicas.
func (h *Handler) publish(config string) {
	h.balancer.Records = nil
	for _, r := range h.balancer.usage {
		h.balancer.Records = append(h.balancer.Records, r.Records()...)
	}
	for _, limits := range []seam.Limits{h.admission, h.balancer.quotas} {
		if limits != nil {
			h.balancer.Records = append(h.balancer.Records, limits.Record())
		}
	}
	h.balancer.Records = append(h.balancer.Records, h.reader.affinity.Record())
	pools.Default.Add(&h.balancer.Entry)
	for _, t := range h.balancer.targets {
		t.startFresh(h.replication, h.trail)
	}
	h.replication.Configured(h.Pool, config)
	h.replication.Open(h.balancer.Pool)
}

// checkAffinity returns an error if affinity needs names of callers and there
// are none.
func (h *Handler) checkNamed() error {
	option := ""
	switch {
	case h.namesCallers():
	case h.Affinity != nil && h.Affinity.Callers == affinity.Strict:
		option = "affinity: callers strict"
	case h.FairShares:
		option = "fair_shares"
	}
	if option != "" {
		return errors.New(option + " requires client_key, client_keys_file or caller_identity, because callers need names")
	}
	return nil
}

// provisionFromEnv adds the backends that the environment describes. It runs at
// load and not when the Caddyfile is read, so that these backends never appear
// in the config.
func (h *Handler) provisionFromEnv() error {
	if h.BackendsFromEnv == "" {
		return nil
	}
	backends, variables, idle, err := backend.FromEnv(h.BackendsFromEnv)
	if err != nil {
		return err
	}
	if h.Backends = append(h.Backends, backends...); len(h.Backends) == 0 {
		return fmt.Errorf("backends_from_env found no backend: expected variables like %s",
			backend.ExampleVariables(h.BackendsFromEnv))
	}
	// the sample has one limit for how long a request may be idle
	for _, d := range []*caddy.Duration{&h.ResponseHeaderTimeout, &h.StreamFirstEventTimeout, &h.StreamIdleTimeout} {
		*d = cmp.Or(*d, caddy.Duration(idle))
	}
	h.logger.Info("read backends from the environment",
		zap.Strings("variables", variables), zap.Duration("timeout", idle))
	return nil
}

// Cleanup releases what Provision acquired. It also runs after a Provision that
// failed halfway.
func (h *Handler) Cleanup() error {
	if h.warnAtEnd != nil {
		h.warnAtEnd()
	}
	h.keyFiles.Close()
	errs := []error{h.replication.Close()}
	if h.balancer != nil {
		h.balancer.waiting.Close()
		pools.Default.Remove(&h.balancer.Entry)
		h.balancer.Pool.Close()
		metrics.Left()
		for _, r := range h.balancer.usage {
			errs = append(errs, r.Close())
		}
		if h.balancer.quotas != nil {
			errs = append(errs, h.balancer.quotas.Close())
		}
		for _, t := range h.balancer.targets {
			errs = append(errs, pools.UnloadHealth(t.backend.HealthKey))
		}
	}
	if d := h.reader; d != nil {
		errs = append(errs, d.affinity.Close(), d.promptCache.Close())
	}
	if h.admission != nil {
		errs = append(errs, h.admission.Close())
	}
	if h.Sender != nil {
		errs = append(errs, h.Sender.Cleanup())
	}
	return errors.Join(errs...)
}

// checkReadyPath returns an error if ready_path is not valid.
func checkReadyPath(path string) error {
	if !strings.HasPrefix(path, "/") || strings.ContainsAny(path, "?#*{}") {
		return fmt.Errorf("ready_path '%s' is not a path that begins with / and has no wildcard or query, such as /readyz",
			path)
	}
	return nil
}

// Interface guards
var (
	_ caddy.Provisioner           = (*Handler)(nil)
	_ caddy.CleanerUpper          = (*Handler)(nil)
	_ caddyhttp.MiddlewareHandler = (*Handler)(nil)
)
