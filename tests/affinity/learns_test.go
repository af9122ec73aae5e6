package affinity

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"go.uber.org/zap/zapcore"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// TestIDsAreLearnedFromAnyReply whatever its form is.
func TestIDsAreLearnedFromAnyReply(t *testing.T) {
	for name, prepare := range map[string]func(*fakeAccount){
		"plain":                      func(*fakeAccount) {},
		"with a long field before":   func(a *fakeAccount) { a.inserts = `"instructions":"` + strings.Repeat("x", 300<<10) + `",` },
		"with a long field after it": func(a *fakeAccount) { a.changes = func(s string) string { return s + strings.Repeat(" ", 3<<20) } },
		"compressed": func(a *fakeAccount) {
			a.headers, a.changes = map[string]string{"Content-Encoding": "gzip"}, lbtest.Gzipped
		},
		"with a charset": func(a *fakeAccount) { a.headers = map[string]string{"Content-Type": "application/json; charset=utf-8"} },
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.OverBothVersions(t, threeAccounts, func(t *testing.T, in *lbtest.World) {
				w := &world{in}
				all := w.accounts("a", "b", "c")
				for _, a := range all {
					prepare(a)
				}
				for _, path := range []string{"/v1/responses", "/v1/files", "/v1/conversations"} {
					r := w.Request("POST", path, strings.NewReader("{}"))
					r.Header.Set("Authorization", "Bearer "+alice)
					r.Header.Set("Accept-Encoding", "gzip")
					made := w.Send(r)
					if made.Status != 200 {
						t.Fatalf("client got %d", made.Status)
					}
					a := all[made.Backend]
					for id := range a.stored {
						w.call(bob, "GET", path+"/"+id, "").WantError(t, 404, "not_found")
					}
					clear(a.stored)
				}
			})
		})
	}
}

// TestAnIDIsKnownBeforeTheReplyEnds has a client ask for what it was told of
// before the stream is over.
func TestAnIDIsKnownBeforeTheReplyEnds(t *testing.T) {
	inBubble(t, threeAccounts, func(t *testing.T, w *world) {
		proceed := make(chan bool)
		all := w.accounts("a", "b", "c")
		for name, a := range all {
			a.stored["resp_of_"+name] = true
			a.fails = nil
		}
		all["a"].does(lbtest.Throttled("60"))
		all["c"].does(lbtest.Throttled("60"))
		w.Serve("b:80", http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			if r.Method == "GET" {
				all["b"].ServeHTTP(rw, r)
				return
			}
			rw.Header().Set("X-Backend", "b")
			lbtest.Streams("event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"resp_of_b\"}}\n\n",
				"event: response.output_text.delta\ndata: {\"delta\":\"hi\"}\n\n", func() { <-proceed })(rw, r)
		}))
		r := w.Request("POST", "/v1/responses", strings.NewReader(`{"stream":true}`))
		r.Header.Set("Authorization", "Bearer "+alice)
		lbtest.Do(t, w.Client, r)
		w.call(bob, "GET", "/v1/responses/resp_of_b", "").WantError(t, 404, "not_found")
		w.call(alice, "GET", "/v1/responses/resp_of_b", "").WantServed(t, "b")
		close(proceed)
	})
}

func TestSomeRepliesTeachNothing(t *testing.T) {
	for name, ask := range map[string]struct{ method, path, body, reply string }{
		"the content of a file":         {"GET", "/v1/files/file-12345678/content", "", `{"id":"resp_12345678"}`},
		"a chat that is not stored":     {"POST", "/v1/chat/completions", "{}", `{"id":"resp_12345678"}`},
		"an embedding":                  {"POST", "/v1/embeddings", "{}", `{"id":"resp_12345678"}`},
		"an error":                      {"POST", "/v1/responses", "{}", `{"error":{"message":"x"},"id":"resp_12345678"}`},
		"a response that is not stored": {"POST", "/v1/responses", "{}", `{"id":"resp_12345678","store":false}`},
		"text":                          {"POST", "/v1/responses", "{}", `"id":"resp_12345678"`},
		"metadata":                      {"POST", "/v1/responses", "{}", `{"metadata":{"id":"resp_12345678"}}`},
		"what the request named itself": {"POST", "/v1/responses", `{"input":[{"id":"resp_12345678"}]}`, `{"id":"resp_12345678"}`},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, oneAccount, func(t *testing.T, w *world) {
				code := 200
				if name == "an error" {
					code = 400
				}
				w.Backends["a"].Replies(lbtest.Says(code, ask.reply))
				w.call(alice, ask.method, ask.path, ask.body)
				w.Backends["a"].Recovers()
				w.call(bob, "GET", "/v1/responses/resp_12345678", "").WantServed(t, "a")
			})
		})
	}
}

const oneAccount = "openai_lb {\nclient_key alice client-key-of-alice\nclient_key bob client-key-of-bob\nbackend http://a\n}"

// TestWhatAChatNamesIsLearned if it is stored, or can be heard.
func TestWhatAChatNamesIsLearned(t *testing.T) {
	stream := func(chunks ...string) http.HandlerFunc {
		return lbtest.Streams("data: " + strings.Join(chunks, "\n\ndata: ") + "\n\ndata: [DONE]\n\n")
	}
	const role = `{"id":"chatcmpl-12345678","choices":[{"delta":{"role":"assistant","content":""}}]}`
	const read, speak = "GET /v1/chat/completions/chatcmpl-12345678", `POST /v1/chat/completions {"messages":[{"role":"assistant","audio":{"id":"audio_12345678"}}]}`
	for name, c := range map[string]struct {
		ask    string
		reply  http.HandlerFunc
		follow string
		known  bool
	}{
		"stored":              {`{"store":true}`, lbtest.Says(200, `{"id":"chatcmpl-12345678"}`), read, true},
		"stored and streamed": {`{"store":true,"stream":true}`, stream(role, `{"id":"chatcmpl-12345678","choices":[{"delta":{"content":"x"}}]}`), read, true},
		"not stored":          {`{"stream":true}`, stream(role), read, false},
		"heard": {`{"audio":{"voice":"alloy","format":"wav"}}`, lbtest.Says(200, `{"id":"chatcmpl-12345678","choices":[{"message":{"audio":{"id":"audio_12345678","data":"AA=="}}}]}`),
			speak, true},
		"heard and streamed": {`{"audio":{"voice":"alloy","format":"pcm16"},"stream":true}`, stream(role, `{"id":"chatcmpl-12345678","choices":[{"delta":{"content":"x"}}]}`,
			`{"id":"chatcmpl-12345678","choices":[{"delta":{"audio":{"id":"audio_12345678"}}}]}`), speak, true},
		"not heard": {`{"audio":null}`, lbtest.Says(200, `{"choices":[{"message":{"audio":{"id":"audio_12345678"}}}]}`), speak, false},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, oneAccount, func(t *testing.T, w *world) {
				w.Backends["a"].Replies(c.reply)
				w.call(alice, "POST", "/v1/chat/completions", c.ask)
				w.Backends["a"].Recovers()
				method, rest, _ := strings.Cut(c.follow, " ")
				path, body, _ := strings.Cut(rest, " ")
				if reply := w.call(bob, method, path, body); (reply.Status == 404) != c.known {
					t.Errorf("another caller got %d", reply.Status)
				}
				w.call(alice, method, path, body).WantServed(t, "a")
			})
		})
	}
}

func TestTheIDOfACallIsLearned(t *testing.T) {
	inBubble(t, oneAccount, func(t *testing.T, w *world) {
		w.Backends["a"].Replies(lbtest.Says(201, "v=0", "Content-Type", "application/sdp", "Location", "/v1/realtime/calls/rtc_12345678"))
		w.call(alice, "POST", "/v1/realtime/calls", "v=0")
		w.call(bob, "POST", "/v1/realtime/calls/rtc_12345678/hangup", "").WantError(t, 404, "not_found")
	})
}

// TestItIsToldWhyAnAccountWasChosen in placeholders and in the log.
func TestItIsToldWhyAnAccountWasChosen(t *testing.T) {
	inBubble(t, threeAccountsInOrder[:len(threeAccountsInOrder)-1]+"affinity {\nprompt_cache\n}\n}", func(t *testing.T, w *world) {
		w.Shows = map[string]string{"X-Why": "{http.openai_lb.affinity} {http.openai_lb.affinity_result}"}
		all := w.accounts("a", "b", "c")
		first, elsewhere := all["a"].put("resp"), all["b"].put("resp")
		for _, c := range []struct {
			path, body string
			want       string
		}{
			{"/v1/chat/completions", "{}", "none"},
			{"/v1/chat/completions", `{"prompt_cache_key":"x"}`, "cache hit"},
			{"/v1/responses/" + first, "", "asked miss"},
			{"/v1/responses/" + first, "", "owner hit"},
			{"/v1/files", "", "none"},
			{"/v1/responses/" + elsewhere, "", "asked miss"},
			{"/v1/responses/" + elsewhere, "", "owner hit"},
			{"/v1/responses", fmt.Sprintf(`{"previous_response_id":%q}`, elsewhere), "owner hit"},
			{"/v1/conversations", "{}", "learned"},
		} {
			method := "POST"
			if c.body == "" {
				method = "GET"
			}
			w.Logs.TakeAll()
			reply := w.call(alice, method, c.path, c.body)
			why, _, _ := strings.Cut(c.want, " ")
			if got := reply.Header.Get("X-Why"); got != c.want && (why != "learned" || got != "none") {
				t.Errorf("%s: %q, want %q", c.path, got, c.want)
			}
			for _, entry := range w.Logs.FilterLevelExact(zapcore.DebugLevel).FilterMessage("attempt").All() {
				if got := entry.ContextMap()["affinity"]; got != why && why != "learned" {
					t.Errorf("%s: %q is logged, want %q", c.path, got, why)
				}
			}
		}
	})
}

// TestWhatOnlyTheLastEventTellsIsLearned however long that event is.
func TestWhatOnlyTheLastEventTellsIsLearned(t *testing.T) {
	for _, length := range []int{10, 500_000} {
		for _, stored := range []bool{true, false} {
			inBubble(t, threeAccounts, func(t *testing.T, w *world) {
				event := func(name, data string) string { return fmt.Sprintf("event: %s\ndata: %s\n\n", name, data) }
				stream := lbtest.Streams(
					event("response.created", fmt.Sprintf(`{"response":{"id":"resp_in_a_stream","store":%v}}`, stored)),
					event("response.output_item.done", `{"item":{"id":"rs_in_a_stream","encrypted_content":null}}`),
					event("response.completed", fmt.Sprintf(`{"response":{"id":"resp_in_a_stream","instructions":%q,"output":[{"id":"rs_in_a_stream","encrypted_content":"gAAAAABcontent"}],"store":%v}}`, strings.Repeat("x", length), stored)))
				for _, b := range w.Backends {
					b.Replies(stream)
				}
				w.call(alice, "POST", "/v1/responses", `{"stream":true}`).WantServed(t, "a", "b", "c")
				for _, b := range w.Backends {
					b.Recovers()
				}
				w.call(bob, "POST", "/v1/responses", `{"input":[{"encrypted_content":"gAAAAABcontent"}]}`).WantError(t, 404, "invalid_encrypted_content")
				for _, body := range []string{`{"previous_response_id":"resp_in_a_stream"}`, `{"input":[{"id":"rs_in_a_stream"}]}`} {
					if got := w.call(bob, "POST", "/v1/responses", body); got.Status != map[bool]int{true: 404, false: 200}[stored] {
						t.Errorf("stored %v, %s: client got %d %s", stored, body, got.Status, got.Body)
					}
				}
			})
		}
	}
}
