package replicas

import (
	"fmt"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

func TestCooldownsThatEndTogetherAreEachProbedByOneReplica(t *testing.T) {
	share(t, 3, func(w *world) {
		const n, delay = 20, 30 * time.Millisecond
		w.hub.Delay(delay, delay)
		for i := range n {
			b := throttle(10 * time.Second)
			b.Model = fmt.Sprint("m", i)
			w.at(i%3, "a").Served(pool.Scope{Model: b.Model}, time.Now().Add(-time.Second))
			w.at(i%3, "a").CoolDown(b, time.Now())
		}
		time.Sleep(10*time.Second + delay + time.Millisecond) // they end that much later where they were heard
		for i := range n {
			probes := 0
			for _, r := range w.replicas {
				if m := r.pool.Pick(asks{cost: 1, model: fmt.Sprint("m", i)}.of(r.pool), time.Now()); m != nil && m.Name == "a" {
					probes++
				}
			}
			if probes != 1 {
				t.Errorf("%d replicas send the probe of model %d, want 1", probes, i)
			}
		}
	})
}

func TestAStoreThatIsFarAwayLetsOneReplicaSendTheProbe(t *testing.T) {
	for _, delay := range []time.Duration{0, 80 * time.Millisecond, 200 * time.Millisecond} {
		t.Run(delay.String(), func(t *testing.T) {
			share(t, 5, func(w *world) {
				const rounds = 6
				w.hub.Delay(delay, delay)
				time.Sleep(5 * time.Second)
				lost, late := claimed("lost"), claimed("late")
				probes := 0
				for range rounds {
					w.at(0, "a").CoolDown(throttle(10*time.Second), time.Now())
					time.Sleep(10*time.Second - 100*time.Millisecond)
					for range 500 { // requests at all replicas
						probes += w.picks("a")
						time.Sleep(time.Millisecond)
					}
					time.Sleep(20 * time.Second)
					for i := range w.replicas {
						w.at(i, "a").Reset(pool.Order{})
					}
					time.Sleep(time.Second)
				}
				if probes != rounds {
					t.Errorf("%d probes are sent after %d cooldowns", probes, rounds)
				}
				if lost, late = claimed("lost")-lost, claimed("late")-late; lost != 4*rounds || late != 0 {
					t.Errorf("%v claims are lost and %v late, want %d and none", lost, late, 4*rounds)
				}
			})
		})
	}
}

func TestAnAnswerAfterTheEndOfACooldownIsLate(t *testing.T) {
	share(t, 2, func(w *world) {
		w.at(0, "a").CoolDown(throttle(10*time.Second), time.Now())
		time.Sleep(9 * time.Second)
		w.hub.Delay(300*time.Millisecond, 0)
		lost, late := claimed("lost"), claimed("late")
		time.Sleep(2 * time.Second)
		if lost, late = claimed("lost")-lost, claimed("late")-late; lost != 0 || late != 1 {
			t.Errorf("%v claims are lost and %v late, want the one of the replica that was too late", lost, late)
		}
	})
}

// claimed is how many claims ended like that until now.
func claimed(outcome string) float64 {
	var m dto.Metric
	if err := claimsTotal.WithLabelValues(outcome).Write(&m); err != nil {
		panic(err)
	}
	return m.GetCounter().GetValue()
}
