package failover

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// choices makes decisions of a fuzzer's bytes. When they are used up, every
// decision is the first one.
type choices struct{ bytes []byte }

func (c *choices) of(n int) int {
	if len(c.bytes) == 0 {
		return 0
	}
	first := c.bytes[0]
	c.bytes = c.bytes[1:]
	return int(first) % n
}

func (c *choices) one(in int) bool { return c.of(in) == in-1 }

// fuzzBackend is a backend of a random config, and what came to it.
type fuzzBackend struct {
	name, key  string
	models     []string // none: any
	deployment string

	script []fuzzReply // what it does, one after the other; then it serves
	// resting tells until when it asked not to be called, by the model that it
	// was called for; an empty name stands for all.
	resting map[string]time.Time
}

// serves reports whether the backend has the model that a client names.
// Inference without a model goes only where any is served.
func (b *fuzzBackend) serves(r *fuzzRequest) bool {
	return len(b.models) == 0 || r.model == "" && !r.infers || slices.Contains(b.models, r.model)
}

// calls is the name by which the backend knows a model.
func (b *fuzzBackend) calls(model string) string {
	if model == "" || b.deployment == "" {
		return model
	}
	return b.deployment
}

// limitsOf is the name of the limits that a request has at the backend.
// Operations other than inference have those of requests without a model.
func (b *fuzzBackend) limitsOf(r *fuzzRequest) string {
	if !r.infers {
		return ""
	}
	return b.calls(r.model)
}

func (b *fuzzBackend) rests(r *fuzzRequest, now time.Time) bool {
	return now.Before(b.resting[b.limitsOf(r)]) || now.Before(b.resting["*"])
}

// fuzzReply is what a backend does with a request.
type fuzzReply struct {
	kind string
	wait time.Duration
}

var fuzzReplies = []string{
	"serve", "429", "429 for 2", "429 for 60", "429 for a day", "quota", "500", "502", "503", "401", "403", "404 model", "400",
	"reset", "early reset", "hang", "cut", "cut stream", "error first", "garbage", "042", "101", "slow",
}

// executes reports whether a backend that does this may have executed the
// request.
func (r fuzzReply) executes() bool {
	return !slices.Contains([]string{"429", "429 for 2", "429 for 60", "429 for a day", "quota", "503", "401", "403", "404 model", "400"}, r.kind)
}

// fuzzRequest is a request, and what became of it.
type fuzzRequest struct {
	id           int
	method, path string
	infers       bool
	repeats      bool // it may be executed twice
	model        string
	body         string
	stream       bool
	leaves       time.Duration // when its client does; 0: it waits

	mu       sync.Mutex
	asked    []string // the backends, in order
	executed []string // those that may have executed it
	// quiet tells that nothing else was on its way at the same time.
	quiet bool
}

var fuzzOperations = []struct {
	method, path string
	repeats      bool // it may be executed twice
}{
	{"POST", "/v1/chat/completions", true}, {"POST", "/v1/embeddings", true}, {"POST", "/v1/responses", true},
	{"POST", "/openai/deployments/MODEL/chat/completions?api-version=1", true}, {"GET", "/v1/things", true}, {"HEAD", "/v1/things", true},
	{"POST", "/v1/batches", false}, {"POST", "/v1/files", false}, {"DELETE", "/v1/files/f", false}, {"POST", "/v1/unknown", false},
}

// count returns how often a backend was asked.
func (r *fuzzRequest) count(name string) (n int) {
	for _, asked := range r.asked {
		if asked == name {
			n++
		}
	}
	return n
}

// handle is what the backend does with a request.
func (f *fuzzed) handle(b *fuzzBackend, rw http.ResponseWriter, in *http.Request) {
	f.mu.Lock()
	r := f.requests[in.Header.Get("X-Test-Request")]
	reply := fuzzReply{kind: "serve"}
	if len(b.script) > 0 {
		reply, b.script = b.script[0], b.script[1:]
	}
	if hint, ok := map[string]time.Duration{"429": 10 * time.Second, "429 for 2": 2 * time.Second, "429 for 60": time.Minute, "429 for a day": 5 * time.Minute}[reply.kind]; ok {
		b.rest(b.limitsOf(r), time.Now().Add(reply.wait+hint))
	} else if reply.kind == "quota" {
		limits := "*"
		if !r.infers {
			limits = b.limitsOf(r)
		}
		b.rest(limits, time.Now().Add(reply.wait+5*time.Minute))
	}
	f.mu.Unlock()
	text := fmt.Sprint(in.Header, in.RequestURI)
	if strings.Contains(text, "key-of-the-caller") || strings.Count(text, "key-of-backend") != 1 || !strings.Contains(text, b.key) {
		f.t.Errorf("%s got the keys of %s", b.name, text)
	}
	r.mu.Lock()
	// what an idle connection has lost that died is sent again on a new one, if
	// it may be executed twice; net/http itself sends what has no body again on
	// each idle connection
	again := r.repeats && len(r.asked) > 0 && r.asked[len(r.asked)-1] == b.name && (r.body == "" || r.count(b.name) == 1)
	if r.count(b.name) > 0 && !again {
		f.t.Errorf("%s was asked twice for request %d", b.name, r.id)
	}
	r.asked = append(r.asked, b.name)
	if !slices.Contains(serverNames(f.serving(r)), b.name) {
		f.t.Errorf("%s was asked for %q, which it does not serve", b.name, r.model)
	}
	r.mu.Unlock()
	if reply.kind == "early reset" {
		r.execute(b)
		panic(http.ErrAbortHandler)
	}
	if _, err := io.Copy(io.Discard, in.Body); err == nil && reply.executes() {
		r.execute(b)
	}
	select {
	case <-time.After(reply.wait):
	case <-in.Context().Done():
		return
	}
	rw.Header().Set("X-Backend", b.name)
	f.answer(reply.kind, r, b, rw, in)
}

// rest notes that the backend asked not to be called for a model, or for any.
func (b *fuzzBackend) rest(model string, until time.Time) {
	if until.After(b.resting[model]) {
		b.resting[model] = until
	}
}

func (r *fuzzRequest) execute(b *fuzzBackend) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.executed = append(r.executed, b.name)
}

func (f *fuzzed) answer(kind string, r *fuzzRequest, b *fuzzBackend, rw http.ResponseWriter, in *http.Request) {
	served := fmt.Sprintf(`{"id":"%d","by":"<%s>"}`, r.id, b.name)
	switch kind {
	case "429 for 2":
		lbtest.Throttled("2")(rw, in)
	case "429 for 60":
		lbtest.Throttled("60")(rw, in)
	case "429 for a day":
		lbtest.Throttled("86400")(rw, in)
	case "quota":
		lbtest.Says(429, `{"error":{"message":"no","code":"insufficient_quota"}}`)(rw, in)
	case "429":
		lbtest.Status(429)(rw, in)
	case "500", "502", "503", "401", "403", "400":
		lbtest.Status(map[string]int{"500": 500, "502": 502, "503": 503, "401": 401, "403": 403, "400": 400}[kind])(rw, in)
	case "404 model":
		lbtest.Says(404, `{"error":{"message":"no","code":"DeploymentNotFound"}}`)(rw, in)
	case "reset":
		panic(http.ErrAbortHandler)
	case "hang":
		<-in.Context().Done()
	case "cut":
		cutReply(rw, in)
	case "garbage":
		lbtest.Raw("SSH-2.0\r\n")(rw, in)
	case "042":
		lbtest.Raw("HTTP/1.1 042 Odd\r\nContent-Length: 0\r\n\r\n")(rw, in)
	case "101":
		lbtest.Raw("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")(rw, in)
	case "cut stream":
		lbtest.Streams(lbtest.StreamPreamble, strings.Replace(lbtest.StreamContent, "Hello", "<"+b.name+">", 1), lbtest.Abort)(rw, in)
	case "error first":
		lbtest.Streams(lbtest.StreamPreamble, lbtest.StreamError)(rw, in)
	default:
		if kind == "slow" {
			select {
			case <-time.After(5 * time.Second):
			case <-in.Context().Done():
				return
			}
		}
		if r.stream {
			lbtest.Streams(lbtest.StreamPreamble, strings.Replace(lbtest.StreamContent, "Hello", "<"+b.name+">", 1), lbtest.StreamEnd)(rw, in)
		} else {
			lbtest.Says(200, served)(rw, in)
		}
	}
}
