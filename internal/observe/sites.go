package observe

import (
	"sync"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
)

// WarnOfSites logs a warning if anyone can use the keys of a handler's
// backends. spends reports whether callers without a key may do so. It logs
// another warning if no request reaches the handler, because another handler in
// front of it answers all of them. Which routes lead to it is known once the
// config is loaded: when it starts, or, as `caddy validate` starts nothing, at
// the end of the handler, which calls atEnd.
func WarnOfSites(ctx caddy.Context, h caddyhttp.MiddlewareHandler, spends bool, log *zap.Logger,
	pool string) (atEnd func(), err error) {
	var once sync.Once
	warn := func() {
		app, err := ctx.AppIfConfigured("http")
		if err != nil {
			return
		}
		if spends {
			if sites := keys.PublicSites(app.(*caddyhttp.App), h); sites != nil {
				log.Warn("callers need no key: anyone who can reach the site can spend your budget",
					zap.Strings("sites", sites), zap.String("pool", pool))
			}
		}
		names := keys.Unreachable(app.(*caddyhttp.App),
			func(other caddyhttp.MiddlewareHandler) bool { return other == h })
		if names != nil {
			log.Warn("no request reaches this openai_lb: a handler in front of it answers every one",
				zap.Strings("handlers", names), zap.String("pool", pool))
		}
	}
	warnOnce := func() { once.Do(warn) }
	return warnOnce, On(ctx, Started, warnOnce)
}
