package replicas

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/state"
)

// readStore counts how often a group is loaded from it.
type readStore struct {
	state.Store
	group string
	reads atomic.Int64
}

func (s *readStore) Load(ctx context.Context, groups []string) ([]state.Kept, time.Time, error) {
	if slices.Contains(groups, s.group) {
		s.reads.Add(1)
	}
	return s.Store.Load(ctx, groups)
}

// TestSignsOfLifeAreHeardAndSeldomRead has a replica know the others from their
// messages. It reads what the store keeps of them when it starts and now and
// then, and each time while it hears nothing.
func TestSignsOfLifeAreHeardAndSeldomRead(t *testing.T) {
	share(t, 2, func(w *world) {
		s := &readStore{Store: w.hub.Store(), group: replicaGroup}
		r := w.startWith(s)
		time.Sleep(100 * time.Millisecond)
		if known := len(r.peers.list(time.Now())); known != 3 {
			t.Errorf("a replica that starts knows %d replicas, want 3", known)
		}
		time.Sleep(2 * time.Second)
		s.reads.Store(0)
		time.Sleep(time.Minute)
		if reads := s.reads.Load(); reads > 12 {
			t.Errorf("they were read %d times in a minute", reads)
		}
		w.hub.LoseMessages(true)
		time.Sleep(time.Minute)
		if known := len(r.peers.list(time.Now())); known != 3 {
			t.Errorf("a replica that hears nothing knows %d replicas, want 3", known)
		}
		w.hub.LoseMessages(false)
		w.replicas[0].stop()
		time.Sleep(lifetime)
		if known := len(r.peers.list(time.Now())); known != 2 {
			t.Errorf("when one has ended, %d replicas are known, want 2", known)
		}
	})
}

// TestManyReplicasShowSignsOfLifeAtTheSameMoments by the store's clock: then
// the store delivers them together. They read what it keeps at different times.
func TestManyReplicasShowSignsOfLifeAtTheSameMoments(t *testing.T) {
	share(t, 40, func(w *world) {
		time.Sleep(3 * interval)
		shown := make(map[time.Time]int)
		go w.hub.Store().Listen(w.Context(), func() {}, func(text []byte) {
			if m, err := parse(text); err == nil && m.Kind == alive {
				shown[time.UnixMicro(m.Sent).Truncate(time.Millisecond)]++
			}
		})
		time.Sleep(20*interval - interval/2)
		synctest.Wait()
		for at, n := range shown {
			if n != 40 || at.UnixMilli()%2000 != 0 {
				t.Errorf("%d replicas show a sign of life at %s", n, at.Format("05.000"))
			}
		}
		if len(shown) < 9 {
			t.Errorf("in 20 s, signs of life are shown %d times", len(shown))
		}
		for i, r := range w.replicas {
			if known := len(r.peers.list(time.Now())); known != 40 {
				t.Errorf("replica %d knows %d replicas, want 40", i, known)
			}
		}
	})
}

// TestALateSignOfLifeIsNone because the server hung that keeps it: the replica
// that sent it has stopped since.
func TestALateSignOfLifeIsNone(t *testing.T) {
	share(t, 2, func(w *world) {
		r, store := w.replicas[0], w.hub.Store()
		want := func(when string, want int) {
			t.Helper()
			for range 12 {
				synctest.Wait()
				if known := len(r.peers.all()); known != want {
					t.Fatalf("%s, %d replicas are known, want %d", when, known, want)
				}
				time.Sleep(time.Second)
			}
		}
		synctest.Wait()
		stopped := w.replicas[1].alive(time.Now())
		w.replicas[1].stop()
		time.Sleep(100 * time.Millisecond)
		if err := store.Put(w.Context(), []state.Record{stopped}); err != nil {
			t.Fatal(err)
		}
		want("after it said that it stops", 1)
		time.Sleep(time.Minute)
		if err := store.Put(w.Context(), []state.Record{stopped}); err != nil {
			t.Fatal(err)
		}
		want("a minute later", 1)
	})
}
