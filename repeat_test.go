package openailb

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

// cutReply begins a JSON reply of status 200, and breaks it off.
func cutReply(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", "100")
	io.WriteString(w, `{"id":`)
}

// notRepeatable are requests that must not be executed twice.
var notRepeatable = [][2]string{
	{"POST", "/v1/batches"}, {"POST", "/v1/fine_tuning/jobs"}, {"POST", "/v1/files"}, {"POST", "/v1/uploads"}, {"POST", "/v1/uploads/u/parts"},
	{"POST", "/v1/vector_stores"}, {"POST", "/v1/threads/t/runs"}, {"POST", "/v1/unknown"}, {"POST", "/"}, {"PUT", "/v1/files/f"}, {"PATCH", "/v1/files/f"},
	{"DELETE", "/v1/files/f"}, {"DELETE", "/v1/responses/resp_1"}, {"DELETE", "/v1/models/ft"}, {"DELETE", "/v1/chat/completions/c"},
	{"POST", "/openai/batches?api-version=1"}, {"POST", "/openai/files?api-version=1"}, {"POST", "/openai/v1/fine_tuning/jobs"},
}

// mayRepeat are those that may be sent again, whatever happened.
var mayRepeat = [][2]string{
	{"POST", "/v1/chat/completions"}, {"POST", "/v1/completions"}, {"POST", "/v1/embeddings"}, {"POST", "/v1/responses"}, {"POST", "/v1/moderations"},
	{"POST", "/v1/audio/speech"}, {"POST", "/v1/audio/transcriptions"}, {"POST", "/v1/images/generations"}, {"POST", "/v1/images/edits"},
	{"POST", "/v1/messages"}, {"POST", "/v1/rerank"}, {"POST", "/openai/v1/chat/completions"},
	{"POST", "/openai/deployments/x/chat/completions?api-version=1"}, {"POST", "/openai/deployments/x/embeddings?api-version=1"},
	{"GET", "/v1/files"}, {"GET", "/v1/batches/b"}, {"GET", "/v1/anything"}, {"HEAD", "/v1/files"}, {"OPTIONS", "/v1/batches"},
}

// mayHaveRun are failures after which a request may have been executed, and
// what the client gets of them: the backend's status, or 0 for an error of ours.
var mayHaveRun = []struct {
	name   string
	reply  http.HandlerFunc
	status int
	early  bool // the backend does not wait for the body
}{
	{name: "500", reply: status(500), status: 500},
	{name: "502", reply: status(502), status: 502},
	{name: "504", reply: status(504), status: 504},
	{name: "520", reply: status(520), status: 520},
	{name: "529", reply: status(529), status: 529},
	{name: "408", reply: status(408), status: 408},
	{name: "424", reply: status(424), status: 424},
	{name: "a reset", reply: aborts},
	{name: "a reset before the body was read", reply: aborts, early: true},
	{name: "what is not HTTP", reply: raw("hello\r\n")},
	{name: "half the headers", reply: raw("HTTP/1.1 200 OK\r\nContent-")},
	{name: "a status under 100", reply: raw("HTTP/1.1 042 Odd\r\nContent-Length: 0\r\n\r\n")},
	{name: "no answer in time", reply: hangs},
	{name: "a 200 that is cut", reply: cutReply},
	{name: "a 500 that is cut", reply: raw("HTTP/1.1 500 Oops\r\nContent-Length: 100\r\n\r\n{")},
}

// didNotRun are failures after which it was not executed.
var didNotRun = map[string]http.HandlerFunc{
	"429":                     throttled("9"),
	"401":                     status(401),
	"403":                     status(403),
	"404 of the model":        says(404, `{"error":{"code":"DeploymentNotFound"}}`),
	"402":                     status(402),
	"498":                     status(498),
	"503":                     status(503),
	"503 with a hint":         status(503, "Retry-After", "9"),
	"429 for want of a quota": says(429, `{"error":{"code":"insufficient_quota"}}`),
}

func (w *world) operation(op [2]string) *http.Request {
	return w.request(op[0], op[1], strings.NewReader(`{"model":"gpt-4o"}`))
}

// afterARest runs each case in one bubble, when every bench of the case before
// is over.
func (w *world) afterARest(t *testing.T, name string, test func()) {
	t.Helper()
	if t.Failed() {
		return
	}
	for _, b := range w.backends {
		b.recovers()
		b.forget()
	}
	if test(); t.Failed() {
		t.Log("the case was:", name)
	}
	time.Sleep(time.Hour)
}

func TestNothingIsDoneTwice(t *testing.T) {
	for _, op := range notRepeatable {
		t.Run(fmt.Sprint(op), func(t *testing.T) {
			inBubble(t, threeInOrder, func(t *testing.T, w *world) {
				for _, failure := range mayHaveRun {
					w.afterARest(t, failure.name, func() {
						w.backends["a"].replies(failure.reply)
						r := w.operation(op)
						if failure.early {
							r.Header.Set("X-Early", "a")
						}
						reply := w.send(r)
						w.wantCalls(map[string]int{"a": 1, "b": 0, "c": 0})
						switch {
						case failure.status != 0:
							if reply.status != failure.status || reply.backend != "a" {
								t.Errorf("client got %d of %q, want a's %d", reply.status, reply.backend, failure.status)
							}
						case reply.err != nil || reply.status == 500:
							// what there is of a reply that was cut
						case reply.status != 502 && reply.status != 504 || !strings.Contains(reply.body, "executed"):
							t.Errorf("client got %d %s, want to be told that it may have been executed", reply.status, reply.body)
						}
					})
				}
			})
		})
	}
}

func TestWhatWasNotDoneGoesOn(t *testing.T) {
	for _, op := range append(append([][2]string(nil), notRepeatable...), mayRepeat...) {
		t.Run(fmt.Sprint(op), func(t *testing.T) {
			inBubble(t, threeInOrder, func(t *testing.T, w *world) {
				for name, reply := range didNotRun {
					if op[0] == http.MethodHead && name == "404 of the model" {
						continue // without a body, it does not say so
					}
					w.afterARest(t, name, func() {
						w.backends["a"].replies(reply)
						w.send(w.operation(op)).wantServed(t, "b")
					})
				}
				w.afterARest(t, "a refused connection", func() {
					w.stop("a")
					w.send(w.operation(op)).wantServed(t, "b")
				})
			})
		})
	}
}

func TestWhatMayBeDoneTwiceGoesOn(t *testing.T) {
	for _, op := range mayRepeat {
		t.Run(fmt.Sprint(op), func(t *testing.T) {
			inBubble(t, threeInOrder, func(t *testing.T, w *world) {
				for _, failure := range mayHaveRun {
					if op[0] != "POST" && (failure.name == "a 200 that is cut" || failure.name == "a reset before the body was read") || failure.early {
						continue // a GET's reply is not read ahead
					}
					w.afterARest(t, failure.name, func() {
						w.backends["a"].replies(failure.reply)
						w.send(w.operation(op)).wantServed(t, "b")
						w.wantCalls(map[string]int{"a": 1, "b": 1, "c": 0})
					})
				}
			})
		})
	}
}

func TestARequestStopsWhereItMayHaveRun(t *testing.T) {
	inBubble(t, threeInOrder, func(t *testing.T, w *world) {
		w.backends["a"].replies(throttled("9"))
		w.backends["b"].replies(aborts)
		reply := w.send(w.operation([2]string{"POST", "/v1/batches"}))
		w.wantCalls(map[string]int{"a": 1, "b": 1, "c": 0})
		if reply.status != 502 || !strings.Contains(reply.body, "executed") {
			t.Errorf("client got %d %s", reply.status, reply.body)
		}
	})
}

// TestNetHTTPDoesNothingTwice has a connection break that was used before.
// net/http sends such a request again by itself if the client marked it with
// Idempotency-Key, as some SDKs do.
func TestNetHTTPDoesNothingTwice(t *testing.T) {
	for _, op := range notRepeatable {
		inBubble(t, threeInOrder, func(t *testing.T, w *world) {
			for _, r := range []*http.Request{w.operation(op), w.request(op[0], op[1], nil)} {
				w.afterARest(t, fmt.Sprint(op, " with ", r.ContentLength, " bytes"), func() {
					w.send(w.request("GET", "/v1/models", nil)).wantServed(t, "a")
					w.backends["a"].replies(aborts)
					r.Header.Set("Idempotency-Key", "stainless-python-retry-1")
					if reply := w.send(r); reply.status != 502 {
						t.Errorf("%v: client got %d %s", op, reply.status, reply.body)
					}
					w.wantCalls(map[string]int{"a": 2, "b": 0, "c": 0})
					if got := w.backends["a"].received()[1].request.Header.Get("Idempotency-Key"); got != "stainless-python-retry-1" {
						t.Errorf("%v: a got the key %q", op, got)
					}
				})
			}
		})
	}
}

func TestATimeoutSaysThatItMayHaveRun(t *testing.T) {
	inBubble(t, poolOf("a b", "response_header_timeout 30s\nlb_policy first"), func(t *testing.T, w *world) {
		w.backends["a"].replies(hangs)
		start := time.Now()
		reply := w.send(w.operation([2]string{"POST", "/v1/batches"}))
		if reply.status != 504 || !strings.Contains(reply.body, "executed") || time.Since(start) != 30*time.Second {
			t.Errorf("after %s client got %d %s", time.Since(start), reply.status, reply.body)
		}
		w.wantCalls(map[string]int{"a": 1, "b": 0})
	})
}
