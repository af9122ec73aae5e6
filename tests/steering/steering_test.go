package steering

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

const chat = `{"model":"gpt-4o","messages":[],"max_tokens":100}`

// says is a reply with what is left of 60 requests and 1000 tokens a minute.
func says(requests, tokens int, more ...string) http.HandlerFunc {
	return lbtest.Says(200, `{"id":"chatcmpl-1","choices":[]}`, append(more, "X-Ratelimit-Limit-Requests", "60", "X-Ratelimit-Remaining-Requests", fmt.Sprint(requests),
		"X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", fmt.Sprint(tokens), "X-Ratelimit-Reset-Requests", "10", "X-Ratelimit-Reset-Tokens", "60")...)
}

// inBubble runs a test with these backends, of which each is first asked once.
func inBubble(t *testing.T, backends, options string, test func(t *testing.T, w *world)) {
	t.Helper()
	pool := lbtest.Unique("steering")
	config := "openai_lb {\npool " + pool + "\n" + options + "\n"
	for name := range strings.FieldsSeq(backends) {
		host, priority, _ := strings.Cut(name, ":")
		config += "backend http://" + host + " {\nname " + host + "\npriority " + priority + "\n}\n"
	}
	lbtest.InBubble(t, config+"}", func(t *testing.T, w *lbtest.World) { test(t, &world{w, t, pool}) })
}

type world struct {
	*lbtest.World
	t    *testing.T
	pool string
}

// wantAt checks which backends serve requests.
func (w *world) wantAt(body string, want ...string) {
	w.t.Helper()
	for _, b := range w.Backends {
		b.Forget()
	}
	for range 40 {
		if got := w.Post(body); got.Status != 200 {
			w.t.Fatalf("got %d", got.Status)
		}
	}
	var got []string
	for name, b := range w.Backends {
		if len(b.Received()) > 0 {
			got = append(got, name)
		}
	}
	if slices.Sort(got); !slices.Equal(got, want) {
		w.t.Errorf("%v serve, want %v", got, want)
	}
}

// learn has each backend reply once, and then as if there was no limit.
func (w *world) learn(replies map[string]http.HandlerFunc) {
	w.t.Helper()
	for name, reply := range replies {
		w.Backends[name].Replies(reply)
	}
	for range 100 {
		w.Post(`{"model":"gpt-4o","messages":[]}`)
	}
	w.AllReply(lbtest.Says(200, `{"id":"chatcmpl-1","choices":[]}`))
}

func TestABackendWithoutRoomIsPassedOver(t *testing.T) {
	for name, tc := range map[string]struct {
		backends, options string
		a, b              http.HandlerFunc
		want              []string
	}{
		"no tokens":             {"a:1 b:1 c:2", "", says(30, 0), says(1000, 100_000), []string{"b"}},
		"too few tokens":        {"a:1 b:1 c:2", "", says(1000, 99), says(1000, 100_000), []string{"b"}},
		"no requests":           {"a:1 b:1 c:2", "", says(0, 100_000), says(1000, 100_000), []string{"b"}},
		"room":                  {"a:1 b:1 c:2", "", says(1000, 100_000), says(1000, 100_000), []string{"a", "b"}},
		"off":                   {"a:1 b:1 c:2", "quota_steering off", says(0, 0), says(1000, 100_000), []string{"a", "b"}},
		"no room anywhere":      {"a:1 b:1 c:2", "", says(30, 0), says(30, 0), []string{"a", "b"}},
		"alone in its place":    {"a:1 b:2 c:2", "", says(30, 0), says(1000, 100_000), []string{"a"}},
		"a backend's spillover": {"a:1 b:1 c:2", "", says(30, 0, "X-Ms-Deployment-Name", "gpt-4o-spill"), says(1000, 100_000), []string{"a", "b"}},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, tc.backends, tc.options, func(_ *testing.T, w *world) {
				w.learn(map[string]http.HandlerFunc{"a": tc.a, "b": tc.b})
				w.wantAt(chat, tc.want...)
				time.Sleep(time.Minute)
				w.Backends["a"].Recovers()
			})
		})
	}
}

func TestTheSteeringEndsWithTheReading(t *testing.T) {
	inBubble(t, "a:1 b:1", "", func(_ *testing.T, w *world) {
		w.learn(map[string]http.HandlerFunc{"a": says(30, 0), "b": says(1000, 100_000)})
		w.wantAt(chat, "b")
		w.WantNobodyBlamed()
		lbtest.WantSums(w.t, w.pool, `quota_left_ratio backend=a type=tokens 0`)
		if steered := lbtest.SumOf(w.t, "steered_total", map[string]string{"pool": w.pool, "backend": "a"}); steered < 40 {
			w.t.Errorf("steered_total is %v", steered)
		}
		time.Sleep(time.Minute)
		w.wantAt(chat, "a", "b")
	})
}

func TestWhatWasSentSinceTheLastReadingCounts(t *testing.T) {
	inBubble(t, "a:1 b:1", "", func(t *testing.T, w *world) {
		w.learn(map[string]http.HandlerFunc{"a": says(1000, 250), "b": says(1000, 100_000)})
		time.Sleep(time.Minute)
		w.Backends["a"].Replies(says(1000, 250))
		for w.Backends["a"].Forget(); len(w.Backends["a"].Received()) == 0; {
			w.Post(chat)
		}
		w.AllReply(lbtest.Says(200, `{"id":"chatcmpl-1","choices":[]}`))
		w.wantAt(chat, "a", "b")
		if n := len(w.Backends["a"].Received()); n != 2 { // of 113 tokens each
			t.Errorf("a got %d more requests, want 2", n)
		}
	})
}

func TestASmallRequestMayHaveRoomWhereALargeOneHasNone(t *testing.T) {
	inBubble(t, "a:1 b:1", "", func(_ *testing.T, w *world) {
		w.learn(map[string]http.HandlerFunc{"a": says(1000, 10_000), "b": says(1000, 1_000_000)})
		w.wantAt(`{"model":"gpt-4o","messages":[],"max_tokens":20000}`, "b")
		w.wantAt(`{"model":"gpt-4o","messages":[],"max_tokens":20}`, "a", "b")
		w.wantAt(`{"model":"gpt-4o-mini","messages":[],"max_tokens":20000}`, "a", "b") // another model has other limits
	})
}

func TestAThrottleHoldsAlthoughMuchIsLeft(t *testing.T) {
	inBubble(t, "a:1 b:1", "", func(t *testing.T, w *world) {
		w.Backends["b"].Replies(says(1000, 100_000))
		w.Backends["a"].Replies(lbtest.Status(429, "Retry-After", "20", "X-Ratelimit-Limit-Requests", "50", "X-Ratelimit-Remaining-Requests", "45",
			"X-Ratelimit-Limit-Tokens", "50000", "X-Ratelimit-Remaining-Tokens", "46760"))
		w.wantAt(chat, "a", "b")
		if n := len(w.Backends["a"].Received()); n != 1 {
			t.Errorf("a was called %d times", n)
		}
		w.Backends["a"].Replies(says(1000, 100_000))
		w.wantAt(chat, "b")
		time.Sleep(20 * time.Second)
		w.wantAt(chat, "a", "b")
	})
}

func TestTheCallersOwnLimitsSayNothingOfABackend(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a {\nauth passthrough\n}\nbackend http://b {\nauth passthrough\n}\n}", func(t *testing.T, lw *lbtest.World) {
		w := &world{World: lw, t: t}
		w.Prepares = func(r *http.Request) *http.Request {
			r.Header.Set("Authorization", "Bearer sk-caller-0123456789")
			return r
		}
		w.learn(map[string]http.HandlerFunc{"a": says(0, 0), "b": says(1000, 100_000)})
		w.wantAt(chat, "a", "b")
	})
}

// Each model has its own limits, and those of jobs are not those of inference.
func TestOtherOperationsAreNotSteered(t *testing.T) {
	inBubble(t, "a:1 b:1", "", func(t *testing.T, w *world) {
		w.AllReply(says(30, 500))
		for range 20 {
			w.Send(w.Request(http.MethodGet, "/v1/models/gpt-4o", nil))
		}
		if sum := lbtest.SumOf(t, "quota_left_ratio", map[string]string{"pool": w.pool}); sum != 0 {
			t.Errorf("quota_left_ratio is %v", sum)
		}
		w.AllReply(lbtest.Says(200, `{"id":"chatcmpl-1","choices":[]}`))
		w.wantAt(chat, "a", "b")
	})
}

func TestWhatIsLeftSurvivesAReload(t *testing.T) {
	a, serverA := lbtest.Listen(t, "a")
	_, serverB := lbtest.Listen(t, "b")
	port := lbtest.FreePort(t)
	config := func(minutes int) string {
		return fmt.Sprintf("{\nadmin off\ndefault_bind 127.0.0.1\n}\nhttp://:%d {\nopenai_lb {\nbackend %s {\nmodel gpt-4o\n}\nbackend %s\nstream_idle_timeout %dm\n}\n}", port, serverA.URL, serverB.URL, minutes)
	}
	lbtest.Run(t, config(1))
	client, url := lbtest.NewClient(t), fmt.Sprintf("http://127.0.0.1:%d/v1/chat/completions", port)
	a.Replies(says(30, 0))
	for len(a.Received()) == 0 {
		lbtest.Post(client, url, chat)
	}
	a.Forget()
	lbtest.Reload(t, config(2))
	client.CloseIdleConnections()
	for range 40 {
		lbtest.Post(client, url, chat).WantServed(t, "b")
	}
}
