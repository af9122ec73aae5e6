package replicas

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/state/statetest"
)

func TestWhatWasLostIsMadeUpFor(t *testing.T) {
	for name, fault := range map[string]struct{ begin, end func(*statetest.Hub) }{
		"messages":      {func(h *statetest.Hub) { h.LoseMessages(true) }, func(*statetest.Hub) {}},
		"the store":     {func(h *statetest.Hub) { h.Fail(errors.New("down")) }, func(h *statetest.Hub) { h.Fail(nil) }},
		"store and all": {func(h *statetest.Hub) { h.Fail(errors.New("down")) }, func(h *statetest.Hub) { h.Flush(); h.Fail(nil) }},
	} {
		t.Run(name, func(t *testing.T) {
			share(t, 3, func(w *world) {
				before := time.Now()
				w.at(0, "b").CoolDown(throttle(50*time.Second), before)
				synctest.Wait()
				fault.begin(w.hub)
				w.at(0, "a").CoolDown(throttle(30*time.Second), time.Now())
				w.at(1, "b").Served(pool.Scope{Model: "m"}, before.Add(time.Second/2))
				w.at(1, "b").Reset(pool.Order{})
				fault.end(w.hub)
				time.Sleep(2 * time.Second)
				w.wantCooldown("a", 28*time.Second)
				if name != "store and all" { // that keeps no trace of what is over
					w.wantCooldown("b", 0)
				}
			})
		})
	}
}

func TestAStoreThatLostItsDataGetsItBack(t *testing.T) {
	share(t, 3, func(w *world) {
		w.at(0, "a").CoolDown(throttle(30*time.Second), time.Now())
		synctest.Wait()
		w.hub.Flush()
		time.Sleep(2 * time.Second)
		if n := w.hub.Len(digest("https://a key")); n != 1 {
			t.Errorf("%d records are kept of a, want 1", n)
		}
		w.start()
		synctest.Wait()
		w.wantCooldown("a", 28*time.Second)
	})
}

func TestAStoreWhoseClockIsSetBackMakesNoCooldownLonger(t *testing.T) {
	share(t, 2, func(w *world) {
		w.at(0, "a").CoolDown(throttle(10*time.Second), time.Now())
		synctest.Wait()
		w.hub.SetBack(time.Hour)
		late := w.start()
		synctest.Wait()
		if left := late.cooldownLeft("a"); left < 10*time.Second || left > 11*time.Second {
			t.Errorf("at a replica that starts, the cooldown of a lasts for %v, want 10 s", left)
		}
		for range 20 {
			time.Sleep(time.Second)
			for i, r := range w.replicas {
				if heard := r.peers.list(time.Now())[0].Heard; heard.After(time.Now()) {
					t.Fatalf("replica %d has heard another at %v", i, heard)
				}
			}
		}
		w.wantCooldown("a", 0)
	})
}

func TestAnOutageIsLoggedOnce(t *testing.T) {
	share(t, 2, func(w *world) {
		w.hub.Fail(errors.New("down, " + strings.Repeat("and out ", 100)))
		for i := range 100 {
			w.at(0, "a").CoolDown(throttle(time.Duration(i)*time.Minute), time.Now())
			time.Sleep(time.Second)
		}
		w.hub.Fail(nil)
		time.Sleep(3 * time.Second)
		var got []string
		for _, entry := range w.replicas[0].logs.All() {
			got = append(got, entry.Level.String()+" "+entry.Message)
			if text := fmt.Sprint(entry.ContextMap()); len(text) > 400 {
				t.Errorf("the log has %s", text)
			}
		}
		if want := []string{"info connected to other replicas", "warn not connected to other replicas", "info connected to other replicas"}; fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("logged %q, want %q", got, want)
		}
	})
}

func TestTheQueueIsBoundedAndLosesTheOldest(t *testing.T) {
	q := newQueue[item](maxQueue)
	lost := 0
	for i := range 3 * maxQueue {
		lost += q.add(item{kind: coolingDown, cooldown: pool.Cooldown{ID: uint64(i)}})
	}
	if q.len() != maxQueue || lost != 2*maxQueue {
		t.Errorf("it holds %d and lost %d", q.len(), lost)
	}
	want := uint64(2 * maxQueue)
	for q.len() > 0 {
		for _, i := range q.take(t.Context()) {
			if i.cooldown.ID != want {
				t.Fatalf("got %d, want %d", i.cooldown.ID, want)
			}
			want++
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if got := q.take(ctx); len(got) != 0 {
		t.Errorf("got %v from an empty queue", got)
	}
}

func TestAnOutageTakesNoMoreAndMoreMemory(t *testing.T) {
	share(t, 2, func(w *world) {
		r := w.replicas[0]
		goroutines := runtime.NumGoroutine()
		for outage := range 2 {
			w.hub.Fail(errors.New("down"))
			for i := range maxEnded + 200 { // of so many models
				b := throttle(time.Minute)
				b.Model = fmt.Sprint(outage, i)
				w.at(0, "a").Models = []string{b.Model}
				w.at(0, "a").CoolDown(b, time.Now())
				if i%2 == 0 {
					w.at(0, "a").Served(pool.Scope{Model: b.Model}, time.Now().Add(time.Second))
				}
				time.Sleep(10 * time.Millisecond)
			}
			if n := r.queue.len(); n > maxQueue {
				t.Errorf("%d messages wait", n)
			}
			r.claims.mu.Lock()
			r.mu.Lock()
			if len(r.claims.due) > maxEnded || len(r.ended) > maxEnded {
				t.Errorf("%d claims are due, %d cooldowns are remembered", len(r.claims.due), len(r.ended))
			}
			r.mu.Unlock()
			r.claims.mu.Unlock()
			w.hub.Fail(nil)
			time.Sleep(10 * time.Second)
			synctest.Wait()
			if n := runtime.NumGoroutine(); n > goroutines+5 {
				t.Errorf("there are %d goroutines, before the outage %d", n, goroutines)
			}
			if n := r.queue.len(); n > 0 {
				t.Errorf("%d messages wait after the outage", n)
			}
		}
	})
}
