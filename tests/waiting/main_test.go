// Package waiting tests which requests wait while all backends throttle, or
// while a limit of their caller is reached, for how long they do, and in which
// order they go.
package waiting

import (
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestMain(m *testing.M) { lbtest.Main(m) }

// world is a balancer with backends, and clients that number their requests.
type world struct {
	*lbtest.World
	wg sync.WaitGroup

	mu   sync.Mutex
	took map[int]time.Duration
}

// inBubble runs a test with a backend called a and these options.
func inBubble(t *testing.T, options string, test func(*testing.T, *world)) {
	t.Helper()
	inBubbleWith(t, "backend http://a\n"+options, test)
}

// inBubbleWith is inBubble with other backends.
func inBubbleWith(t *testing.T, options string, test func(*testing.T, *world)) {
	t.Helper()
	lbtest.InBubble(t, "openai_lb {\npool "+lbtest.Unique("waiting")+"\n"+options+"\n}", func(t *testing.T, w *lbtest.World) {
		test(t, &world{World: w, took: make(map[int]time.Duration)})
	})
}

const chat = `{"model":"gpt-4o","messages":[]}`

// request makes a chat with a number and the key of its caller, which may be
// empty.
func (w *world) request(number int, key string) *http.Request {
	r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(chat))
	r.Header.Set("X-Number", strconv.Itoa(number))
	if key != "" {
		r.Header.Set("Authorization", "Bearer "+key)
	}
	return r
}

// ask sends a request in the background.
func (w *world) ask(number int, key string, then func(lbtest.Reply, time.Duration)) {
	w.wg.Go(func() {
		begin := time.Now()
		got := w.Send(w.request(number, key))
		w.mu.Lock()
		defer w.mu.Unlock()
		then(got, time.Since(begin))
	})
}

// wantServed sends requests with these keys, one after the other, and returns a
// function that checks that they are all served.
func (w *world) wantServed(t *testing.T, keys ...string) {
	t.Helper()
	for number, key := range keys {
		w.ask(number, key, func(got lbtest.Reply, took time.Duration) {
			w.took[number] = took
			if got.Status != http.StatusOK {
				t.Errorf("request %d got %d after %s: %s (%v)", number, got.Status, took, got.Body, got.Err)
			}
		})
		time.Sleep(time.Millisecond)
	}
}

// numbers are those of the requests that the backend has got, in order.
func (w *world) numbers(backend string) (numbers []int) {
	for _, call := range w.Backends[backend].Received() {
		number, err := strconv.Atoi(call.Request.Header.Get("X-Number"))
		if err != nil {
			number = -1
		}
		numbers = append(numbers, number)
	}
	return numbers
}

// throttle has the backend throttle for so long from now on. It serves
// afterwards.
func (w *world) throttle(backend string, d time.Duration) {
	until := time.Now().Add(d)
	b := w.Backends[backend]
	b.Replies(func(rw http.ResponseWriter, r *http.Request) {
		if left := time.Until(until); left > 0 {
			lbtest.Status(http.StatusTooManyRequests, "Retry-After-Ms", strconv.FormatInt(left.Milliseconds(), 10))(rw, r)
			return
		}
		lbtest.Says(200, `{"id":"chatcmpl-1"}`)(rw, r)
	})
}

// coolDown throttles a backend for so long, and sends the request that starts
// the cooldown.
func (w *world) coolDown(t *testing.T, backend string, d time.Duration) {
	t.Helper()
	w.throttle(backend, d)
	w.ask(-1, "", func(lbtest.Reply, time.Duration) {})
	time.Sleep(time.Millisecond)
	w.Backends[backend].Forget()
}

// knows makes the balancer know that a accepts so many requests in ten seconds.
// key is that of a caller, which may be empty.
func (w *world) knows(t *testing.T, key string, requests int) {
	t.Helper()
	limit := strconv.Itoa(6 * requests)
	w.Backends["a"].Replies(lbtest.Says(200, `{}`, "X-Ratelimit-Limit-Requests", limit, "X-Ratelimit-Remaining-Requests", limit, "X-Ratelimit-Reset-Requests", "10"))
	w.Send(w.request(-9, key)).WantServed(t, "a")
	w.Backends["a"].Recovers()
	w.Backends["a"].Forget()
}
