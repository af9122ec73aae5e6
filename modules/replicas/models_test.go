package replicas

import (
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
	"github.com/openai-lb/caddy-openai-lb/state"
)

// seen counts messages.
type seen struct {
	mu sync.Mutex
	n  map[kind]int
}

func (t *seen) of(k kind) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.n[k]
}

// counted counts what is told from now on.
func (w *world) counted() *seen {
	told := &seen{n: make(map[kind]int)}
	go w.hub.Store().Listen(w.Context(), func() {}, func(text []byte) {
		m, _ := parse(text)
		told.mu.Lock()
		told.n[m.Kind]++
		told.mu.Unlock()
	})
	synctest.Wait()
	return told
}

// noModel is a backend's answer that it does not have the model.
func noModel(model string) pool.Refusal {
	return pool.Refusal{Reason: pool.Reason{Class: string(verdict.NoModel), Status: 404}, Model: model, Wait: time.Minute}
}

func TestMadeUpModelsTakeNothingOfTheStore(t *testing.T) {
	share(t, 3, func(w *world) {
		told := w.counted()
		for i := range 2000 {
			b := throttle(time.Minute)
			if b.Model = fmt.Sprint("made up ", i); i%2 == 0 {
				b = noModel(b.Model)
			}
			w.at(i%3, "a").CoolDown(b, time.Now())
			time.Sleep(time.Millisecond)
		}
		w.at(1, "a").CoolDown(throttle(30*time.Second), time.Now())
		synctest.Wait()
		for i, r := range w.replicas {
			if r.pool.Pick(asks{cost: 1}.of(r.pool), time.Now()) == r.members["a"] {
				t.Errorf("replica %d does not know of the throttle", i)
			}
		}
		time.Sleep(time.Minute)
		w.at(2, "a").Reset(pool.Order{})
		time.Sleep(time.Second)
		synctest.Wait()
		if told.of(coolingDown) != 1 || told.of(disproved) > 1 || w.hub.Len(digest("https://a key")) > 1 || w.hub.Claims() != 3 {
			t.Errorf("told %d times, %d are kept, %d claims; want those of one cooldown, which the reset may disprove", told.of(coolingDown), w.hub.Len(digest("https://a key")), w.hub.Claims())
		}
	})
}

func TestAModelThatWasServedIsShared(t *testing.T) {
	share(t, 3, func(w *world) {
		w.at(0, "a").Served(pool.Scope{Model: "new"}, time.Now())
		b := throttle(10 * time.Second)
		b.Model = "new"
		w.at(0, "a").CoolDown(b, time.Now())
		synctest.Wait()
		w.wantCooldown("a", 10*time.Second)
		time.Sleep(time.Second)
		w.at(1, "a").Served(pool.Scope{Model: "new"}, time.Now()) // which has heard of it, and not served it before
		synctest.Wait()
		w.wantCooldown("a", 0)
	})
}

// fill has the store keep so many records of a backend, which no replica here
// understands.
func (w *world) fill(backend string, n int, ttl time.Duration) {
	for i := range n {
		if err := w.hub.Store().Put(w.Context(), []state.Record{{
			Group: digest("https://" + backend + " key"), Key: fmt.Sprint(n, i), TTL: ttl, Message: []byte(`{"v":0}`)}}); err != nil {
			w.Fatal(err)
		}
	}
}

func TestThrottlesAndWholeBackendsKeepTheirSpace(t *testing.T) {
	share(t, 1, func(w *world) {
		kept := func(b pool.Refusal) bool {
			before := w.hub.Len(digest("https://a key"))
			w.at(0, "a").CoolDown(b, time.Now())
			synctest.Wait()
			return w.hub.Len(digest("https://a key")) > before
		}
		whole := throttle(time.Minute)
		whole.Whole = true
		other := throttle(time.Minute)
		other.Model = "other"
		w.fill("a", state.MaxRecords/2-1, time.Hour)
		if !kept(noModel("m")) || kept(noModel("other")) {
			t.Error("failures of models do not have half of the space")
		}
		w.fill("a", state.MaxRecords/2-3, time.Hour)
		if !kept(throttle(time.Minute)) || kept(other) {
			t.Error("throttles of models have not all but two places")
		}
		if !kept(whole) {
			t.Error("there is no place for the whole backend")
		}
	})
}

func TestACooldownThatDidNotFitWaitsForAPlace(t *testing.T) {
	share(t, 2, func(w *world) {
		w.fill("a", 2, 20*time.Second)
		w.fill("a", state.MaxRecords-4, time.Hour)
		told := w.counted()
		w.at(0, "a").CoolDown(throttle(time.Minute), time.Now())
		time.Sleep(18 * time.Second)
		w.wantCooldown("a", 42*time.Second)
		synctest.Wait()
		if told.of(coolingDown) != 1 {
			t.Errorf("it is told %d times, want once", told.of(coolingDown))
		}
		time.Sleep(4 * time.Second)
		late := w.start()
		time.Sleep(time.Second)
		synctest.Wait()
		if late.cooldownLeft("a") == 0 || told.of(coolingDown) > 3 {
			t.Errorf("after there was a place, it is told %d times, and known to another replica: %v", told.of(coolingDown), late.cooldownLeft("a") > 0)
		}
	})
}
