package callers

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// send sends a request of alice's over HTTP/2, which has a reply before all of
// the body was sent.
func (w *world) send(path string, body io.Reader, length int64) lbtest.Reply {
	r := w.Request(http.MethodPost, path, body)
	r.Header.Set("Authorization", "Bearer "+aliceKey)
	r.ContentLength = length
	return w.Send(r)
}

// TestACallerOverItsLimitDoesNotUpload has requests of which the body never
// comes. Each would hold up to request_buffers of memory.
func TestACallerOverItsLimitDoesNotUpload(t *testing.T) {
	const chat, files = "/v1/chat/completions", "/v1/files"
	for _, c := range []struct {
		limits, path string
		code         string // empty: the body is read
		message      string
	}{
		{"requests 1/month", chat, "insufficient_quota", "alice has used 1 of 1 requests per month, and this request needs 1."},
		{"requests 1/month", files, "insufficient_quota", "alice has used 1 of 1 requests per month"},
		{"requests 1/minute", chat, "rate_limit_exceeded", "Rate limit reached for alice on requests per min (RPM): Limit 1, Used 1, Requested 1."},
		{"tokens 100/day", chat, "insufficient_quota", "alice has used 100 of 100 tokens per day"},
		{"tokens 100/hour", chat, "rate_limit_exceeded", "Rate limit reached for alice on tokens per hour (TPH): Limit 100, Used 100, Requested "},
		{"tokens 100/hour", files, "", ""}, // costs no tokens
		{"tokens 102/hour", chat, "", ""},  // the shortest prompt counts for two: the last one had more tokens than it seemed
		{"requests 2/month", chat, "", ""},
		{"requests 1/month then batch", chat, "", ""},
	} {
		for _, length := range []int64{-1, 300, 20 << 20} {
			inBubble(t, "caller alice {\n"+c.limits+"\n}\ntier batch", func(t *testing.T, w *world) {
				w.UseHTTP2()
				w.AllReply(used(60, 40))
				w.chat(prompt(50, "")).WantServed(t, "a")
				synctest.Wait()
				body, upload := io.Pipe()
				done := false
				var got lbtest.Reply
				go func() {
					got = w.send(c.path, body, length)
					done = true
				}()
				synctest.Wait()
				if done != (c.code != "") {
					t.Errorf("%s, %s of %d bytes: answered before the body: %v", c.limits, c.path, length, done)
				}
				if done {
					got.WantError(t, 429, c.code)
					if !strings.Contains(got.Body, c.message) {
						t.Errorf("%s, %s of %d bytes: got %s", c.limits, c.path, length, got.Body)
					}
				}
				upload.CloseWithError(io.ErrUnexpectedEOF)
				synctest.Wait()
				refused := uint64(0)
				if c.code != "" {
					refused = 1
				}
				if s := w.of("alice"); s.InFlight != 0 || s.Limits[0].Refused != refused || s.Limits[0].Demoted > 0 {
					t.Errorf("%s, %s of %d bytes: alice has used %+v", c.limits, c.path, length, s)
				}
				w.WantCalls(map[string]int{"a": 1})
			})
		}
	}
}

// TestAShortPromptIsToldItsWaitBeforeItIsRead compares the wait of a prompt
// that is read, and so costs what it costs, with that of one that is refused
// before.
func TestAShortPromptIsToldItsWaitBeforeItIsRead(t *testing.T) {
	told := make(map[int64]string)
	for _, limit := range []int64{200, 202} { // two tokens are left of the second one, so the body is read
		inBubble(t, "caller alice {\ntokens "+map[int64]string{200: "200", 202: "202"}[limit]+"/minute\n}", func(t *testing.T, w *world) {
			w.AllReply(used(60, 40))
			for range 2 {
				w.chat(prompt(50, `"max_tokens":10,`)).WantServed(t, "a")
				pass(15 * time.Second)
			}
			told[limit] = w.chat(prompt(80, `"max_tokens":1,`)).Header.Get("Retry-After")
		})
	}
	if told[200] == "" || told[200] != told[202] {
		t.Errorf("they are told to wait for %q and %q seconds", told[200], told[202])
	}
}

// TestARequestThatMayWaitForItsLimitIsRead has a wait that is long enough for
// the limit, and then one that is not.
func TestARequestThatMayWaitForItsLimitIsRead(t *testing.T) {
	for wait, want := range map[string]int{"": 429, "wait 2s\n": 429, "wait 10s\n": 200} {
		inBubble(t, wait+"caller alice {\nrequests 1/minute\n}", func(t *testing.T, w *world) {
			w.chat(`{}`).WantServed(t, "a")
			pass(57 * time.Second)
			w.chat(prompt(20_000, "")).WantStatus(t, want)
		})
	}
}
