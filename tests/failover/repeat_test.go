package failover

import (
	"cmp"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// cutReply begins a JSON reply of status 200, and breaks it off.
var cutReply = cuts(200, `{"id":`, "Content-Length", "100")

// cuts begins a JSON reply, and breaks it off.
func cuts(status int, text string, headers ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		lbtest.Says(status, text, headers...)(w, r)
		w.(http.Flusher).Flush()
		lbtest.Abort()
	}
}

// stalledReply begins a JSON reply of status 200, of which the rest never
// comes.
func stalledReply(w http.ResponseWriter, r *http.Request) {
	lbtest.Says(200, `{"id":`, "Content-Length", "100")(w, r)
	w.(http.Flusher).Flush()
	<-r.Context().Done()
}

// notRepeatable are requests that must not be executed twice.
var notRepeatable = [][3]string{
	{"POST", "/v1/batches"}, {"POST", "/v1/fine_tuning/jobs"}, {"POST", "/v1/files"}, {"POST", "/v1/uploads"}, {"POST", "/v1/uploads/u/parts"},
	{"POST", "/v1/vector_stores"}, {"POST", "/v1/threads/t/runs"}, {"POST", "/v1/unknown"}, {"POST", "/v1/anything"}, {"PUT", "/v1/files/f"}, {"PATCH", "/v1/files/f"},
	{"DELETE", "/v1/files/f"}, {"DELETE", "/v1/responses/resp_1"}, {"DELETE", "/v1/models/ft"}, {"DELETE", "/v1/chat/completions/c"},
	{"POST", "/openai/batches?api-version=1"}, {"POST", "/openai/files?api-version=1"}, {"POST", "/openai/v1/fine_tuning/jobs"},
	// they go on without their connection, or act
	{"POST", "/v1/responses", `{"model":"gpt-4o","background":true}`},
	{"POST", "/v1/responses", `{"model":"gpt-4o","tools":[{"type":"file_search"},{"type":"mcp","server_url":"http://x"}]}`},
	{"POST", "/v1/messages", `{"model":"gpt-4o","mcp_servers":[{"type":"url"}]}`},
	// what is stored may act, or grows
	{"POST", "/v1/responses", `{"model":"gpt-4o","conversation":"conv_0123456789"}`},
	{"POST", "/v1/responses", `{"model":"gpt-4o","prompt":{"id":"pmpt_0123456789"}}`},
	{"POST", "/v1/responses", `{"model":"gpt-4o","tools":[{"type":"code_interpreter","container":"cntr_0123456789"}]}`},
	{"POST", "/v1/responses", `{"model":"gpt-4o","tools":[{"type":"shell","environment":{"type":"container_reference","container_id":"cntr_0123456789"}}]}`},
	// tools inside others, in other letters, and of unknown types
	{"POST", "/v1/responses", `{"model":"gpt-4o","tools":[{"type":"namespace","name":"n","tools":[{"type":"mcp"}]}]}`},
	{"POST", "/v1/responses", `{"model":"gpt-4o","input":[{"type":"tool_search_output","tools":[{"type":"mcp"}]}]}`},
	{"POST", "/v1/responses", `{"model":"gpt-4o","Tools":[{"type":"mcp"}]}`},
	{"POST", "/v1/chat/completions", `{"model":"gpt-4o","tools":[{"type":"teleport"}]}`},
	{"POST", "/v1/chat/completions", `{"model":"gpt-4o","a_new_object":{"x":1}}`},
	// what cannot be read
	{"POST", "/v1/responses", "\xff\xfe{\x00}\x00"},
	{"POST", "/v1/chat/completions", `{"model":"gpt-4o"`},
}

// mayRepeat are those that may be sent again, whatever happened.
var mayRepeat = [][3]string{
	{"POST", "/v1/chat/completions"}, {"POST", "/v1/completions"}, {"POST", "/v1/embeddings"}, {"POST", "/v1/responses"}, {"POST", "/v1/moderations"},
	{"POST", "/v1/audio/speech"}, {"POST", "/v1/audio/transcriptions"}, {"POST", "/v1/images/generations"}, {"POST", "/v1/images/edits"},
	{"POST", "/v1/messages"}, {"POST", "/v1/rerank"}, {"POST", "/openai/v1/chat/completions"}, {"POST", "/v1/decisions"}, {"POST", "/openai/v1/decisions"},
	{"POST", "/openai/deployments/x/chat/completions?api-version=1"}, {"POST", "/openai/deployments/x/embeddings?api-version=1"},
	{"POST", "/v1/responses", `{"model":"gpt-4o","background":false,"tools":[{"type":"file_search"}],"mcp_servers":[]}`},
	{"POST", "/v1/responses", `{"model":"gpt-4o","tools":[{"type":"namespace","tools":[{"type":"function"}]}],"conversation":null,"input":[{"type":"reasoning"}]}`},
	{"POST", "/v1/chat/completions", `{"model":"gpt-4o","a_new_switch":true,"a_new_word":"x","a_new_list":[1],"metadata":{"type":"mcp"}}`},
	{"GET", "/v1/files/f"}, {"GET", "/v1/batches/b"}, {"GET", "/v1/anything"}, {"HEAD", "/v1/files/f"}, {"OPTIONS", "/v1/batches"},
}

// mayHaveRun are failures after which a request may have been executed, and
// what the client gets of them: the backend's status, or 0 for an error of
// ours.
var mayHaveRun = []struct {
	name   string
	reply  http.HandlerFunc
	status int
	early  bool // the backend does not wait for the body
}{
	{name: "500", reply: lbtest.Status(500), status: 500},
	{name: "502", reply: lbtest.Status(502), status: 502},
	{name: "500 that asks for a retry", reply: lbtest.Status(500, "X-Should-Retry", "true", "Retry-After", "1"), status: 500},
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
	{name: "a 200 of no length that is cut", reply: cuts(200, `{"id":"batch_1"`)},
	{name: "a 200 that stalls", reply: stalledReply},
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

// operation is a request with this method, this path and, if it matters, this
// body.
func operation(w *lbtest.World, op [3]string) *http.Request {
	return w.Request(op[0], op[1], strings.NewReader(cmp.Or(op[2], `{"model":"gpt-4o"}`)))
}

// afterARest runs each case in one bubble, when every cooldown of the case
// before is over.
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
	time.Sleep(10 * time.Minute) // the longest cooldown is half of that
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
						if got := reply.Header["X-Should-Retry"]; !slices.Equal(got, []string{"false"}) {
							t.Errorf("X-Should-Retry is %q, so that the client's SDK sends the request again", got)
						}
						switch {
						case failure.status != 0:
							if reply.Status != failure.status || reply.Backend != "a" {
								t.Errorf("client got %d of %q, want a's %d", reply.Status, reply.Backend, failure.status)
							}
						case reply.Err != nil || reply.Status != 502 && reply.Status != 504 || !strings.Contains(reply.Body, "executed"):
							t.Errorf("client got %d %s, want to be told that it may have been executed", reply.Status, reply.Body)
						}
					})
				}
			})
		})
	}
}

func TestWhatWasNotDoneGoesOn(t *testing.T) {
	for _, op := range append(append([][3]string(nil), notRepeatable...), mayRepeat...) {
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
					if op[0] != "POST" && strings.HasPrefix(failure.name, "a 200 ") || failure.early {
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

// TestAReplyThatIsCutIsAnError has replies that are cut after a status that
// says that the request was executed. A client that has such a status can no
// longer be told not to send the request again.
func TestAReplyThatIsCutIsAnError(t *testing.T) {
	long := `{"data":"` + strings.Repeat("x", 100<<10)
	for name, c := range map[string]struct {
		reply  http.HandlerFunc
		status int
	}{
		"201":                               {cuts(201, `{"id":"ftjob-1"`), 502},
		"202 of a known length":             {cuts(202, `{"id":"ftjob-1"`, "Content-Length", "100"), 502},
		"200 in gzip":                       {cuts(200, lbtest.Gzipped(`{"id":"batch_1"}`), "Content-Encoding", "gzip"), 502},
		"200 in a coding that nobody knows": {cuts(200, "...", "Content-Encoding", "br"), 502},
		"200 without a byte of its body":    {cuts(200, "", "Content-Length", "100"), 502},
		"200 that is not JSON":              {cuts(200, "batch_1", "Content-Type", "text/plain"), 200},
		"200 that is too long to hold back": {cuts(200, long), 200},
		"200 of a length that is too long":  {cuts(200, long, "Content-Length", "200000"), 200},
		"400":                               {cuts(400, `{"error":`), 400},
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(c.reply)
				reply := w.Send(operation(w, [3]string{"POST", "/v1/batches"}))
				if reply.Status != c.status || (reply.Err == nil) != (c.status == 502) {
					t.Errorf("client got %d %.100s (%v), want %d", reply.Status, reply.Body, reply.Err, c.status)
				}
				if c.status == 502 {
					reply.WantError(t, 502, "upstream_unreachable")
				}
				w.WantCalls(map[string]int{"a": 1, "b": 0, "c": 0})
			})
		})
	}
}

// TestAReplyThatIsHeldBackStaysAsItIs has replies of which nothing is to be
// changed, whatever they say: what is in them is the client's to judge.
func TestAReplyThatIsHeldBackStaysAsItIs(t *testing.T) {
	for _, body := range []string{`{"id":"batch_1"}`, `{"error":{"message":"no","code":"server_error"}}`, `not JSON`, ``, strings.Repeat(" ", 100<<10)} {
		for _, headers := range [][]string{nil, {"Content-Length", fmt.Sprint(len(body))}} {
			lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
					rw.(http.Flusher).Flush() // no length, unless one is given
					lbtest.Says(200, body, headers...)(rw, r)
				})
				if len(headers) > 0 {
					w.Backends["a"].Replies(lbtest.Says(200, body, headers...))
				}
				reply := w.Send(operation(w, [3]string{"POST", "/v1/batches"}))
				reply.WantServed(t, "a")
				if reply.Body != body || reply.Header["X-Should-Retry"] != nil {
					t.Errorf("client got %v %.100s, want %.100s", reply.Header, reply.Body, body)
				}
				w.WantNobodyBlamed()
			})
		}
	}
}

// TestOnlyWhatMayHaveRunForbidsARetry has SDKs obey the last backend where they
// may send a request again.
func TestOnlyWhatMayHaveRunForbidsARetry(t *testing.T) {
	lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
		for name, reply := range didNotRun {
			afterARest(w, t, name, func() {
				w.AllReply(reply)
				if got := w.Send(operation(w, [3]string{"POST", "/v1/batches"})); got.Status < 400 || got.Header["X-Should-Retry"] != nil {
					t.Errorf("client got %d %v", got.Status, got.Header)
				}
			})
		}
		for _, failure := range mayHaveRun {
			afterARest(w, t, failure.name, func() {
				w.AllReply(failure.reply)
				if got := w.Send(operation(w, [3]string{"POST", "/v1/chat/completions"})); got.Header.Get("X-Should-Retry") == "false" {
					t.Errorf("client got %d %v", got.Status, got.Header)
				}
			})
		}
	})
}

func TestARequestStopsWhereItMayHaveRun(t *testing.T) {
	lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Throttled("9"))
		w.Backends["b"].Replies(lbtest.Aborts)
		reply := w.Send(operation(w, [3]string{"POST", "/v1/batches"}))
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
			for i, r := range []*http.Request{operation(w, op), w.Request(op[0], op[1], nil)} {
				if i > 0 && op[2] != "" {
					continue // without its body, it is another request
				}
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
		reply := w.Send(operation(w, [3]string{"POST", "/v1/batches"}))
		if reply.Status != 504 || !strings.Contains(reply.Body, "executed") || time.Since(start) != 30*time.Second {
			t.Errorf("after %s client got %d %s", time.Since(start), reply.Status, reply.Body)
		}
		w.WantCalls(map[string]int{"a": 1, "b": 0})
	})
}

// TestABackendCannotTakeBackWhatForbidsARetry names the balancer's own field in
// a Connection header.
func TestABackendCannotTakeBackWhatForbidsARetry(t *testing.T) {
	for _, status := range []int{500, 408} {
		lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
			w.AllReply(lbtest.Status(status, "Connection", "X-Should-Retry, Via"))
			r := w.Send(w.Request("POST", "/v1/batches", strings.NewReader("{}")))
			if got := r.Header.Get("X-Should-Retry"); got != "false" || r.Header.Get("Via") == "" {
				t.Errorf("client got %d with X-Should-Retry %q and Via %q", r.Status, got, r.Header.Get("Via"))
			}
		})
	}
}
