package replicas

import (
	"fmt"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

// asksFor is a request for a model.
type asksFor struct {
	asks
	model string
}

func (a asksFor) ModelAt(*pool.Member) (string, bool) { return a.model, true }

func TestBenchesThatEndTogetherAreEachProbedByOneReplica(t *testing.T) {
	share(t, 3, func(w *world) {
		const n, delay = 20, 30 * time.Millisecond
		w.hub.Delay(delay, delay)
		for i := range n {
			b := throttle(10 * time.Second)
			b.Model = fmt.Sprint("m", i)
			w.at(i%3, "a").Served(b.Model, time.Now().Add(-time.Second))
			w.at(i%3, "a").Bench(b, time.Now())
		}
		time.Sleep(10*time.Second + delay + time.Millisecond) // they end that much later where they were heard
		for i := range n {
			probes := 0
			for _, r := range w.replicas {
				if m := r.pool.Pick(asksFor{asks{cost: 1}, fmt.Sprint("m", i)}, time.Now()); m != nil && m.Name == "a" {
					probes++
				}
			}
			if probes != 1 {
				t.Errorf("%d replicas send the probe of model %d, want 1", probes, i)
			}
		}
	})
}
