package replicas

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// reset gives a caller its use back, at this replica.
func (r *limitedReplica) reset(t *testing.T, name string) {
	t.Helper()
	if !r.callers.Reset(time.Now(), name) {
		t.Errorf("%s is not known", name)
	}
}

func TestACallerGetsItsUseBackAtAllReplicasWithinOneFlush(t *testing.T) {
	limit(t, 3, []string{"1000/month"}, func(w *world, all []*limitedReplica) {
		for _, r := range all[:2] {
			r.spend("alice", 100)
			r.spend("bob", 100)
		}
		time.Sleep(2 * time.Second)
		wantUsed(t, "alice", 200, all...)
		all[2].reset(t, "alice") // it has had no request of hers
		time.Sleep(flush)
		wantUsed(t, "alice", 0, all...)
		wantUsed(t, "bob", 200, all...)
		all[0].spend("alice", 5)
		time.Sleep(2 * time.Second)
		wantUsed(t, "alice", 5, all...)
		all[0].spend("bob", 1)
		time.Sleep(flush) // it has just sent a report
		all[0].reset(t, "alice")
		time.Sleep(flush)
		wantUsed(t, "alice", 0, all...)
	})
}

// TestAResetOutlivesReplicasAndTheDataOfTheStore restarts one replica after the
// other. The first to end has only used something, and the second one has only
// heard of the reset.
func TestAResetOutlivesReplicasAndTheDataOfTheStore(t *testing.T) {
	limit(t, 4, []string{"1000/month"}, func(w *world, all []*limitedReplica) {
		all[0].spend("alice", 100)
		time.Sleep(2 * time.Second)
		all[0].stop() // its record stays
		all[1].spend("alice", 200)
		time.Sleep(2 * time.Second)
		all[2].reset(t, "alice")
		time.Sleep(flush)
		all[3].spend("alice", 7)
		time.Sleep(2 * time.Second)
		wantUsed(t, "alice", 7, all[1:]...)
		for _, r := range all[1:] {
			r.stop()
			again := w.startLimited("1000/month")
			time.Sleep(100 * time.Millisecond)
			wantUsed(t, "alice", 7, again)
		}
		last := w.startLimited("1000/month")
		time.Sleep(3 * time.Second)
		last.spend("alice", 1)
		last.reset(t, "alice")
		w.hub.Flush()
		time.Sleep(4 * time.Second)
		again := w.startLimited("1000/month")
		time.Sleep(100 * time.Millisecond)
		wantUsed(t, "alice", 0, last, again)
	})
}

func TestAResetWithoutAConnectionReachesAllReplicasAfterwards(t *testing.T) {
	limit(t, 3, []string{"1000/minute", "1000/month"}, func(w *world, all []*limitedReplica) {
		all[0].spend("alice", 300)
		all[1].spend("alice", 300)
		time.Sleep(2 * time.Second)
		w.hub.Fail(errors.New("down"))
		time.Sleep(5 * time.Second)
		all[1].spend("alice", 50) // it has not heard of the reset
		all[0].reset(t, "alice")
		wantUsed(t, "alice", 0, all[0])
		time.Sleep(time.Second)
		w.hub.Fail(nil)
		time.Sleep(6 * time.Second)
		wantUsed(t, "alice", 0, all...)
		all[1].spend("alice", 5)
		time.Sleep(2 * time.Second)
		wantUsed(t, "alice", 5, all...)
		synctest.Wait()
		if _, allowed := all[0].used("alice"); allowed != 1000 {
			t.Errorf("alice may use %d, want all of the limit", allowed)
		}
	})
}
