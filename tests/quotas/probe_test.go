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

// TestABackendThatLacksAPathIsAskedAgainWhenTheOtherOneIsJustUsedUp has another
// request use up the quota of b after b was chosen.
func TestABackendThatLacksAPathIsAskedAgainWhenTheOtherOneIsJustUsedUp(t *testing.T) {
	inBubble(t, "lb_policy interrupted", func(t *testing.T, w *world) {
		w.Backends["a"].Replies(lbtest.Says(404, `{"detail":"Not Found"}`))
		w.Post(small).WantServed(t, "b")
		w.Backends["a"].Recovers()
		other := func() { w.Post(strings.Replace(small, "gpt-4o", "gpt-5", 1)).WantServed(t, "b") }
		interruption.Store(&other)
		w.Post(small).WantServed(t, "a")
	}, "", "requests 2/hour")
}

// TestARequestIsNotWokenForABackendThatHasJustThrottled has a throttle give its
// charge back while another request waits for the quota. The cooldown must come
// first, which would go wrong in two of a hundred cases.
func TestARequestIsNotWokenForABackendThatHasJustThrottled(t *testing.T) {
	for range 100 {
		inBubble(t, "wait 10s", func(t *testing.T, w *world) {
			w.Backends["a"].Replies(after(55*time.Second, lbtest.Throttled("30")))
			go w.Post(small)
			time.Sleep(53*time.Second + 400*time.Millisecond)
			w.Backends["a"].Replies(lbtest.Throttled("30"))
			w.Post(small)
			if calls := len(w.Backends["a"].Received()); calls > 1 {
				t.Error("the backend that had just throttled was called again")
			}
		}, "requests 1/minute")
	}
}
