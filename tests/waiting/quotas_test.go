package waiting

import (
	"flag"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/simulator"
)

var minutes = flag.Int("minutes", 1, "for how many minutes TestAWaitOfTwoSecondsServesWhatQuotasAllow sends requests")

// latency is how long the backends take for the first byte. The requests behind
// a probe do not wait for it.
const latency = 700 * time.Millisecond

// load is what comes of requests to backends with quotas.
type load struct {
	served   float64       // the part of the requests
	p50, p99 time.Duration // of the waits of those
}

// onQuotas sends requests to backends of 20, 60 and 120 requests in ten
// seconds. They come at random times, independently of each other, but there
// are exactly as many as that part of the quotas says.
func onQuotas(t *testing.T, options string, part float64) (got load) {
	t.Helper()
	inBubbleWith(t, options+"\nbackend http://a\nbackend http://b\nbackend http://c", func(t *testing.T, w *world) {
		for name, requests := range map[string]int{"a": 20, "b": 60, "c": 120} {
			w.Serve(name+":80", lbtest.Simulate(t, simulator.Handler{
				Name: name, RequestsPerMinute: 6 * requests, FirstTokenLatency: caddy.Duration(latency),
			}))
		}
		random := rand.New(rand.NewPCG(7, uint64(100*part)))
		var mu sync.Mutex
		var took []time.Duration
		length := time.Duration(*minutes) * time.Minute
		at := make([]time.Duration, int(20*part*length.Seconds()))
		for n := range at {
			at[n] = time.Duration(random.Float64() * float64(length))
		}
		slices.Sort(at)
		begun := time.Now()
		for _, at := range at {
			time.Sleep(time.Until(begun.Add(at)))
			w.wg.Go(func() {
				begin := time.Now()
				got := w.Post(chat)
				mu.Lock()
				defer mu.Unlock()
				if got.Status == http.StatusOK {
					took = append(took, time.Since(begin)-latency)
				}
			})
		}
		w.wg.Wait()
		slices.Sort(took)
		got = load{float64(len(took)) / float64(len(at)), took[len(took)/2], took[len(took)*99/100]}
	})
	return got
}

func TestAWaitOfTwoSecondsServesWhatQuotasAllow(t *testing.T) {
	if lbtest.Race {
		t.Skip("it sends thousands of requests, one after the other")
	}
	for _, row := range []struct{ part, want float64 }{{.8, 1}, {1, .985}, {1.1, -1}, {2, -1}} {
		without, with := onQuotas(t, "", row.part), onQuotas(t, "wait 2s", row.part)
		t.Logf("at %.1f: without %.2f %%, p50 %s, p99 %s; with %.2f %%, p50 %s, p99 %s", row.part,
			100*without.served, without.p50, without.p99, 100*with.served, with.p50, with.p99)
		if row.want < 0 { // it cannot serve what exceeds the quotas
			row.want = without.served - .01
		}
		if with.served < row.want {
			t.Errorf("at %.1f times the quotas, %.2f %% are served, want %.2f %%", row.part, 100*with.served, 100*row.want)
		}
		if with.p50 > 100*time.Millisecond {
			t.Errorf("at %.1f times the quotas, the median of those served is %s", row.part, with.p50)
		}
	}
}
