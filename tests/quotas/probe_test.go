package quotas

import (
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// interrupted is a policy that chooses the first backend. Before that, it calls
// a function once, as if another request came at that moment.
type interrupted struct{}

var interruption atomic.Pointer[func()]

func init() { caddy.RegisterModule(new(interrupted)) }

func (*interrupted) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.reverse_proxy.selection_policies.interrupted", New: func() caddy.Module { return new(interrupted) }}
}

func (*interrupted) UnmarshalCaddyfile(*caddyfile.Dispenser) error { return nil }

func (*interrupted) Select(pool reverseproxy.UpstreamPool, _ *http.Request, _ http.ResponseWriter) *reverseproxy.Upstream {
	if call := interruption.Swap(nil); call != nil {
		(*call)()
	}
	return pool[0]
}

// TestARequestThatAQuotaRefusesIsNoProbe has another request use up the quota
// after a request was chosen as the probe of a cooldown.
func TestARequestThatAQuotaRefusesIsNoProbe(t *testing.T) {
	inBubble(t, "lb_policy interrupted", func(t *testing.T, w *world) {
		w.Backends["a"].Replies(lbtest.Throttled("5"))
		w.Post(small).WantServed(t, "b")
		w.AllReply(used(900, 0))
		time.Sleep(5 * time.Second)
		other := func() { w.Post(strings.Replace(prompt(900, ""), "gpt-4o", "gpt-5", 1)).WantServed(t, "a") }
		interruption.Store(&other)
		w.Post(prompt(200, "")).WantServed(t, "b")
		w.Post(small).WantServed(t, "a")
	}, "tokens 1000/hour", "")
}
