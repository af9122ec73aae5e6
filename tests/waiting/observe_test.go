package waiting

import (
	"context"
	"net/http"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestWaitsAreCountedAndLogged(t *testing.T) {
	inBubble(t, "wait 1s", func(t *testing.T, w *world) {
		its := map[string]string{"pool": w.Handler.Pool}
		counted := func(result string) float64 {
			return lbtest.Scrape(t).Sum("waited_total", map[string]string{"pool": w.Handler.Pool, "result": result})
		}
		w.throttle("a", 300*time.Millisecond)
		w.ask(0, "", func(got lbtest.Reply, _ time.Duration) { got.WantServed(t, "a") })
		time.Sleep(100 * time.Millisecond)
		if got := lbtest.Scrape(t).Sum("waiting", its); got != 1 {
			t.Errorf("%v requests wait, want 1", got)
		}
		w.Send(w.request(1, "")).WantStatus(t, 429)
		w.wg.Wait()
		w.throttle("a", time.Second)
		ctx, leave := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer leave()
		w.Send(w.request(2, "").WithContext(ctx))
		time.Sleep(time.Second)
		w.Backends["a"].Replies(lbtest.Status(429, "Retry-After-Ms", "600"))
		w.Send(w.request(3, "")).WantStatus(t, 429)
		for result, want := range map[string]float64{"sent": 1, "full": 1, "left": 1, "over": 1} {
			if got := counted(result); got != want {
				t.Errorf("%v waits are counted as %s, want %v", got, result, want)
			}
		}
		if got := lbtest.Scrape(t).Sum("waited_seconds", its); got != 3 {
			t.Errorf("the times of %v waits are counted, want 3", got)
		}
		if got := lbtest.Scrape(t).Sum("requests_total", map[string]string{"pool": w.Handler.Pool, "class": "client_left_waiting", "code": "499"}); got != 1 {
			t.Errorf("%v requests are counted whose client left, want 1", got)
		}
		logged := w.Logged("request waited")
		if len(logged) == 0 {
			t.Fatal("nothing is logged")
		}
		if fields := logged[0].ContextMap(); fields["result"] != "sent" || fields["duration"] != 300*time.Millisecond || fields["model"] != "gpt-4o" {
			t.Errorf("logged %v", fields)
		}
	})
}

func TestThePlaceholderWaitedSaysHowLong(t *testing.T) {
	inBubble(t, "wait 1s", func(t *testing.T, w *world) {
		var replacer *caddy.Replacer
		w.Prepares = func(r *http.Request) *http.Request {
			replacer = r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
			return r.WithContext(context.WithValue(r.Context(), caddyhttp.ServerCtxKey, new(caddyhttp.Server)))
		}
		for _, want := range []string{"0.3", ""} {
			if want != "" {
				w.throttle("a", 300*time.Millisecond)
			}
			w.Send(w.request(0, "")).WantServed(t, "a")
			time.Sleep(time.Second)
			if got := replacer.ReplaceAll("{http.openai_lb.waited}", ""); got != want {
				t.Errorf("it is %q, want %q", got, want)
			}
		}
	})
}
