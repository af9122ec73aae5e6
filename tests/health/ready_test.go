package health

import (
	"net/http"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

var twoBackends = lbtest.InOrder("a b", "ready_path /readyz")

func TestReadyPathTellsWhetherAnyBackendCanBeUsed(t *testing.T) {
	lbtest.InBubble(t, twoBackends, func(t *testing.T, w *lbtest.World) {
		w.WantReady()
		w.Stop("a")
		w.Post(`{}`).WantServed(t, "b")
		w.WantReady()

		// b refuses its key for a minute, and a cannot be reached
		time.Sleep(4500 * time.Millisecond)
		w.Backends["b"].Replies(lbtest.Status(401))
		w.Post(`{}`)
		w.WantNotReady("1")
		if got := w.Ready(http.MethodHead); got.Status != http.StatusServiceUnavailable || got.Body != "" || got.Header.Get("Retry-After") != "1" {
			t.Errorf("HEAD gets %d %v %q", got.Status, got.Header, got.Body)
		}
		time.Sleep(5500 * time.Millisecond)
		w.WantNotReady("1")
		synctest.Wait()
		w.WantNotReady("1")

		// a is back, and serves a request before an attempt to reach it
		w.Serve("a:80", w.Backends["a"])
		w.Post(`{}`).WantServed(t, "a")
		w.WantReady()
	})
}

func TestWhatWasUnreachableStaysSoUntilItWasReached(t *testing.T) {
	lbtest.InBubble(t, `openai_lb {
		backend http://a {
			api_key sk-of-a
			header X-Gateway-Key secret
		}
		ready_path /readyz
	}`, func(t *testing.T, w *lbtest.World) {
		w.Stop("a")
		w.Post(`{}`)
		// probes find it unreachable for a quarter of an hour, and it is never
		// ready in between
		for range 900 {
			time.Sleep(time.Second)
			if got := w.Ready(http.MethodGet); got.Status != http.StatusServiceUnavailable {
				t.Fatalf("got %d", got.Status)
			}
		}
		synctest.Wait()
		w.Serve("a:80", w.Backends["a"])
		time.Sleep(time.Second)
		w.WantNotReady("1") // which makes an attempt to reach it
		synctest.Wait()
		w.WantReady()
		calls := w.Backends["a"].Received()
		if len(calls) != 1 || calls[0].Request.Method != http.MethodHead || calls[0].Request.URL.Path != "/" {
			t.Fatalf("a got %v", calls)
		}
		for name := range calls[0].Request.Header {
			if name != "User-Agent" {
				t.Errorf("a got the header %s", name)
			}
		}
	})
}

func TestABackendIsReachedWhateverItAnswers(t *testing.T) {
	for name, reply := range map[string]http.HandlerFunc{
		"an error": lbtest.Status(500), "no key": lbtest.Status(401), "nothing": lbtest.Hangs, "a broken reply": lbtest.Aborts,
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, "openai_lb {\nbackend http://a\nready_path /readyz\n}", func(_ *testing.T, w *lbtest.World) {
				w.Stop("a")
				w.Post(`{}`)
				w.Backends["a"].Replies(reply)
				w.Serve("a:80", w.Backends["a"])
				w.WantNotReady("1")
				time.Sleep(time.Second)
				synctest.Wait()
				w.WantReady()
			})
		})
	}
}

func TestARequestThatReachesABackendMakesTheReplicaReady(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\nready_path /readyz\n}", func(_ *testing.T, w *lbtest.World) {
		w.Stop("a")
		w.Post(`{}`)
		time.Sleep(10 * time.Second)
		w.Backends["a"].Replies(lbtest.Status(500))
		w.Serve("a:80", w.Backends["a"])
		w.Post(`{}`)
		w.WantReady() // a failure of its model is not the whole backend's
	})
}

func TestReadyPathCallsNoBackend(t *testing.T) {
	lbtest.InBubble(t, twoBackends, func(_ *testing.T, w *lbtest.World) {
		w.WantReady()
		w.Ready(http.MethodHead)
		w.WantCalls(map[string]int{"a": 0, "b": 0})
		for _, other := range []*http.Request{
			w.Request(http.MethodPost, "/readyz", nil), w.Request(http.MethodGet, "/readyz/", nil),
			w.Request(http.MethodGet, "/READYZ", nil),
		} {
			w.Send(other).WantError(w.T, 404, "unknown_url")
		}
		w.Send(w.Request(http.MethodGet, "/v1/readyz", nil)).WantServed(w.T, "a")
	})
}

func TestReadyPathMindsNotWhatConcernsAModel(t *testing.T) {
	for name, reply := range map[string]http.HandlerFunc{
		"throttled":     lbtest.Throttled("300"),
		"failing":       lbtest.Status(500),
		"without it":    lbtest.Status(404),
		"overloaded":    lbtest.Status(503, "Retry-After", "60"),
		"a bad request": lbtest.Status(400),
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, twoBackends, func(_ *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(reply)
				w.Backends["b"].Replies(reply)
				w.Post(`{"model":"gpt-4o"}`)
				w.WantReady()
			})
		})
	}
}

func TestReadyPathMindsAnAccountWithoutBudget(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\nready_path /readyz\n}", func(_ *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(func(rw http.ResponseWriter, _ *http.Request) {
			rw.Header().Set("Content-Type", "application/json")
			rw.WriteHeader(429)
			rw.Write([]byte(`{"error":{"message":"You exceeded your current quota.","type":"insufficient_quota","code":"insufficient_quota"}}`))
		})
		w.Post(`{}`)
		w.WantNotReady("300")
	})
}

func TestReadyPathNoticesAKeyThatWasMended(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key")
	lbtest.WriteFile(t, file, "wrong")
	lbtest.InBubble(t, `openai_lb {
		backend http://a {
			api_key {file.`+file+`}
		}
		ready_path /readyz
	}`, func(_ *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.WantsKey("right"))
		w.Post(`{}`)
		w.WantNotReady("60")
		lbtest.WriteFile(t, file, "right")
		time.Sleep(keys.ReloadInterval)
		w.WantReady()
	})
}

func TestReadyPathAsksForNoKey(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\nclient_key alice sk-1234-of-alice\nready_path /readyz\n}", func(t *testing.T, w *lbtest.World) {
		w.WantReady()
		w.Post(`{}`).WantError(t, http.StatusUnauthorized, "invalid_api_key")
	})
}

func TestWithoutReadyPathNothingIsReady(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
		w.Ready(http.MethodGet).WantError(t, 404, "unknown_url")
	})
}

func TestReadyPathMindsActiveHealthChecks(t *testing.T) {
	a, server := lbtest.Listen(t, "a")
	address := lbtest.ServeAt(t, `openai_lb {
		backend `+server.URL+` {
			health_uri /health
			health_interval 10ms
		}
		ready_path /readyz
	}`)
	client := lbtest.NewClient(t)
	answers := func(status int, retryAfter string) func() bool {
		return func() bool {
			reply := lbtest.Get(client, "http://"+address+"/readyz")
			return reply.Status == status && reply.Header.Get("Retry-After") == retryAfter
		}
	}
	lbtest.WaitFor(t, answers(http.StatusOK, ""))
	a.Replies(lbtest.Status(500))
	// health checks do not say when a backend will be well
	lbtest.WaitFor(t, answers(http.StatusServiceUnavailable, ""))
	a.Recovers()
	lbtest.WaitFor(t, answers(http.StatusOK, ""))
}
