package replicas

import (
	"errors"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// again ends a replica in order and starts another one in its place, with what
// it has saved.
func (w *world) again(r *limitedReplica, expected int, limits ...string) *limitedReplica {
	w.Helper()
	r.stop()
	saved := r.callers.Save(time.Now())
	next := w.startLimited(limits...)
	next.usage.Expect(time.Now(), expected)
	next.callers.Restore(time.Now(), saved)
	return next
}

// demand has each replica asked for more than the limit for a while, and
// returns how many tokens were admitted in each second.
func demand(all []*limitedReplica, seconds int) (admitted []int64) {
	for range seconds {
		sum := int64(0)
		for range 10 {
			for _, r := range all {
				for range 40 {
					if a, refusal := r.callers.Get(time.Now(), "alice").Try(time.Now(), ratelimit.Estimate{Prompt: 1}); refusal == nil {
						a.Settle(time.Now(), ratelimit.Cost{Requests: 1, Prompt: 1})
						sum++
					}
				}
			}
			time.Sleep(100 * time.Millisecond)
		}
		admitted = append(admitted, sum)
	}
	return admitted
}

// mostIn returns the largest sum of so many values in a row.
func mostIn(values []int64, n int) (most int64) {
	for i := range values {
		sum := int64(0)
		for _, v := range values[i:min(len(values), i+n)] {
			sum += v
		}
		most = max(most, sum)
	}
	return most
}

// TestReplicasThatRestartWithoutTheStoreKeepALimit has all of them restart one
// after the other while the store is gone, and then come back to a store with
// or without its data.
func TestReplicasThatRestartWithoutTheStoreKeepALimit(t *testing.T) {
	for name, comeBack := range map[string]func(*world){
		"with its data":    func(*world) {},
		"without its data": func(w *world) { w.hub.Flush() },
	} {
		for _, before := range []int{0, 5, 45} {
			for _, rounds := range []int{1, 3} {
				limit(t, 3, []string{"1200/minute", "10M/day"}, func(w *world, all []*limitedReplica) {
					time.Sleep(time.Until(time.Now().Truncate(time.Minute).Add(80 * time.Second)))
					admitted := demand(all, before)
					w.hub.Fail(errors.New("down"))
					admitted = append(admitted, demand(all, 3)...)
					for range rounds {
						for i, r := range all {
							all[i] = w.again(r, 3, "1200/minute", "10M/day")
							admitted = append(admitted, demand(all, 2)...)
						}
					}
					comeBack(w)
					w.hub.Fail(nil)
					admitted = append(admitted, demand(all, 100)...)
					if most := mostIn(admitted, 60); most > 1200*105/100 {
						t.Errorf("%s, after %d s and %d rounds: %d of 1,200 are admitted in a minute: %v", name, before, rounds, most, admitted)
					}
					time.Sleep(10 * time.Second)
					sum := int64(0)
					for _, n := range admitted {
						sum += n
					}
					for i, r := range all {
						if got := r.callers.Get(time.Now(), "alice").Snapshot(time.Now()).Today; got != sum {
							t.Errorf("%s, after %d s and %d rounds: replica %d knows of %d tokens of the day, of %d", name, before, rounds, i, got, sum)
						}
					}
				})
			}
		}
	}
}
