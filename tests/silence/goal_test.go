package silence

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// traffic is what three backends get.
type traffic struct {
	random    *rand.Rand
	perSecond float64
	lasts     time.Duration
	// p50 and p99 are those of the waits for a reply, which are lognormal.
	p50, p99 time.Duration
	// hangs reports until when a backend sends nothing. It may be nil.
	hangs func(backend string, now time.Duration) (until time.Duration)
}

// wait returns how long a reply takes.
func (tr *traffic) wait() time.Duration {
	sigma := math.Log(float64(tr.p99)/float64(tr.p50)) / 2.3263
	return time.Duration(float64(tr.p50) * math.Exp(sigma*tr.random.NormFloat64()))
}

// run sends the requests to three equal backends, and returns how long each
// took, the shortest first.
func (tr *traffic) run(w *lbtest.World) (took []time.Duration) {
	began := time.Now()
	var mu sync.Mutex
	for name, b := range w.Backends {
		b.Replies(func(rw http.ResponseWriter, r *http.Request) {
			wait, err := time.ParseDuration(r.Header.Get("X-Wait-" + name))
			if err != nil {
				w.T.Error(err)
			}
			for wait > 0 {
				select {
				case <-time.After(wait):
				case <-r.Context().Done():
					return
				}
				wait = 0
				if tr.hangs != nil {
					now := time.Since(began)
					wait = tr.hangs(name, now) - now
				}
			}
			lbtest.Says(200, `{"usage":{"prompt_tokens":9,"completion_tokens":9}}`)(rw, r)
		})
	}
	var all sync.WaitGroup
	for time.Since(began) < tr.lasts {
		r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(chat))
		for _, name := range []string{"a", "b", "c"} {
			r.Header.Set("X-Wait-"+name, tr.wait().String())
		}
		all.Go(func() {
			sent := time.Now()
			if reply := w.Send(r); reply.Err != nil || reply.Status != http.StatusOK {
				w.T.Errorf("client got %d %s (%v)", reply.Status, reply.Body, reply.Err)
			}
			mu.Lock()
			defer mu.Unlock()
			took = append(took, time.Since(sent))
		})
		time.Sleep(time.Duration(tr.random.ExpFloat64() / tr.perSecond * float64(time.Second)))
	}
	all.Wait()
	slices.Sort(took)
	return took
}

const equal = "openai_lb {\npool %s\nbackend http://a\nbackend http://b\nbackend http://c\n}"

func TestABackendThatHangsForAThirdOfTheTimeHardlyDelaysRequests(t *testing.T) {
	for _, known := range []bool{true, false} {
		t.Run(fmt.Sprintf("known %t", known), func(t *testing.T) {
			lbtest.InBubble(t, fmt.Sprintf(equal, lbtest.Unique("goal")), func(t *testing.T, w *lbtest.World) {
				tr := traffic{random: rand.New(rand.NewPCG(1, 7)), perSecond: 20, lasts: 10 * time.Second, p50: 300 * time.Millisecond, p99: 900 * time.Millisecond}
				if known {
					tr.run(w)
				}
				tr.lasts = time.Minute
				tr.hangs = func(backend string, now time.Duration) time.Duration {
					if into := now % (30 * time.Second); backend == "a" && into < 10*time.Second {
						return now - into + 10*time.Second
					}
					return now
				}
				took := tr.run(w)
				if p99 := took[len(took)*99/100]; p99 > 2500*time.Millisecond {
					t.Errorf("of %d requests, the p99 is %s, the longest took %s", len(took), p99, took[len(took)-1])
				}
			})
		})
	}
}

func TestRequestsHardlyEverLeaveHealthyBackends(t *testing.T) {
	for _, perSecond := range []float64{0.5, 20} {
		t.Run(fmt.Sprintf("%g/s", perSecond), func(t *testing.T) {
			name := lbtest.Unique("goal")
			lbtest.InBubble(t, fmt.Sprintf(equal, name), func(t *testing.T, w *lbtest.World) {
				const requests = 1000
				tr := traffic{random: rand.New(rand.NewPCG(1, 2)), perSecond: perSecond, p50: 300 * time.Millisecond, p99: 4 * time.Second}
				tr.lasts = time.Duration(requests / perSecond * float64(time.Second))
				n := len(tr.run(w))
				moved := lbtest.SumOf(t, "moved_total", map[string]string{"pool": name})
				if moved*200 > float64(n) {
					t.Errorf("%g of %d requests moved", moved, n)
				}
			})
		})
	}
}
