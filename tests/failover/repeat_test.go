package failover

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
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
	{"POST", "/v1/vector_stores"}, {"POST", "/v1/threads/t/runs"}, {"POST", "/v1/unknown"}, {"POST", "/v1/anything"}, {"PUT", "/v1/files/f"}, {"PATCH", "/v1/files/f"},
	{"DELETE", "/v1/files/f"}, {"DELETE", "/v1/responses/resp_1"}, {"DELETE", "/v1/models/ft"}, {"DELETE", "/v1/chat/completions/c"},
	{"POST", "/openai/batches?api-version=1"}, {"POST", "/openai/files?api-version=1"}, {"POST", "/openai/v1/fine_tuning/jobs"},
}

// mayRepeat are those that may be sent again, whatever happened.
var mayRepeat = [][2]string{
	{"POST", "/v1/chat/completions"}, {"POST", "/v1/completions"}, {"POST", "/v1/embeddings"}, {"POST", "/v1/responses"}, {"POST", "/v1/moderations"},
	{"POST", "/v1/audio/speech"}, {"POST", "/v1/audio/transcriptions"}, {"POST", "/v1/images/generations"}, {"POST", "/v1/images/edits"},
	{"POST", "/v1/messages"}, {"POST", "/v1/rerank"}, {"POST", "/openai/v1/chat/completions"},
	{"POST", "/openai/deployments/x/chat/completions?api-version=1"}, {"POST", "/openai/deployments/x/embeddings?api-version=1"},
	{"GET", "/v1/files/f"}, {"GET", "/v1/batches/b"}, {"GET", "/v1/anything"}, {"HEAD", "/v1/files/f"}, {"OPTIONS", "/v1/batches"},
}

// mayHaveRun are failures after which a request may have been executed, and
// what the client gets of them: the backend's status, or 0 for an error of ours.
var mayHaveRun = []struct {
	name   string
	reply  http.HandlerFunc
	status int
	early  bool // the backend does not wait for the body
}{
	{name: "500", reply: lbtest.Status(500), status: 500},
	{name: "502", reply: lbtest.Status(502), status: 502},
	{name: "504", reply: lbtest.Status(504), status: 504},
	{name: "520", reply: lbtest.Status(520), status: 520},
	{name: "529", reply: lbtest.Status(529), status: 529},
	{name: "408", reply: lbtest.Status(408), status: 408},
	{name: "424", reply: lbtest.Status(424), status: 424},
	{name: "a reset", reply: lbtest.Aborts},
	{name: "a reset before the body was read", reply: lbtest.Aborts, early: true},
	{name: "what is not HTTP", reply: lbtest.Raw("hello\r\n")},
	{name: "half the headers", reply: lbtest.Raw("HTTP/1.1 200 OK\r\nContent-")},
	{name: "a status under 100", reply: lbtest.Raw("HTTP/1.1 042 Odd\r\nContent-Length: 0\r\n\r\n")},
	{name: "no answer in time", reply: lbtest.Hangs},
	{name: "a 200 that is cut", reply: cutReply},
	{name: "a 500 that is cut", reply: lbtest.Raw("HTTP/1.1 500 Oops\r\nContent-Length: 100\r\n\r\n{")},
}

// didNotRun are failures after which it was not executed.
var didNotRun = map[string]http.HandlerFunc{
	"429":                     lbtest.Throttled("9"),
	"401":                     lbtest.Status(401),
	"403":                     lbtest.Status(403),
	"404 of the model":        lbtest.Says(404, `{"error":{"code":"DeploymentNotFound"}}`),
	"402":                     lbtest.Status(402),
	"498":                     lbtest.Status(498),
	"503":                     lbtest.Status(503),
	"503 with a hint":         lbtest.Status(503, "Retry-After", "9"),
	"429 for want of a quota": lbtest.Says(429, `{"error":{"code":"insufficient_quota"}}`),
}

func operation(w *lbtest.World, op [2]string) *http.Request {
	return w.Request(op[0], op[1], strings.NewReader(`{"model":"gpt-4o"}`))
}

// afterARest runs each case in one bubble, when every bench of the case before
// is over.
func afterARest(w *lbtest.World, t *testing.T, name string, test func()) {
	t.Helper()
	if t.Failed() {
		return
	}
	for _, b := range w.Backends {
		b.Recovers()
		b.Forget()
	}
	if test(); t.Failed() {
		t.Log("the case was:", name)
	}
	time.Sleep(10 * time.Minute) // the longest bench is half of that
}

func TestNothingIsDoneTwice(t *testing.T) {
	for _, op := range notRepeatable {
		t.Run(fmt.Sprint(op), func(t *testing.T) {
			lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
				for _, failure := range mayHaveRun {
					afterARest(w, t, failure.name, func() {
						w.Backends["a"].Replies(failure.reply)
						r := operation(w, op)
						if failure.early {
							r.Header.Set("X-Early", "a")
						}
						reply := w.Send(r)
						w.WantCalls(map[string]int{"a": 1, "b": 0, "c": 0})
						switch {
						case failure.status != 0:
							if reply.Status != failure.status || reply.Backend != "a" {
								t.Errorf("client got %d of %q, want a's %d", reply.Status, reply.Backend, failure.status)
							}
						case reply.Err != nil || reply.Status == 500:
							// what there is of a reply that was cut
						case reply.Status != 502 && reply.Status != 504 || !strings.Contains(reply.Body, "executed"):
							t.Errorf("client got %d %s, want to be told that it may have been executed", reply.Status, reply.Body)
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
			lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
				for name, reply := range didNotRun {
					if op[0] == http.MethodHead && name == "404 of the model" {
						continue // without a body, it does not say so
					}
					afterARest(w, t, name, func() {
						w.Backends["a"].Replies(reply)
						w.Send(operation(w, op)).WantServed(t, "b")
					})
				}
				afterARest(w, t, "a refused connection", func() {
					w.Stop("a")
					w.Send(operation(w, op)).WantServed(t, "b")
				})
			})
		})
	}
}

func TestWhatMayBeDoneTwiceGoesOn(t *testing.T) {
	for _, op := range mayRepeat {
		t.Run(fmt.Sprint(op), func(t *testing.T) {
			lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
				for _, failure := range mayHaveRun {
					if op[0] != "POST" && (failure.name == "a 200 that is cut" || failure.name == "a reset before the body was read") || failure.early {
						continue // a GET's reply is not read ahead
					}
					afterARest(w, t, failure.name, func() {
						w.Backends["a"].Replies(failure.reply)
						w.Send(operation(w, op)).WantServed(t, "b")
						w.WantCalls(map[string]int{"a": 1, "b": 1, "c": 0})
					})
				}
			})
		})
	}
}

func TestARequestStopsWhereItMayHaveRun(t *testing.T) {
	lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Throttled("9"))
		w.Backends["b"].Replies(lbtest.Aborts)
		reply := w.Send(operation(w, [2]string{"POST", "/v1/batches"}))
		w.WantCalls(map[string]int{"a": 1, "b": 1, "c": 0})
		if reply.Status != 502 || !strings.Contains(reply.Body, "executed") {
			t.Errorf("client got %d %s", reply.Status, reply.Body)
		}
	})
}

// TestNetHTTPDoesNothingTwice has a connection break that was used before.
// net/http sends such a request again by itself if the client marked it with
// Idempotency-Key, as some SDKs do.
func TestNetHTTPDoesNothingTwice(t *testing.T) {
	for _, op := range notRepeatable {
		lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
			for _, r := range []*http.Request{operation(w, op), w.Request(op[0], op[1], nil)} {
				afterARest(w, t, fmt.Sprint(op, " with ", r.ContentLength, " bytes"), func() {
					w.Send(w.Request("GET", "/v1/models", nil)).WantServed(t, "a")
					w.Backends["a"].Replies(lbtest.Aborts)
					r.Header.Set("Idempotency-Key", "stainless-python-retry-1")
					if reply := w.Send(r); reply.Status != 502 {
						t.Errorf("%v: client got %d %s", op, reply.Status, reply.Body)
					}
					w.WantCalls(map[string]int{"a": 2, "b": 0, "c": 0})
					if got := w.Backends["a"].Received()[1].Request.Header.Get("Idempotency-Key"); got != "stainless-python-retry-1" {
						t.Errorf("%v: a got the key %q", op, got)
					}
				})
			}
		})
	}
}

func TestATimeoutSaysThatItMayHaveRun(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b", "response_header_timeout 30s\nlb_policy first"), func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Hangs)
		start := time.Now()
		reply := w.Send(operation(w, [2]string{"POST", "/v1/batches"}))
		if reply.Status != 504 || !strings.Contains(reply.Body, "executed") || time.Since(start) != 30*time.Second {
			t.Errorf("after %s client got %d %s", time.Since(start), reply.Status, reply.Body)
		}
		w.WantCalls(map[string]int{"a": 1, "b": 0})
	})
}
