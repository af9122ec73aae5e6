package waiting

import (
	"maps"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// Only the share of the other tier is left to batch.
func TestABetterTierDoesNotWaitBehindAWorseOneForWhichABackendIsTooBusy(t *testing.T) {
	inBubble(t, "wait 5s\n"+tiers, func(t *testing.T, w *world) {
		const web, batch = "sk-web-0123456789ab", "sk-batch-0123456789"
		w.knows(t, web, 3)
		w.Backends["a"].Replies(lbtest.Says(200, `{}`, "Azure-Openai-Deployment-Utilization", "200%"))
		w.Send(w.request(0, web)).WantServed(t, "a")
		for number := range 3 {
			w.ask(number, batch, func(lbtest.Reply, time.Duration) {})
		}
		time.Sleep(100 * time.Millisecond)
		if got := waits(t, w.Handler.Pool); got != 3 {
			t.Fatalf("%v requests wait, want 3", got)
		}
		begin := time.Now()
		w.Send(w.request(4, web)).WantServed(t, "a")
		if took := time.Since(begin); took != 0 {
			t.Errorf("it took %s", took)
		}
		w.wg.Wait()
	})
}

// TestATierWaitsOnlyUntilMoreThanTheShareOfTheOtherIsLeft has a backend
// throttle for 100 ms. What that says of its use falls to 90 % 200 ms later.
func TestATierWaitsOnlyUntilMoreThanTheShareOfTheOtherIsLeft(t *testing.T) {
	for _, wait := range []string{"400ms", "1s", "3s"} {
		inBubble(t, "wait "+wait+"\n"+tiers, func(t *testing.T, w *world) {
			const web, batch = "sk-web-0123456789ab", "sk-batch-0123456789"
			w.throttle("a", 0)
			w.Send(w.request(0, web)).WantServed(t, "a")
			w.throttle("a", 100*time.Millisecond)
			begin := time.Now()
			w.Send(w.request(1, batch)).WantServed(t, "a")
			if took := time.Since(begin); took < 290*time.Millisecond || took > 310*time.Millisecond {
				t.Errorf("wait %s: it took %s", wait, took)
			}
		})
	}
}

// panicking is a policy that panics once, when untilPanic gets to 0.
type panicking struct{}

var untilPanic atomic.Int64

func init() { caddy.RegisterModule(new(panicking)) }

func (*panicking) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.reverse_proxy.selection_policies.panicking", New: func() caddy.Module { return new(panicking) }}
}

func (*panicking) UnmarshalCaddyfile(*caddyfile.Dispenser) error { return nil }

func (*panicking) Select(pool reverseproxy.UpstreamPool, _ *http.Request, _ http.ResponseWriter) *reverseproxy.Upstream {
	if untilPanic.Add(-1) == 0 {
		panic("by the test's policy")
	}
	return pool[0]
}

func TestARequestThatPanicsPassesItsTurnOn(t *testing.T) {
	inBubble(t, "wait 2s\nlb_policy panicking", func(t *testing.T, w *world) {
		w.knows(t, "", 3)
		w.throttle("a", time.Second)
		untilPanic.Store(2) // the first time is before it waits
		w.ask(0, "", func(got lbtest.Reply, _ time.Duration) {
			if got.Err == nil {
				t.Errorf("request 0 got %d, want that it is cut", got.Status)
			}
		})
		time.Sleep(time.Millisecond)
		w.ask(1, "", func(got lbtest.Reply, took time.Duration) {
			if got.WantServed(t, "a"); took > time.Second {
				t.Errorf("it took %s", took)
			}
		})
		w.wg.Wait()
		if got := waits(t, w.Handler.Pool); got != 0 {
			t.Errorf("%v requests wait", got)
		}
		w.Send(w.request(2, "")).WantServed(t, "a")
	})
}

func TestOneCallerDoesNotTakeAllPlaces(t *testing.T) {
	inBubble(t, "wait 5s\nclient_key alice "+aliceKey+"\nclient_key bob "+bobKey, func(t *testing.T, w *world) {
		w.knows(t, aliceKey, 3)
		w.throttle("a", 2*time.Second)
		statuses := make(map[int]int)
		for number, key := range []string{aliceKey, aliceKey, aliceKey, bobKey, bobKey} {
			w.ask(number, key, func(got lbtest.Reply, _ time.Duration) { statuses[number] = got.Status })
			time.Sleep(100 * time.Millisecond)
		}
		w.wg.Wait()
		if want := map[int]int{0: 200, 1: 200, 2: 429, 3: 200, 4: 429}; !maps.Equal(statuses, want) {
			t.Errorf("the requests got %v, want %v", statuses, want)
		}
	})
}
