package openailb

import (
	"net/http"
	"path/filepath"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/secret"
)

// ready asks at the ready_path.
func (w *world) ready(method string) clientReply { return w.send(w.request(method, "/readyz", nil)) }

// wantReady checks that it answers that there is a backend to use.
func (w *world) wantReady() {
	w.t.Helper()
	got := w.ready(http.MethodGet)
	if got.status != http.StatusOK || got.body != `{"status":"ready"}` || got.header.Get("Cache-Control") != "no-store" ||
		got.header.Get("Content-Type") != "application/json" || got.header.Get("Retry-After") != "" {
		w.t.Errorf("got %d %v %s (%v), want ready", got.status, got.header, got.body, got.err)
	}
}

// wantNotReady checks that it answers that there is none, and when to come back.
func (w *world) wantNotReady(retryAfter string) {
	w.t.Helper()
	got := w.ready(http.MethodGet)
	got.wantError(w.t, http.StatusServiceUnavailable, "no_backend_usable")
	if got.header.Get("Retry-After") != retryAfter || got.header.Get("Cache-Control") != "no-store" {
		w.t.Errorf("got %v, want Retry-After %q", got.header, retryAfter)
	}
}

const twoBackends = `openai_lb {
	backend http://a
	backend http://b {
		priority 2
	}
	ready_path /readyz
}`

func TestReadyPathTellsWhetherAnyBackendCanBeUsed(t *testing.T) {
	inBubble(t, twoBackends, func(t *testing.T, w *world) {
		w.wantReady()
		w.stop("a")
		w.post(`{}`).wantServed(t, "b")
		w.wantReady()

		// b refuses its key for a minute; a, tried again, is unreachable for 10 s
		time.Sleep(4500 * time.Millisecond)
		w.backends["b"].replies(status(401))
		w.post(`{}`)
		time.Sleep(4500 * time.Millisecond)
		w.wantNotReady("6")
		if got := w.ready(http.MethodHead); got.status != http.StatusServiceUnavailable || got.body != "" || got.header.Get("Retry-After") != "6" {
			t.Errorf("HEAD gets %d %v %q", got.status, got.header, got.body)
		}

		// the time of a has come, and it is as it was
		time.Sleep(5500 * time.Millisecond)
		w.wantReady()
		w.post(`{}`)
		w.wantNotReady("10")

		// it is back
		w.serve("a:80", w.backends["a"])
		time.Sleep(10 * time.Second)
		w.wantReady()
		w.post(`{}`).wantServed(t, "a")
		w.wantReady()
	})
}

func TestReadyPathCallsNoBackend(t *testing.T) {
	inBubble(t, twoBackends, func(_ *testing.T, w *world) {
		w.wantReady()
		w.ready(http.MethodHead)
		w.wantCalls(map[string]int{"a": 0, "b": 0})
		for _, other := range []*http.Request{
			w.request(http.MethodPost, "/readyz", nil), w.request(http.MethodGet, "/readyz/", nil),
			w.request(http.MethodGet, "/READYZ", nil), w.request(http.MethodGet, "/v1/readyz", nil),
		} {
			w.send(other).wantServed(w.t, "a")
		}
	})
}

func TestReadyPathMindsNotWhatConcernsAModel(t *testing.T) {
	for name, reply := range map[string]http.HandlerFunc{
		"throttled":     throttled("300"),
		"failing":       status(500),
		"without it":    status(404),
		"overloaded":    status(503, "Retry-After", "60"),
		"a bad request": status(400),
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, twoBackends, func(_ *testing.T, w *world) {
				w.backends["a"].replies(reply)
				w.backends["b"].replies(reply)
				w.post(`{"model":"gpt-4o"}`)
				w.wantReady()
			})
		})
	}
}

func TestReadyPathMindsAnAccountWithoutBudget(t *testing.T) {
	inBubble(t, "openai_lb {\nbackend http://a\nready_path /readyz\n}", func(_ *testing.T, w *world) {
		w.backends["a"].replies(func(rw http.ResponseWriter, _ *http.Request) {
			rw.Header().Set("Content-Type", "application/json")
			rw.WriteHeader(429)
			rw.Write([]byte(`{"error":{"message":"You exceeded your current quota.","type":"insufficient_quota","code":"insufficient_quota"}}`))
		})
		w.post(`{}`)
		w.wantNotReady("300")
	})
}

func TestReadyPathNoticesAKeyThatWasMended(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key")
	writeFile(t, file, "wrong")
	inBubble(t, `openai_lb {
		backend http://a {
			api_key {file.`+file+`}
		}
		ready_path /readyz
	}`, func(_ *testing.T, w *world) {
		w.backends["a"].replies(wantsKey("right"))
		w.post(`{}`)
		w.wantNotReady("60")
		writeFile(t, file, "right")
		time.Sleep(secret.ReloadInterval)
		w.wantReady()
	})
}

func TestReadyPathAsksForNoKey(t *testing.T) {
	inBubble(t, "openai_lb {\nbackend http://a\nclient_key alice sk-alice\nready_path /readyz\n}", func(t *testing.T, w *world) {
		w.wantReady()
		w.post(`{}`).wantError(t, http.StatusUnauthorized, "invalid_api_key")
	})
}

func TestWithoutReadyPathNothingIsAnswered(t *testing.T) {
	inBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *world) {
		w.ready(http.MethodGet).wantServed(t, "a")
	})
}

func TestReadyPathMindsActiveHealthChecks(t *testing.T) {
	a, server := listen(t, "a")
	address := serveAt(t, `openai_lb {
		backend `+server.URL+`
		ready_path /readyz
		reverse_proxy {
			health_uri /health
			health_interval 10ms
		}
	}`)
	client := newClient(t)
	answers := func(status int, retryAfter string) func() bool {
		return func() bool {
			res, err := client.Get("http://" + address + "/readyz")
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			return res.StatusCode == status && res.Header.Get("Retry-After") == retryAfter
		}
	}
	waitFor(t, answers(http.StatusOK, ""))
	a.replies(status(500))
	// health checks do not say when a backend will be well
	waitFor(t, answers(http.StatusServiceUnavailable, ""))
	a.recovers()
	waitFor(t, answers(http.StatusOK, ""))
}
