package replicas

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

// takeKey has a replica's member get another key, as a file does that changes.
func (w *world) takeKey(i int, backend, key string) {
	m := w.at(i, backend)
	m.StartFresh(key)
	w.replicas[i].link.Name(m, "https://"+backend+" "+key)
	synctest.Wait()
}

func TestAMemberWithAnotherKeyIsAnotherBackend(t *testing.T) {
	share(t, 2, func(w *world) {
		want := func(first, second time.Duration) {
			t.Helper()
			for i, want := range []time.Duration{first, second} {
				if got := w.replicas[i].cooldownLeft("a"); got < want || got > want+10*time.Millisecond {
					t.Errorf("at replica %d, the cooldown of a lasts for %v, want %v", i, got, want)
				}
			}
		}
		w.takeKey(0, "a", "old")
		w.takeKey(1, "a", "old")
		w.at(0, "a").CoolDown(throttle(time.Minute), time.Now())
		synctest.Wait()
		want(time.Minute, time.Minute)
		w.takeKey(0, "a", "new")
		want(0, time.Minute)
		w.at(0, "a").CoolDown(throttle(30*time.Second), time.Now())
		w.at(1, "a").CoolDown(throttle(2*time.Minute), time.Now())
		synctest.Wait()
		want(30*time.Second, 2*time.Minute)
		time.Sleep(10 * time.Second)
		want(20*time.Second, 110*time.Second)
		w.takeKey(1, "a", "new")
		want(20*time.Second, 20*time.Second) // at once
	})
}

func TestADrainOutlivesTheKey(t *testing.T) {
	share(t, 2, func(w *world) {
		want := func(drained ...bool) {
			t.Helper()
			for i, want := range drained {
				if w.at(i, "a").Drained() != want {
					t.Errorf("at replica %d, a is drained: %v, want %v", i, !want, want)
				}
			}
		}
		w.at(0, "a").Drain(pool.Order{})
		synctest.Wait()
		w.takeKey(0, "a", "new")
		time.Sleep(time.Minute)
		want(true, true)
		w.at(0, "a").Resume(pool.Order{})
		time.Sleep(time.Minute)
		want(false, true)
		w.takeKey(1, "a", "new")
		want(false, false)
	})
}
