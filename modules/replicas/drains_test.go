package replicas

import (
	"context"
	"errors"
	"math"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/state"
)

// wantDrained checks at every replica whether a is out of use.
func (w *world) wantDrained(want bool) {
	w.Helper()
	for i := range w.replicas {
		if w.at(i, "a").Drained() != want {
			w.Errorf("at replica %d, a is drained: %v, want %v", i, !want, want)
		}
	}
}

func TestReplicasKnowWhoDrainedABackendAndWhy(t *testing.T) {
	share(t, 2, func(w *world) {
		given := pool.Order{Time: time.Now(), By: "alice", Reason: "new PTU"}
		w.at(0, "a").Drain(given)
		synctest.Wait()
		w.start()
		time.Sleep(time.Second)
		for i := range w.replicas {
			if got := w.at(i, "a").TakenOut(); got == nil || got.By != given.By || got.Reason != given.Reason || !got.Time.Equal(given.Time) {
				t.Errorf("at replica %d, a is out of use by %+v, want %+v", i, got, given)
			}
		}
		w.at(1, "a").Drain(pool.Order{By: "bob"})
		synctest.Wait()
		if got := w.at(0, "a").TakenOut(); got.By != "bob" || got.Reason != "" {
			t.Errorf("the later order is not shown, but %+v", got)
		}
	})
}

// So repeat replicas of an earlier version, which do not know who gave it and
// why.
func TestAnOrderThatIsRepeatedWithoutItsReasonKeepsIt(t *testing.T) {
	share(t, 2, func(w *world) {
		given := pool.Order{Time: time.Now(), By: "alice", Reason: "new PTU"}
		w.at(0, "a").Drain(given)
		synctest.Wait()
		m := message{Version: version, Kind: drained, From: digest("r"), Backend: digest("https://a key"), Member: digest("a"), Order: given.Time.UnixMicro()}
		if err := w.hub.Store().Put(w.Context(), []state.Record{{Group: drainGroup, Key: m.Backend + m.Member, Mode: state.Replace, Message: m.text(), Version: m.order(someTime).version()}}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Second)
		for i := range w.replicas {
			if got := w.at(i, "a").TakenOut(); got == nil || got.By != given.By || got.Reason != given.Reason {
				t.Errorf("at replica %d, a is out of use by %+v, want %+v", i, got, given)
			}
		}
	})
}

func TestTheLatestOrderHoldsIfTheStoreKeepsNothing(t *testing.T) {
	share(t, 3, func(w *world) {
		w.hub.FailWrites(errors.New("OOM"))
		told := w.counted()
		w.at(0, "a").Drain(pool.Order{})
		synctest.Wait()
		w.wantDrained(true)
		time.Sleep(10 * time.Millisecond)
		w.at(1, "a").Resume(pool.Order{})
		synctest.Wait()
		for range 3000 {
			w.wantDrained(false)
			if w.Failed() {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
		synctest.Wait()
		if told.of(drained) != 1 || told.of(resumed) < 5 || told.of(resumed) > 3*16 {
			t.Errorf("in 30 s, replicas told %d drains and %d resumes, want one drain, and a resume of each every two seconds at most", told.of(drained), told.of(resumed))
		}
		w.hub.FailWrites(nil)
		time.Sleep(3 * time.Second)
		w.start()
		time.Sleep(time.Second)
		w.wantDrained(false)
	})
}

// cutStore is out of reach of one replica while it is cut.
type cutStore struct {
	state.Store
	cut atomic.Bool
}

var errCut = errors.New("no route to host")

func (s *cutStore) Put(ctx context.Context, records []state.Record) error {
	if s.cut.Load() {
		return errCut
	}
	return s.Store.Put(ctx, records)
}

func (s *cutStore) Load(ctx context.Context, groups []string) ([]state.Kept, time.Time, error) {
	if s.cut.Load() {
		return nil, time.Time{}, errCut
	}
	return s.Store.Load(ctx, groups)
}

func (s *cutStore) Listen(ctx context.Context, ready func(), hear func([]byte)) error {
	if s.cut.Load() {
		return errCut
	}
	return s.Store.Listen(ctx, ready, func(message []byte) {
		if !s.cut.Load() {
			hear(message)
		}
	})
}

// TestAReplicaThatAloneLostTheStoreIsMissed since it may not hear of an order.
// One that has stopped is not.
func TestAReplicaThatAloneLostTheStoreIsMissed(t *testing.T) {
	share(t, 3, func(w *world) {
		answerWith(t, func(string, []string) []byte { return []byte("here") })
		cut := &cutStore{Store: w.hub.Store()}
		w.startWith(cut)
		time.Sleep(2 * time.Second)
		w.replicas[2].stop()
		synctest.Wait()
		missed := func() (ids []string) {
			for _, a := range w.replicas[0].others(0) {
				if !a.Self && isSilent(a.Heard, time.Now()) {
					ids = append(ids, a.ID)
				}
			}
			return ids
		}
		if n := len(w.replicas[0].peers.list(time.Now())); n != 3 {
			t.Errorf("%d replicas count, although one of four has said that it stops", n)
		}
		cut.cut.Store(true)
		lost := w.replicas[3].peers.self.ID
		for _, after := range []time.Duration{12 * time.Second, 5 * time.Minute} {
			time.Sleep(after)
			if got := missed(); !slices.Equal(got, []string{lost}) {
				t.Errorf("after %s, %q are missed, want %q", after, got, lost)
			}
			if n := len(w.replicas[0].peers.list(time.Now())); n != 2 {
				t.Errorf("%d replicas count", n)
			}
			began := time.Now()
			if w.replicas[0].askFor(5*time.Second, "who"); time.Since(began) > time.Second {
				t.Errorf("a question waits %s for a replica that is not heard", time.Since(began))
			}
		}
		cut.cut.Store(false)
		time.Sleep(5 * time.Second)
		if got := missed(); len(got) > 0 || len(w.replicas[0].peers.list(time.Now())) != 3 {
			t.Errorf("%q are missed, although all are back", got)
		}
		cut.cut.Store(true)
		time.Sleep(missedFor + lifetime)
		if got := missed(); len(got) > 0 {
			t.Errorf("%q are missed for ever", got)
		}
	})
}

func TestAReplicaThatWasCutOffDoesNotBringADrainBack(t *testing.T) {
	for name, then := range map[string]func(w *world){
		"the store has the resume": func(*world) {},
		"the store lost its data":  func(w *world) { w.hub.Flush() },
		"the store keeps nothing": func(w *world) {
			w.hub.Flush()
			w.hub.FailWrites(errors.New("OOM"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			share(t, 2, func(w *world) {
				cut := &cutStore{Store: w.hub.Store()}
				w.startWith(cut)
				time.Sleep(2 * time.Second)
				w.at(0, "a").Drain(pool.Order{})
				synctest.Wait()
				cut.cut.Store(true)
				time.Sleep(time.Second)
				w.at(1, "a").Resume(pool.Order{})
				time.Sleep(10 * time.Minute)
				if !w.at(2, "a").Drained() {
					t.Fatal("it is not cut off")
				}
				then(w)
				cut.cut.Store(false)
				for range 10 {
					time.Sleep(time.Second)
					if w.at(0, "a").Drained() || w.at(1, "a").Drained() {
						t.Fatal("the drain is back")
					}
				}
				w.wantDrained(false)
			})
		})
	}
}

func TestAnOrderHoldsElsewhereIfItChangesNothingHere(t *testing.T) {
	share(t, 3, func(w *world) {
		w.hub.Fail(errors.New("down"))
		w.at(0, "a").Drain(pool.Order{})
		time.Sleep(time.Minute)
		w.at(1, "a").Resume(pool.Order{}) // which is in use there
		time.Sleep(time.Minute)
		w.hub.Fail(nil)
		time.Sleep(5 * time.Second)
		w.wantDrained(false)
	})
}

func TestOrdersAreForgottenAfterADay(t *testing.T) {
	share(t, 2, func(w *world) {
		w.at(0, "a").Drain(pool.Order{})
		time.Sleep(time.Second)
		w.at(0, "a").Resume(pool.Order{})
		w.at(1, "b").Drain(pool.Order{})
		time.Sleep(2 * time.Second)
		for _, c := range []struct {
			after time.Duration
			want  int
		}{{23 * time.Hour, 2}, {2 * time.Hour, 1}} {
			for _, r := range w.replicas {
				r.drains.mu.Lock()
				for key, o := range r.drains.known { // as if the time had passed
					o.number -= c.after.Microseconds()
					r.drains.known[key] = o
				}
				r.drains.mu.Unlock()
			}
			w.hub.Flush()
			time.Sleep(4 * time.Second)
			synctest.Wait()
			if n := w.hub.Len(drainGroup); n != c.want {
				t.Errorf("%v later, %d orders are kept, want %d", c.after, n, c.want)
			}
			for i, r := range w.replicas {
				r.drains.mu.Lock()
				n := len(r.drains.known)
				r.drains.mu.Unlock()
				if n != c.want || !w.at(i, "b").Drained() {
					t.Errorf("%v later, replica %d repeats %d orders, want %d", c.after, i, n, c.want)
				}
			}
		}
	})
}

func TestNoOrderIsFromTheFuture(t *testing.T) {
	share(t, 2, func(w *world) {
		w.at(0, "a").Drain(pool.Order{})
		time.Sleep(time.Second)
		for _, number := range []int64{math.MaxInt64, maxTime, time.Now().Add(25 * time.Hour).UnixMicro()} {
			m := message{Version: version, Kind: resumed, From: digest("r"), Backend: digest("https://a key"), Member: digest("a"), Order: number}
			if err := w.hub.Store().Put(w.Context(), []state.Record{{Group: drainGroup, Key: m.Backend + m.Member, Mode: state.Replace, Message: m.text(), Version: m.order(someTime).version()}}); err != nil {
				t.Fatal(err)
			}
			time.Sleep(5 * time.Second)
			w.wantDrained(true)
		}
		w.at(1, "a").Resume(pool.Order{})
		time.Sleep(5 * time.Second)
		w.start()
		time.Sleep(time.Second)
		w.wantDrained(false)
	})
}

// So do replicas of an earlier version, which give no numbers.
func TestAnOrderWithoutANumberHoldsUntilOneWithANumber(t *testing.T) {
	share(t, 2, func(w *world) {
		m := message{Version: version, Kind: drained, From: digest("r"), Backend: digest("https://a key"), Member: digest("a")}
		put := func() {
			if err := w.hub.Store().Put(w.Context(), []state.Record{{Group: drainGroup, Key: m.Backend + m.Member, Mode: state.Replace, Message: m.text()}}); err != nil {
				t.Fatal(err)
			}
		}
		put()
		synctest.Wait()
		w.wantDrained(true)
		w.at(0, "a").Resume(pool.Order{})
		synctest.Wait()
		w.wantDrained(false)
		put()
		time.Sleep(5 * time.Second)
		w.wantDrained(false)
		w.start()
		time.Sleep(time.Second)
		w.wantDrained(false)
	})
}
