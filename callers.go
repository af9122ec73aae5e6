package openailb

import (
	"errors"
	"slices"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/backend"
	"github.com/openai-lb/caddy-openai-lb/internal/callers"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
)

// newTrail starts the audit log, which records the config in use and changes of
// its keys.
func (h *Handler) newTrail(ctx caddy.Context, digest string) (*observe.Trail, error) {
	trail := observe.NewTrail(h.logger, h.Pool, ctx.GetMetricsRegistry()) // each config has its own
	begin := func() { trail.Begin(digest, h.clientKeys.Audited(), backend.KeyDigests(h.Backends)) }
	end := func() {
		if !caddy.Exiting() {
			trail.End()
		}
	}
	return trail, errors.Join(observe.On(ctx, observe.Started, begin), observe.On(ctx, observe.Stopping, end))
}

// namesCallers reports whether callers need a key or a token, and so have
// names.
func (h *Handler) namesCallers() bool {
	return h.ClientKeys != nil || h.ClientKeysFile != nil || h.CallerIdentityRaw != nil
}

// newClientKeys reads the client keys. It returns nil if there are none.
func (h *Handler) newClientKeys(ctx caddy.Context) (*keys.Clients, error) {
	if !h.namesCallers() {
		return nil, nil
	}
	if h.ClientKeys != nil && len(h.ClientKeys) == 0 {
		return nil, errors.New("client_keys is an empty list: expected at least one key")
	}
	location, err := h.Location()
	if err != nil {
		return nil, err
	}
	tokens, err := h.LoadIdentity(ctx)
	if err != nil {
		return nil, err
	}
	config := keys.ClientsConfig{
		File: h.ClientKeysFile, Tokens: tokens, Tiers: h.TierNames(), Location: location,
		Label: metrics.Caller, Logger: h.logger, Audit: h.trail.Keys,
	}
	for _, k := range h.ClientKeys {
		config.Keys = append(config.Keys, keys.ClientKey(k))
	}
	clients, err := keys.NewClients(config)
	if err == nil && clients.InFiles() {
		h.keyFiles.Add("client keys", clients.Read)
	}
	return clients, err
}

// warnOfSites warns of sites where anyone can spend the backends' credentials,
// and of sites where no request reaches the handler.
func (h *Handler) warnOfSites(ctx caddy.Context) (err error) {
	spends := h.clientKeys == nil && slices.ContainsFunc(h.Backends, (*backend.Backend).HasCredential)
	h.warnAtEnd, err = observe.WarnOfSites(ctx, h, spends, h.logger, h.Pool)
	return err
}

// newCallers sets up the limits of callers. It returns nil without limits.
func (h *Handler) newCallers(ctx caddy.Context) (*callers.Callers, error) {
	backends, tokens := backendsForCallers(h.Backends), h.clientKeys.TokenTiers()
	config, err := h.Config.WithFile()
	if err := errors.Join(err, config.Check(h.clientKeys != nil, backends), config.CheckTiers(tokens)); err != nil {
		return nil, err
	}
	for _, warning := range config.Unused(h.clientKeys.Names(), h.clientKeys.Tiers(), tokens) {
		h.logger.Warn(warning)
	}
	if h.clientKeys == nil {
		return nil, nil
	}
	b := h.balancer
	c := callers.New(callers.Options{
		Config: config, Written: &h.Config, Pool: h.Pool, Backends: backends, Storage: ctx.Storage(), Logger: h.logger,
		Crossed: b.events.Crossed,
	})
	if c == nil {
		return nil, nil
	}
	if h.CallersFile != nil {
		h.keyFiles.Add("limits of callers", c.Read)
	}
	b.Callers, b.tiers = callers.LimitersOf(h.Pool), h.QuotaTiers()
	b.CallerNames = func() []string { return append(h.clientKeys.Names(), c.Names()...) }
	b.Unlimited = func() []string { return c.Unlimited(h.clientKeys.Names()) }
	h.clientKeys.Watch(func(names []string, tiers map[string]string) {
		c.Place(tiers)
		h.warnOfUnlimited(c, names)
	})
	h.replication.Share(h.Pool, b.Callers)
	return c, observe.On(ctx, observe.Started, c.Start)
}

// warnOfUnlimited warns of those of the named callers that have no limits.
func (h *Handler) warnOfUnlimited(c *callers.Callers, names []string) {
	if unlimited := c.Unlimited(names); unlimited != nil {
		h.logger.Warn("client keys without a caller block have no limits: 'caller *' limits or refuses them",
			zap.String("pool", h.Pool), zap.Strings("callers", unlimited))
	}
}

// backendsForCallers returns the backends' names and models, which the options
// of callers refer to. A backend whose models have placeholders has no models
// here, because these are not known before load.
func backendsForCallers(backends []*backend.Backend) []callers.Backend {
	names, known := backend.NamesOf(backends), make([]callers.Backend, len(backends))
	for i, b := range backends {
		if known[i].Name = names[i]; !slices.ContainsFunc(b.Model,
			func(m backend.Model) bool { return hasPlaceholder(m.Name) }) {
			known[i].Models = backend.ModelsOf(backends[i : i+1])
		}
	}
	return known
}
