//go:build openai_lb_core && !openai_lb_status

package openailb

import (
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// A build without the module refuses its directive by name. Caddy would only
// say that it does not know it.
func init() {
	httpcaddyfile.RegisterHandlerDirective("openai_lb_status", func(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		h.Next()
		return nil, h.Err("openai_lb_status is not available: this binary was built without the module status (build tag openai_lb_status)")
	})
	httpcaddyfile.RegisterDirectiveOrder("openai_lb_status", httpcaddyfile.Before, "metrics")
}
