package replicas

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/state"
)

// readStore counts how often a group is loaded from it.
type readStore struct {
	state.Store
	group string
	reads int
}

func (s *readStore) Load(ctx context.Context, groups []string) ([]state.Kept, time.Time, error) {
	if slices.Contains(groups, s.group) {
		s.reads++
	}
	return s.Store.Load(ctx, groups)
}

// TestSignsOfLifeAreHeardAndSeldomRead has a replica know the others from their messages. It reads what the store keeps of them
// when it starts and now and then, and each time while it hears nothing.
func TestSignsOfLifeAreHeardAndSeldomRead(t *testing.T) {
	share(t, 2, func(w *world) {
		s := &readStore{Store: w.hub.Store(), group: replicaGroup}
		r := w.startWith(s)
		time.Sleep(100 * time.Millisecond)
		if known := len(r.peers.list(time.Now())); known != 3 {
			t.Errorf("a replica that starts knows %d replicas, want 3", known)
		}
		time.Sleep(2 * time.Second)
		s.reads = 0
		time.Sleep(time.Minute)
		if s.reads > 12 {
			t.Errorf("they were read %d times in a minute", s.reads)
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
