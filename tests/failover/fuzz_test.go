package failover

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// fuzzed is one run: a world, and what is known of it without looking inside.
type fuzzed struct {
	*lbtest.World
	t        *testing.T
	backends []*fuzzBackend
	retries  int // further backends that a request may try
	buffers  int

	mu       sync.Mutex
	requests map[string]*fuzzRequest
}

// config writes a random config of these backends.
func (f *fuzzed) config(c *choices) string {
	var block strings.Builder
	block.WriteString("openai_lb {\npool " + lbtest.Unique("fuzz") + "\nclient_key alice key-of-the-caller\ncaller alice {\ntokens 1G/minute\nmax_requests 100\n}\n")
	for i := range 1 + c.of(4) {
		b := &fuzzBackend{name: string(rune('a' + i)), key: fmt.Sprintf("key-of-backend-%d", i), resting: make(map[string]time.Time)}
		f.backends = append(f.backends, b)
		fmt.Fprintf(&block, "backend http://%s {\nname %s\napi_key %s\npriority %d\nweight %d\n", b.name, b.name, b.key, 1+c.of(3), []int{1, 3, 0}[c.of(3)])
		if c.one(2) {
			block.WriteString("auth api_key\n")
		}
		for _, model := range [][]string{nil, {"m1"}, {"m1", "m2"}}[c.of(3)] {
			b.models = append(b.models, model)
			fmt.Fprintf(&block, "model %s\n", model)
		}
		if c.one(3) {
			b.deployment = "deployment-of-" + b.name
			fmt.Fprintf(&block, "deployment %s\n", b.deployment)
		}
		if c.one(4) {
			fmt.Fprintf(&block, "max_requests %d\n", 1+c.of(2))
		}
		block.WriteString("}\n")
	}
	f.retries = len(f.backends)
	if c.one(3) {
		f.retries = c.of(3)
		fmt.Fprintf(&block, "lb_retries %d\n", f.retries)
	}
	if f.buffers = 1 << 20; c.one(4) {
		f.buffers = 256
		block.WriteString("request_buffers 256B\n")
	}
	if c.one(2) {
		block.WriteString("affinity {\nprompt_cache off\n}\n")
	}
	block.WriteString("response_header_timeout 20s\nstream_first_event_timeout 10s\nstream_idle_timeout 30s\n}")
	for _, b := range f.backends {
		for range c.of(6) {
			b.script = append(b.script, fuzzReply{fuzzReplies[c.of(len(fuzzReplies))], time.Duration(c.of(3)) * time.Second})
		}
	}
	return block.String()
}

// newRequest makes a random request.
func (f *fuzzed) newRequest(c *choices, id int) (*fuzzRequest, bool) {
	operation := fuzzOperations[c.of(len(fuzzOperations))]
	r := &fuzzRequest{id: id, method: operation.method, repeats: operation.repeats, infers: operation.repeats && operation.method == "POST", model: []string{"m1", "m2", "", "unheard-of"}[c.of(4)]}
	r.path = strings.ReplaceAll(operation.path, "MODEL", r.model)
	if strings.Contains(operation.path, "MODEL") && r.model == "" {
		r.model, r.path = "m1", strings.ReplaceAll(operation.path, "MODEL", "m1")
	}
	var fields []string
	if r.model != "" && !strings.Contains(operation.path, "MODEL") {
		fields = append(fields, fmt.Sprintf(`"model":%q`, r.model))
	}
	if r.stream = c.one(3); r.stream {
		fields = append(fields, `"stream":true`)
	}
	if tokens := []int{0, 10, 1000, 100_000}[c.of(4)]; tokens > 0 {
		fields = append(fields, fmt.Sprintf(`"max_tokens":%d`, tokens))
	}
	if c.one(4) {
		fields = append(fields, `"user":"`+strings.Repeat("x", 1000)+`"`)
	}
	if c.one(2) {
		fields = append(fields, fmt.Sprintf(`"prompt_cache_key":"%d"`, c.of(3)))
	}
	if r.body = "{" + strings.Join(fields, ",") + "}"; r.method == "GET" || r.method == "HEAD" {
		r.body, r.model, r.stream = "", "", false
	}
	if c.one(8) {
		r.leaves = time.Duration(1+c.of(5)) * 700 * time.Millisecond
	}
	return r, operation.repeats
}

// serving are the backends that have the model of a request.
func (f *fuzzed) serving(r *fuzzRequest) (serving []*fuzzBackend) {
	for _, b := range f.backends {
		if b.serves(r) {
			serving = append(serving, b)
		}
	}
	return serving
}

func serverNames(backends []*fuzzBackend) (names []string) {
	for _, b := range backends {
		names = append(names, b.name)
	}
	return names
}

// exchange sends a request and checks what became of it.
func (f *fuzzed) exchange(r *fuzzRequest, repeats bool) {
	id := fmt.Sprint(r.id)
	f.mu.Lock()
	f.requests[id] = r
	f.mu.Unlock()
	ctx, leave := context.WithCancel(f.t.Context())
	defer leave()
	if r.leaves > 0 {
		defer time.AfterFunc(r.leaves, leave).Stop()
	}
	out := f.Request(r.method, r.path, strings.NewReader(r.body)).WithContext(ctx)
	out.Header.Set("X-Test-Request", id)
	out.Header.Set("Api-Key", "key-of-the-caller")
	out.Header.Set("Authorization", "Bearer key-of-the-caller")
	f.mu.Lock()
	var free []string // those that nothing keeps from serving
	for _, b := range f.serving(r) {
		if !b.rests(r, time.Now()) {
			free = append(free, b.name)
		}
	}
	f.mu.Unlock()
	reply := f.World.Send(out)
	r.mu.Lock()
	defer r.mu.Unlock()
	if !repeats && len(r.executed) > 0 {
		if last := r.executed[0]; len(r.executed) > 1 || r.asked[len(r.asked)-1] != last {
			f.t.Errorf("%s %s may have been executed by %v, and was sent to %v", r.method, r.path, r.executed, r.asked)
		}
	}
	distinct := slices.Compact(slices.Clone(r.asked)) // but for what net/http sent again
	if len(distinct) > f.retries+1 {
		f.t.Errorf("request %d was sent to %v, with lb_retries %d", r.id, r.asked, f.retries)
	}
	if ctx.Err() != nil {
		return // it left
	}
	for _, b := range f.backends {
		if b.name != reply.Backend && strings.Contains(reply.Body, "<"+b.name+">") {
			f.t.Errorf("the reply of %q holds a part of %s's: %s", reply.Backend, b.name, reply.Body)
		}
	}
	refused := reply.Err == nil && slices.Contains([]int{429, 500, 502, 503, 504}, reply.Status)
	if !refused || !r.quiet || len(distinct) > f.retries || len(r.body) > f.buffers || !repeats && len(r.executed) > 0 {
		return
	}
	if f.staysHome(r, reply) {
		return
	}
	for _, name := range free {
		if !slices.Contains(r.asked, name) {
			f.t.Errorf("request %d, %s %s for %q, was refused with %d %s, and %s was not asked, only %v", r.id, r.method, r.path, r.model, reply.Status, reply.Body, name, r.asked)
		}
	}
}

// staysHome reports whether the request makes an object whose caller has others
// at an account that throttles for less than a minute: no other account is
// asked then (docs/affinity.md). That account refused it just now, perhaps
// after others had failed, or rests since before.
func (f *fuzzed) staysHome(r *fuzzRequest, reply lbtest.Reply) bool {
	wait, err := strconv.Atoi(reply.Header.Get("Retry-After"))
	forwarded := reply.Backend != ""
	if r.method != "POST" || r.infers || reply.Status != 429 && (!forwarded || len(r.asked) < 2) || err != nil || wait >= 60 {
		return false
	}
	if !forwarded && !strings.Contains(reply.Body, "The account that stores the caller's objects is rate limited.") {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(r.asked) > 0 || slices.ContainsFunc(f.serving(r), func(b *fuzzBackend) bool { return b.rests(r, time.Now()) })
}

// FuzzHandler has random requests meet random backends in a random config.
// Whatever happens, nothing panics, no goroutine is left, no request that may
// have been executed is sent again, no key reaches another backend, and no
// request is refused while a backend that was not asked could serve it.
func FuzzHandler(f *testing.F) {
	for seed := range 40 {
		var data []byte
		for i := range 120 {
			data = append(data, byte((seed+1)*(i+7)*(i^seed)+i/3))
		}
		f.Add(data)
	}
	f.Add([]byte{})
	f.Fuzz(meetRandomBackends)
}

var randomTime = flag.Duration("random", 0, "how long TestRandomRequestsMeetRandomBackends goes on")

// TestRandomRequestsMeetRandomBackends is FuzzHandler without its coverage, for
// the gate: an instrumented build of all of Caddy takes minutes. A failure
// prints the file to put into testdata/fuzz/FuzzHandler.
func TestRandomRequestsMeetRandomBackends(t *testing.T) {
	if *randomTime == 0 {
		t.Skip("needs a time to go on, such as -random 20s")
	}
	runs := 0
	for began := time.Now(); time.Since(began) < *randomTime; runs++ {
		data := make([]byte, rand.IntN(400))
		for i := range data {
			data[i] = byte(rand.Uint32())
		}
		if !t.Run("", func(t *testing.T) { meetRandomBackends(t, data) }) {
			t.Fatalf("it goes wrong with\ngo test fuzz v1\n[]byte(%q)", data)
		}
	}
	t.Logf("%d runs", runs)
}

// meetRandomBackends is a run that these bytes decide.
func meetRandomBackends(t *testing.T, data []byte) {
	c := &choices{data}
	run := &fuzzed{requests: make(map[string]*fuzzRequest)}
	lbtest.InBubble(t, run.config(c), func(t *testing.T, w *lbtest.World) {
		run.t, run.World = t, w
		for _, b := range run.backends {
			run.Serve(b.name+":80", http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { run.handle(b, rw, r) }))
		}
		for id := 0; id < 24 && len(c.bytes) > 0; {
			n := []int{1, 1, 1, 2, 5}[c.of(5)]
			var parallel sync.WaitGroup
			for range n {
				r, repeats := run.newRequest(c, id)
				r.quiet = n == 1
				id++
				parallel.Go(func() { run.exchange(r, repeats) })
			}
			parallel.Wait()
			time.Sleep([]time.Duration{0, time.Millisecond, 3 * time.Second, 15 * time.Second, 2 * time.Minute}[c.of(5)])
			synctest.Wait()
		}
		for _, caller := range lbtest.LimitersOf(w.Handler.Pool).All() {
			if s := caller.Snapshot(time.Now()); s.Reserved != 0 || s.InFlight != 0 {
				t.Errorf("when all requests are over, %+v is reserved", s)
			}
		}
	})
}
