package openailb

import (
	"errors"
	"slices"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/backend"
	"github.com/openai-lb/caddy-openai-lb/internal/callers"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
)

// provisionTrail has the audit log say which config is in use, and how its keys change.
func provisionTrail(ctx caddy.Context, h *Handler, digest string) error {
	h.trail = observe.NewTrail(h.logger, h.Pool, ctx.GetMetricsRegistry()) // each config has its own
	begin := func() { h.trail.Begin(digest, h.reader.clientKeys.Audited(), backend.KeyDigests(h.Backends)) }
	end := func() {
		if !caddy.Exiting() {
			h.trail.End()
		}
	}
	return errors.Join(observe.On(ctx, observe.Started, begin), observe.On(ctx, observe.Stopping, end))
}

// namesCallers reports whether callers need a key or a token, and so have names.
func (h *Handler) namesCallers() bool {
	return h.ClientKeys != nil || h.ClientKeysFile != nil || h.CallerIdentityRaw != nil
}

// provisionClientKeys reads the client keys, if there are any.
func provisionClientKeys(ctx caddy.Context, h *Handler) error {
	if !h.namesCallers() {
		return nil
	}
	if h.ClientKeys != nil && len(h.ClientKeys) == 0 {
		return errors.New("client_keys is an empty list: expected at least one key")
	}
	location, err := h.Location()
	if err != nil {
		return err
	}
	tokens, err := h.LoadIdentity(ctx)
	if err != nil {
		return err
	}
	config := keys.ClientsConfig{File: h.ClientKeysFile, Tokens: tokens, Tiers: h.TierNames(), Location: location, Label: metrics.Caller, Logger: h.logger, Audit: h.trail.Keys}
	for _, k := range h.ClientKeys {
		config.Keys = append(config.Keys, keys.ClientKey(k))
	}
	clients, err := keys.NewClients(config)
	if err != nil {
		return err
	}
	if h.reader.clientKeys = clients; clients.InFiles() {
		h.keyFiles.Add("client keys", clients.Read)
	}
	return nil
}

// warnOfSites warns of sites where anyone can use the keys of the backends, or where no request reaches the handler.
func (h *Handler) warnOfSites(ctx caddy.Context) error {
	spends := h.reader.clientKeys == nil && slices.ContainsFunc(h.Backends, (*backend.Backend).HasCredential)
	return observe.WarnOfSites(ctx, h, spends, h.logger, h.Pool)
}

// provisionCallers sets up the limits of callers, if there are any.
func provisionCallers(ctx caddy.Context, h *Handler) error {
	backends := backendsForCallers(h.Backends)
	tokens := h.reader.clientKeys.TokenTiers()
	if err := errors.Join(h.Config.Check(h.reader.clientKeys != nil, backends), h.CheckTiers(tokens)); err != nil {
		return err
	}
	for _, warning := range h.Unused(h.reader.clientKeys.Names(), h.reader.clientKeys.Tiers(), tokens) {
		h.logger.Warn(warning)
	}
	if h.reader.clientKeys == nil {
		return nil
	}
	var storage certmagic.Storage
	if h.link == nil { // otherwise other replicas remember what was used
		storage = ctx.Storage()
	}
	if h.reader.callers = callers.New(callers.Options{Config: h.Config, Pool: h.Pool, Backends: backends, Storage: storage, Logger: h.logger, Crossed: h.balancer.events.Crossed}); h.reader.callers == nil {
		return nil
	}
	h.balancer.Callers, h.balancer.tiers = callers.MetersOf(h.Pool), h.QuotaTiers()
	h.balancer.Unlimited = func() []string { return h.reader.callers.Unlimited(h.reader.clientKeys.Names()) }
	h.reader.clientKeys.Watch(func(names []string, tiers map[string]string) {
		h.reader.callers.Place(tiers)
		warnOfUnlimited(h, names)
	})
	h.link.Share(h.Pool, h.balancer.Callers)
	return observe.On(ctx, observe.Started, h.reader.callers.Start)
}

// warnOfUnlimited warns of the callers with these names that have no limits.
func warnOfUnlimited(h *Handler, names []string) {
	if unlimited := h.reader.callers.Unlimited(names); unlimited != nil {
		h.logger.Warn("client keys without a caller block have no limits: 'caller *' limits or refuses them", zap.String("pool", h.Pool), zap.Strings("callers", unlimited))
	}
}

// backendsForCallers returns what the options of callers have to know of backends, as far as that is known before load.
func backendsForCallers(backends []*backend.Backend) []callers.Backend {
	names, known := backend.NamesOf(backends), make([]callers.Backend, len(backends))
	for i, b := range backends {
		if known[i].Name = names[i]; !slices.ContainsFunc(b.Model, func(m backend.Model) bool { return hasPlaceholder(m.Name) }) {
			known[i].Models = backend.ModelsOf(backends[i : i+1])
		}
	}
	return known
}
