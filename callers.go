package openailb

import (
	"errors"
	"slices"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/backend"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
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
	tokens, err := h.LoadIdentity(ctx)
	if err != nil {
		return nil, err
	}
	config := keys.ClientsConfig{
		File: h.ClientKeysFile, Tokens: tokens, Tiers: h.shared.TierNames, Location: h.shared.Location,
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

// newAdmission sets up the limits of callers. It returns nil without limits.
func (h *Handler) newAdmission(ctx caddy.Context) (seam.Admission, error) {
	b := h.balancer
	_, alone := h.replication.(seam.Alone)
	a, err := seam.Callers().Open(ctx, &h.Config, seam.AdmissionConfig{
		Pool: h.Pool, Backends: backendsForCallers(h.Backends), Keys: h.clientKeys, Files: &h.keyFiles, Entry: &b.Entry,
		Replicated: !alone, Logger: h.logger, Crossed: b.events.Crossed,
	})
	if a == nil || err != nil {
		return nil, err
	}
	b.admission, b.tiers = a, h.shared.Tiers
	h.replication.Share(h.Pool, a)
	return a, observe.On(ctx, observe.Started, a.Start)
}

// backendsForCallers returns the backends' names and models, which the options
// of callers refer to. A backend whose models have placeholders has no models
// here, because these are not known before load.
func backendsForCallers(backends []*backend.Backend) []seam.NamedBackend {
	names, known := backend.NamesOf(backends), make([]seam.NamedBackend, len(backends))
	for i, b := range backends {
		if known[i].Name = names[i]; !slices.ContainsFunc(b.Model,
			func(m backend.Model) bool { return hasPlaceholder(m.Name) }) {
			known[i].Models = backend.ModelsOf(backends[i : i+1])
		}
	}
	return known
}
