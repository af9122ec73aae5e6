package replicas

import (
	"context"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/state"
)

// wantHour checks what a replica adds of others that have not answered.
func (r *limitedReplica) wantHour(w *world, name string, requests, tokens int64, refused map[string]uint64, answers ...string) {
	w.Helper()
	got := r.lastHours(w.Context(), answers)[callersKey("the pool")][ratelimit.IDOf(name)]
	if got.Requests != requests || got.Tokens != tokens || !maps.Equal(got.Refused, refused) {
		w.Errorf("got %+v of %s, want %d requests, %d tokens and %v", got, name, requests, tokens, refused)
	}
}

// A rolling restart replaces the replicas one by one, and an operator asks one
// that has seen no request.
func TestTheLastHourOfReplicasThatHaveEndedIsKept(t *testing.T) {
	limit(t, 3, []string{"1000/day"}, func(w *world, all []*limitedReplica) {
		for i, r := range all[:2] {
			r.spend("alice", int64(10*(i+1)))
			for range i + 1 {
				r.callers.Get(time.Now(), "alice").RefusedBy(time.Now(), ratelimit.ByModel)
			}
		}
		all[0].stop()
		all[1].stop()
		time.Sleep(2 * lifetime)
		all[2].wantHour(w, "alice", 2, 30, map[string]uint64{"model": 3})
		fresh := w.startLimited("1000/day")
		time.Sleep(6 * time.Second)
		all[2].stop()
		fresh.wantHour(w, "alice", 2, 30, map[string]uint64{"model": 3})
		fresh.wantHour(w, "bob", 0, 0, nil)
		time.Sleep(40 * time.Minute)
		fresh.wantHour(w, "alice", 2, 30, map[string]uint64{"model": 3})
		time.Sleep(20 * time.Minute)
		fresh.wantHour(w, "alice", 0, 0, nil)
	})
}

// One that answers counts once. One that hangs or has crashed counts as it was
// a minute ago.
func TestTheLastHourOfAReplicaCountsOnce(t *testing.T) {
	limit(t, 2, []string{"1000/day"}, func(w *world, all []*limitedReplica) {
		all[0].spend("alice", 10)
		time.Sleep(2 * time.Minute)
		other := all[0].peers.self.ID
		all[1].wantHour(w, "alice", 0, 0, nil, other)
		all[1].wantHour(w, "alice", 1, 10, nil)
		all[0].wantHour(w, "alice", 0, 0, nil, other) // its own
		all[0].spend("alice", 5)
		all[1].wantHour(w, "alice", 1, 10, nil)
		time.Sleep(time.Minute + time.Second)
		all[1].wantHour(w, "alice", 2, 15, nil)
	})
}

// The records of many callers move between each other.
func TestTheLastHourOfManyCallersIsKept(t *testing.T) {
	limit(t, 2, []string{"1000/day"}, func(w *world, all []*limitedReplica) {
		const n = 500
		names := make([]string, n)
		for i := range names {
			names[i] = "caller-" + string(rune('a'+i%26)) + time.Duration(i).String()
			all[0].spend(names[i], 1)
		}
		time.Sleep(5 * time.Minute)
		for i := range names {
			all[0].spend(names[n-1-i], 1) // longer records now
		}
		time.Sleep(30 * time.Second)
		all[0].stop()
		for _, name := range names {
			all[1].wantHour(w, name, 2, 2, nil)
		}
	})
}

// hourLoads is a store that counts the loads of the last hour of callers.
type hourLoads struct {
	state.Store
	n int
}

func (s *hourLoads) Load(ctx context.Context, groups []string) ([]state.Kept, time.Time, error) {
	if strings.HasPrefix(groups[0], "hours-") {
		s.n++
	}
	return s.Store.Load(ctx, groups)
}

// TestAWatchedPageSeldomLoadsTheLastHour while the same replicas answer. It
// loads the hour at once when one of them has ended.
func TestAWatchedPageSeldomLoadsTheLastHour(t *testing.T) {
	share(t, 0, func(w *world) {
		loads := &hourLoads{Store: w.hub.Store()}
		here, other := w.startLimitedWith(loads, "1000/day"), w.startLimited("1000/day")
		time.Sleep(6 * time.Second)
		other.spend("alice", 10)
		for range 60 {
			here.wantHour(w, "alice", 0, 0, nil, other.peers.self.ID)
			time.Sleep(2 * time.Second)
		}
		if loads.n > 5 {
			t.Errorf("the hour was loaded %d times in two minutes", loads.n)
		}
		other.spend("alice", 5)
		other.stop()
		here.wantHour(w, "alice", 2, 15, nil)
	})
}
