package openailb

import (
	"errors"
	"slices"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/backend"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
)

// provisionClientKeys reads the client keys, if there are any.
func (h *Handler) provisionClientKeys() error {
	if h.ClientKeys == nil && h.ClientKeysFile == nil {
		return nil
	}
	if h.ClientKeys != nil && len(h.ClientKeys) == 0 {
		return errors.New("client_keys is an empty list: expected at least one key")
	}
	location, err := h.Location()
	if err != nil {
		return err
	}
	config := keys.ClientsConfig{File: h.ClientKeysFile, Location: location, Label: metrics.Caller, Logger: h.logger}
	for _, k := range h.ClientKeys {
		config.Keys = append(config.Keys, keys.ClientKey(k))
	}
	clients, err := keys.NewClients(config)
	if err != nil {
		return err
	}
	if h.clientKeys = clients; clients.InFiles() {
		h.keyFiles.Add("client keys", clients.Read)
	}
	return nil
}

// warnIfPublic logs a warning if anyone can use the keys of the backends. Which
// routes lead to a handler is known once the config is loaded.
func (h *Handler) warnIfPublic(ctx caddy.Context) error {
	if h.clientKeys != nil || !slices.ContainsFunc(h.Backends, (*backend.Backend).HasCredential) {
		return nil
	}
	return observe.On(ctx, observe.Started, func() {
		if app, err := ctx.AppIfConfigured("http"); err == nil {
			if sites := keys.PublicSites(app.(*caddyhttp.App), h); sites != nil {
				h.logger.Warn("callers need no key: anyone who can reach the site can spend your budget", zap.Strings("sites", sites), zap.String("pool", h.Pool))
			}
		}
	})
}

// warnIfUnreachable logs a warning if no request reaches the handler, because another one in front answers all.
func (h *Handler) warnIfUnreachable(ctx caddy.Context) error {
	return observe.On(ctx, observe.Started, func() {
		if app, err := ctx.AppIfConfigured("http"); err == nil {
			names := keys.Unreachable(app.(*caddyhttp.App), func(other caddyhttp.MiddlewareHandler) bool { return other == h })
			if names != nil {
				h.logger.Warn("no request reaches this openai_lb: a handler in front of it answers every one", zap.Strings("handlers", names), zap.String("pool", h.Pool))
			}
		}
	})
}

// admit records who sent the request. It refuses a caller without a valid key.
func (h *Handler) admit(ex *exchange) (refusal apierror.Error, refused bool) {
	if h.clientKeys == nil {
		return apierror.Error{}, false
	}
	who, err := h.clientKeys.Identify(&ex.api.credentials)
	switch {
	case errors.Is(err, keys.ErrNoKey):
		return apierror.MissingKey, true
	case errors.Is(err, keys.ErrExpired):
		return apierror.ExpiredKey, true
	case errors.Is(err, keys.ErrTwoCallers):
		return apierror.TwoCallers, true
	case err != nil:
		return apierror.WrongKey, true
	}
	ex.api.caller = who
	if extra, ok := ex.request.Context().Value(caddyhttp.ExtraLogFieldsCtxKey).(*caddyhttp.ExtraLogFields); ok {
		extra.Set(ex.api.callerField())
	}
	return apierror.Denied, h.callers.Deny(who.Name)
}
