package silence

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// visits are the requests at a silent backend, by a header of theirs.
type visits struct {
	mu   sync.Mutex
	open map[string]context.Context
	got  map[string]int
}

const idHeader = "X-Test-Id"

// begin records that a backend gets the request.
func (v *visits) begin(backend string, r *http.Request) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.open[backend+r.Header.Get(idHeader)] = r.Context()
	v.got[backend+r.Header.Get(idHeader)]++
}

// TestRequestsMoveOnceWhateverHappensAtThatMoment has replies come, and clients
// leave, at the very moment at which requests move. Run it with -race.
func TestRequestsMoveOnceWhateverHappensAtThatMoment(t *testing.T) {
	for name, options := range map[string]string{
		"HTTP/1.1": "", "HTTP/2": "transport http {\nversions h2c\n}", "with few places": "max",
	} {
		t.Run(name, func(t *testing.T) {
			config := lbtest.PoolOf("a b", "lb_policy first\n"+options)
			if options == "max" {
				config = "openai_lb {\nlb_policy first\nbackend http://a\nbackend http://b {\nmax_requests 5\n}\n}"
			}
			random := rand.New(rand.NewPCG(5, 6))
			moved, left, served := 0, 0, 0
			for range 8 {
				lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) { // a wait of 5 s is usual afterwards
					w.AllReply(nil)
					warm(w)
					m, l, s := disturb(t, w, random)
					moved, left, served = moved+m, left+l, served+s
					wantNoneInFlight(t)
				})
			}
			if moved < 20 || left < 20 {
				t.Errorf("%d requests moved, %d clients left and %d were served where they waited: the test shows little", moved, left, served)
			}
		})
	}
}

// disturb sends requests to a backend that falls silent, and has some of its
// replies come at the threshold. The result is how many requests moved, how
// many clients left, and how many requests were served where they waited.
func disturb(t *testing.T, w *lbtest.World, random *rand.Rand) (moved, left, served int) {
	const requests = 30
	v := visits{open: make(map[string]context.Context), got: make(map[string]int)}
	replies := random.IntN(8) // at the threshold. A byte ends the silence, so the others then wait on.
	now, end := make(chan struct{}), make(chan struct{})
	time.AfterFunc(threshold, func() { close(now) })
	time.AfterFunc(5*time.Second, func() { close(end) })
	w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
		v.begin("a", r)
		answers := end
		if r.Header.Get("X-Replies") != "" {
			answers = now
		}
		select {
		case <-answers:
			lbtest.Says(200, `{"from":"a`+r.Header.Get(idHeader)+`"}`)(rw, r)
		case <-r.Context().Done():
		}
	})
	w.Backends["b"].Replies(func(rw http.ResponseWriter, r *http.Request) {
		v.begin("b", r)
		id := r.Header.Get(idHeader)
		time.Sleep(time.Nanosecond) // until everything has seen what happened before
		v.mu.Lock()
		if waits := v.open["a"+id]; waits != nil && waits.Err() == nil {
			t.Errorf("request %s is at a and at b", id)
		}
		v.mu.Unlock()
		lbtest.Says(200, `{"from":"b`+id+`"}`)(rw, r)
	})
	var all sync.WaitGroup
	var mu sync.Mutex
	for i := range requests {
		id := fmt.Sprint(i)
		leaves := i%5 == 4
		all.Go(func() {
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			if leaves {
				timer := time.AfterFunc(threshold, leave)
				defer timer.Stop()
			}
			r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(chat)).WithContext(ctx)
			r.Header.Set(idHeader, id)
			if i < replies {
				r.Header.Set("X-Replies", "yes")
			}
			reply := w.Send(r)
			v.mu.Lock()
			atA, atB := v.got["a"+id], v.got["b"+id]
			v.mu.Unlock()
			mu.Lock()
			defer mu.Unlock()
			switch {
			case atA > 1 || atB > 1:
				t.Errorf("request %s went to a %d times, and to b %d times", id, atA, atB)
			case leaves && reply.Err != nil:
				left++
			case reply.Err != nil || reply.Status != 200:
				t.Errorf("the client of request %s got %d %s (%v)", id, reply.Status, reply.Body, reply.Err)
			case reply.Body == `{"from":"b`+id+`"}` && atB == 1:
				moved++
			case reply.Body == `{"from":"a`+id+`"}` && atB == 0:
				served++
			default:
				t.Errorf("the client of request %s got %s after %d calls of a and %d of b", id, reply.Body, atA, atB)
			}
		})
	}
	all.Wait()
	<-end
	return moved, left, served
}
