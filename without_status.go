//go:build openai_lb_core && !openai_lb_status

package openailb

import (
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

// In a build without the module, the directive is rejected with the reason.
// Caddy would only say that the directive is unknown.
func init() {
	httpcaddyfile.RegisterHandlerDirective("openai_lb_status",
		func(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
			h.Next()
			return nil, h.WrapErr(seam.Missing("openai_lb_status", "status"))
		})
	httpcaddyfile.RegisterDirectiveOrder("openai_lb_status", httpcaddyfile.Before, "metrics")
}
