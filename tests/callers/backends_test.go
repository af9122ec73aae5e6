package callers

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// threeBackends are two for alice, ptu-1 and ptu-2, and one for others only,
// east.
const threeBackends = `
	backend http://east {
		name east
		model gpt-4o
		model gpt-5
	}
	backend http://ptu-1 {
		name ptu-1
		model gpt-4o
	}
	backend http://ptu-2 {
		name ptu-2
		priority 2
		model gpt-4o
		model o3
	}
`

const mayUsePTUs = threeBackends + "caller alice {\nbackends ptu-*\n}\n"

func (w *world) ask(key, path string) lbtest.Reply {
	r := w.Request(http.MethodGet, path, nil)
	r.Header.Set("Authorization", "Bearer "+key)
	return w.Send(r)
}

func TestACallerUsesOnlyItsBackends(t *testing.T) {
	inBubbleWith(t, mayUsePTUs, func(t *testing.T, w *world) {
		chat := func(key string) lbtest.Reply { return w.post(key, "/v1/chat/completions", `{"model":"gpt-4o"}`) }
		for range 5 {
			chat(aliceKey).WantServed(t, "ptu-1")
		}
		w.Backends["ptu-1"].Replies(lbtest.Throttled("30"))
		chat(aliceKey).WantServed(t, "ptu-2")
		w.Backends["ptu-2"].Replies(lbtest.Throttled("20"))
		got := chat(aliceKey)
		got.WantError(t, 429, "rate_limit_exceeded")
		wantHeaders(t, got, "Retry-After", "20")
		chat(bobKey).WantServed(t, "east")

		w.Backends["east"].Replies(lbtest.Throttled("5")) // which alice must not learn
		chat(bobKey).WantStatus(t, 429)
		got = chat(aliceKey)
		got.WantError(t, 429, "rate_limit_exceeded")
		wantHeaders(t, got, "Retry-After", "20")
		w.WantCalls(map[string]int{"east": 2, "ptu-1": 6, "ptu-2": 2})
	})
}

func TestACallersModelsAreThoseOfItsBackends(t *testing.T) {
	inBubbleWith(t, threeBackends+"caller alice {\nbackends ptu-1 ptu-2\n}\ncaller bob {\nbackends east\nmodels gpt-4o gpt-5\n}\n", func(t *testing.T, w *world) {
		for key, c := range map[string]struct{ list, other, available string }{
			aliceKey: {`"gpt-4o" "o3"`, "gpt-5", "Available models: gpt-4o, o3."},
			bobKey:   {`"gpt-4o" "gpt-5"`, "o3", "Available models: gpt-4o, gpt-5."},
		} {
			got := w.ask(key, "/v1/models")
			for _, model := range []string{"gpt-4o", "gpt-5", "o3"} {
				if listed := strings.Contains(got.Body, `"`+model+`"`); listed != strings.Contains(c.list, `"`+model+`"`) {
					t.Errorf("the list %s has %s: %v, want %s", got.Body, model, listed, c.list)
				}
			}
			for _, got := range []lbtest.Reply{w.ask(key, "/v1/models/"+c.other), w.post(key, "/v1/chat/completions", `{"model":"`+c.other+`"}`)} {
				got.WantError(t, http.StatusNotFound, "model_not_found")
				if !strings.Contains(got.Body, c.available) {
					t.Errorf("got %s, want %s", got.Body, c.available)
				}
			}
		}
		w.WantCalls(map[string]int{"east": 0, "ptu-1": 0, "ptu-2": 0})
	})
}

func TestWhatIsStoredAtAnotherAccountDoesNotExistForACaller(t *testing.T) {
	inBubbleWith(t, mayUsePTUs, func(t *testing.T, w *world) {
		missing := lbtest.Says(404, `{"error":{"message":"No such object","code":"not_found"}}`)
		w.AllReply(missing)
		for path, object := range map[string]string{
			"/v1/files/file-12345678":     `{"id":"file-12345678","object":"file"}`,
			"/v1/responses/resp_12345678": `{"id":"resp_12345678","object":"response","output":[{"type":"message","id":"msg_12345678"}]}`,
		} {
			w.Backends["east"].Replies(lbtest.Says(200, object))
			w.ask(bobKey, path).WantServed(t, "east") // which does not show whose it is
		}
		w.AllReply(nil)
		for _, b := range w.Backends {
			b.Forget()
		}

		w.ask(aliceKey, "/v1/files/file-12345678").WantError(t, http.StatusNotFound, "not_found")
		w.ask(aliceKey, "/v1/responses/resp_12345678").WantError(t, http.StatusNotFound, "not_found")
		w.post(aliceKey, "/v1/responses", `{"model":"gpt-4o","previous_response_id":"resp_12345678"}`).WantError(t, http.StatusNotFound, "previous_response_not_found")
		// an item may come whole
		w.post(aliceKey, "/v1/responses", `{"model":"gpt-4o","input":[{"type":"message","role":"user","content":"Hi","id":"msg_12345678"}]}`).WantServed(t, "ptu-1")
		w.ask(aliceKey, "/v1/files").WantServed(t, "ptu-2") // which has all of her models
		w.post(aliceKey, "/v1/files", `{}`).WantServed(t, "ptu-2")
		w.WantCalls(map[string]int{"east": 0, "ptu-1": 1, "ptu-2": 2})

		w.ask(bobKey, "/v1/files/file-12345678").WantServed(t, "east")
		w.ask(bobKey, "/v1/responses/resp_12345678").WantServed(t, "east")
	})
}

func TestASilenceAndACooldownAreNotTriedWithAnotherCallersBackend(t *testing.T) {
	inBubbleWith(t, mayUsePTUs, func(t *testing.T, w *world) {
		const chat = "/v1/chat/completions"
		body := `{"model":"gpt-4o","messages":[]}`
		for range 12 { // so that the usual wait is known
			w.post(bobKey, chat, body).WantStatus(t, 200)
			w.post(aliceKey, chat, body).WantServed(t, "ptu-1")
		}
		w.Backends["east"].Forget()
		w.Backends["ptu-2"].Replies(lbtest.Throttled("3600"))
		w.post(aliceKey, chat, `{"model":"o3","messages":[]}`).WantStatus(t, 429)
		w.Backends["ptu-1"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			time.Sleep(5 * time.Second)
			lbtest.Says(200, `{}`)(rw, r)
		})
		w.post(aliceKey, chat, body).WantServed(t, "ptu-1")

		w.Backends["ptu-1"].Replies(lbtest.Throttled("10"))
		w.post(aliceKey, chat, body).WantStatus(t, 429)
		w.Backends["ptu-1"].Recovers()
		time.Sleep(11 * time.Second)
		w.post(aliceKey, chat, body).WantServed(t, "ptu-1") // the probe
		w.WantCalls(map[string]int{"east": 0})
	})
}

func TestACallerWaitsOnlyForItsBackends(t *testing.T) {
	inBubbleWith(t, "wait 10s\n"+threeBackends+"caller alice {\nbackends ptu-1\n}\ncaller bob {\nbackends east\n}\n", func(t *testing.T, w *world) {
		took := func(key, backend string) func(*testing.T) {
			begin, done := time.Now(), make(chan time.Duration)
			var got lbtest.Reply
			go func() {
				got = w.post(key, "/v1/chat/completions", `{"model":"gpt-4o"}`)
				done <- time.Since(begin)
			}()
			synctest.Wait()
			return func(t *testing.T) {
				t.Helper()
				wait := <-done
				got.WantServed(t, backend)
				if want := map[string]time.Duration{"ptu-1": 9 * time.Second, "east": 2 * time.Second}[backend]; wait != want {
					t.Errorf("the request for %s took %s, want %s", backend, wait, want)
				}
			}
		}
		once := func(wait string) http.HandlerFunc {
			var first sync.Once
			return func(rw http.ResponseWriter, r *http.Request) {
				reply := lbtest.Says(200, `{}`)
				first.Do(func() { reply = lbtest.Throttled(wait) })
				reply(rw, r)
			}
		}
		w.Backends["ptu-1"].Replies(once("9"))
		w.Backends["east"].Replies(once("2"))
		alices := took(aliceKey, "ptu-1") // she came first, and waits for longer
		bobs := took(bobKey, "east")
		bobs(t)
		alices(t)
		w.ask(aliceKey, "/v1/files").WantServed(t, "ptu-1")
	})
}

// TestACallerGetsWhatAPoolOfItsBackendsWouldGiveIt compares random requests
// with such a pool.
func TestACallerGetsWhatAPoolOfItsBackendsWouldGiveIt(t *testing.T) {
	east, alone, _ := strings.Cut(threeBackends, "backend http://ptu-1")
	alone = "backend http://ptu-1" + alone
	for seed := range uint64(4) {
		options := "affinity {\nprompt_cache x-session\n}\nsilence off\n"
		if seed%2 == 0 {
			options += "wait 3s\n"
		}
		var want []string
		inBubbleWith(t, options+alone+"caller alice {\n}\n", func(_ *testing.T, w *world) { want = w.lives(seed) })
		inBubbleWith(t, options+east+alone+"caller alice {\nbackends ptu-2 ptu-1\n}\n", func(t *testing.T, w *world) {
			got := w.lives(seed)
			for i := range want {
				if got[i] != want[i] {
					t.Fatalf("seed %d, request %d: got %s, want %s", seed, i, got[i], want[i])
				}
			}
			w.WantCalls(map[string]int{"east": 0})
		})
	}
}

// lives has random things happen to alice's backends and her requests. It
// returns what she got.
func (w *world) lives(seed uint64) (got []string) {
	random := rand.New(rand.NewPCG(seed, 3))
	of := func(choices ...string) string { return choices[random.IntN(len(choices))] }
	made := 0
	for range 120 {
		b := w.Backends[of("ptu-1", "ptu-2")]
		switch random.IntN(9) {
		case 0:
			b.Replies(lbtest.Throttled(of("1", "2", "30")))
		case 1:
			b.Replies(lbtest.Status(503))
		case 2:
			b.Replies(lbtest.Says(404, `{"error":{"message":"No such file","code":"not_found"}}`))
		case 3:
			made++
			b.Replies(lbtest.Says(200, fmt.Sprintf(`{"id":"file-%08d","object":"file"}`, made)))
		case 4:
			b.Replies(lbtest.Aborts)
		case 5, 6:
			b.Recovers()
		default:
			time.Sleep(time.Duration(random.IntN(8000)) * time.Millisecond)
		}
		method, path := http.MethodPost, of("/v1/chat/completions", "/v1/chat/completions", "/v1/chat/completions", "/v1/files", "/v1/responses", "/v1/conversations")
		body := `{"model":"` + of("gpt-4o", "gpt-4o", "o3", "gpt-5", "gpt-9") + `","messages":[{"role":"user","content":"` + strings.Repeat(of("a", "b"), 8000) + `"}]}`
		switch id := fmt.Sprintf("file-%08d", random.IntN(made+2)); random.IntN(6) {
		case 0:
			method, path, body = http.MethodGet, of("/v1/models", "/v1/models/o3", "/v1/models/gpt-5", "/v1/files", "/v1/files/"+id, "/v1/conversations"), ""
		case 1:
			path, body = "/v1/responses", `{"model":"gpt-4o","input":[{"role":"user","content":[{"type":"input_file","file_id":"`+id+`"}]}]}`
		}
		r := w.Request(method, path, strings.NewReader(body))
		r.Header.Set("Authorization", "Bearer "+aliceKey)
		r.Header.Set("X-Session", of("1", "2", "3", "4"))
		reply := w.Send(r)
		got = append(got, fmt.Sprint(method, path, reply.Status, reply.Backend, reply.Body, reply.Err != nil, reply.Header["Retry-After"], reply.Header["Retry-After-Ms"], reply.Header["X-Should-Retry"]))
	}
	return got
}
