package replicas

import (
	"errors"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

// cutOff runs a test with n replicas whose callers have these limits. cut cuts
// the link of the last one, or puts it back.
func cutOff(t *testing.T, n int, limits []string, test func(w *world, all []*limitedReplica, cut func(bool))) {
	t.Helper()
	share(t, 0, func(w *world) {
		all := make([]*limitedReplica, n)
		last := &cutStore{Store: w.hub.Store()}
		for i := range all {
			store := w.hub.Store()
			if i == n-1 {
				store = last
			}
			all[i] = w.startLimitedWith(store, limits...)
		}
		time.Sleep(6 * time.Second)
		test(w, all, last.cut.Store)
		time.Sleep(time.Second) // requests that wait are over
	})
}

// ask sends so many requests of one token a second to each replica, and returns
// when they were admitted.
func ask(all []*limitedReplica, each int, long time.Duration) (admitted []time.Time) {
	var got admits
	for began := time.Now(); time.Since(began) < long; {
		for _, r := range all {
			got.try(r, 1)
		}
		time.Sleep(time.Second / time.Duration(each))
	}
	return got.soFar()
}

// TestALimitHoldsWhileAReplicaIsCutOff and goes on with its part. All are asked
// for twice the limit.
func TestALimitHoldsWhileAReplicaIsCutOff(t *testing.T) {
	for _, n := range []int{2, 3} {
		cutOff(t, n, []string{"600/minute", "100k/hour", "1M/day"}, func(w *world, all []*limitedReplica, cut func(bool)) {
			each := 20 / n
			connected := ask(all, each, 3*time.Minute)
			if most := mostInAMinute(connected); most > 660 {
				t.Errorf("%d replicas used %d of 600 in a minute", n, most)
			}
			cut(true)
			inTheMinute := ask(all, each, time.Minute)
			if most := mostInAMinute(append(connected, inTheMinute...)); most > 690 {
				t.Errorf("in the minute of the cut, %d replicas used %d of 600", n, most)
			}
			ask(all, each, time.Minute)
			after := ask(all, each, time.Minute)
			if used, most := len(after), 600*(2*n-1)/n; used < 580 || used > most*105/100 {
				t.Errorf("after two minutes, %d replicas used %d of 600, want at most %d", n, used, most)
			}
			cut(false)
			back := ask(all, each, 2*time.Minute)
			if most := mostInAMinute(back[len(back)/2:]); most > 660 {
				t.Errorf("after the cut, %d replicas used %d of 600", n, most)
			}
		})
	}
}

// TestNoReplicaOwesWhatWasUsedWhileOneWasCutOff when that is back: otherwise
// the other one would get nothing for minutes.
func TestNoReplicaOwesWhatWasUsedWhileOneWasCutOff(t *testing.T) {
	cutOff(t, 2, []string{"120/minute"}, func(w *world, all []*limitedReplica, cut func(bool)) {
		ask(all, 4, 2*time.Minute)
		cut(true)
		ask(all, 4, 3*time.Minute)
		cut(false)
		var got [2]admits
		for range 480 {
			for i, r := range all {
				got[i].try(r, 1)
			}
			time.Sleep(time.Second / 4)
		}
		for i := range got {
			if n := len(got[i].soFar()); n < 30 {
				t.Errorf("in the two minutes after the cut, replica %d used %d of 240", i, n)
			}
		}
	})
}

// TestTheOthersGetThePartOfAReplicaThatCrashed after a minute.
func TestTheOthersGetThePartOfAReplicaThatCrashed(t *testing.T) {
	cutOff(t, 3, []string{"600/minute"}, func(w *world, all []*limitedReplica, cut func(bool)) {
		before := ask(all, 7, 2*time.Minute)
		cut(true)
		all[2].stop()
		got := ask(all[:2], 10, time.Minute)
		if used := len(got); used < 380 || used > 500 {
			t.Errorf("in the minute after the crash, the others used %d of 600, want some 400", used)
		}
		if most := mostInAMinute(append(before, got...)); most > 660 {
			t.Errorf("%d of 600 were used in a minute", most)
		}
		got = ask(all[:2], 10, time.Minute)
		if used := len(got); used < 580 {
			t.Errorf("in the next minute, they used %d of 600", used)
		}
	})
}

// TestNothingIsHeldBackForAReplicaThatStops in order: only what it has used
// counts.
func TestNothingIsHeldBackForAReplicaThatStops(t *testing.T) {
	limit(t, 2, []string{"600/minute"}, func(w *world, all []*limitedReplica) {
		ask(all, 10, 2*time.Minute)
		all[1].stop()
		got := ask(all[:1], 20, time.Minute)
		if used := len(got); used < 580 {
			t.Errorf("the other one used %d of 600 in the next minute", used)
		}
	})
}

// TestNothingIsHeldBackInARollingRestart of all replicas, each of which is
// replaced by a new one.
func TestNothingIsHeldBackInARollingRestart(t *testing.T) {
	limit(t, 3, []string{"600/minute"}, func(w *world, all []*limitedReplica) {
		got := ask(all, 7, 2*time.Minute)
		for i, r := range all {
			r.stop()
			all[i] = w.startLimited("600/minute")
			got = append(got, ask(all, 7, 20*time.Second)...)
		}
		if most := mostInAMinute(got); most > 660 {
			t.Errorf("%d of 600 were used in a minute", most)
		}
		if used := len(got) - 1200; used < 570 || used > 660 {
			t.Errorf("%d of 600 were used in the minute of the restarts", used)
		}
	})
}

// TestAllOfALimitThatAVanishedReplicaUsedIsNotHeldBack but an equal part, and
// for a minute only.
func TestAllOfALimitThatAVanishedReplicaUsedIsNotHeldBack(t *testing.T) {
	cutOff(t, 2, []string{"600/minute"}, func(w *world, all []*limitedReplica, cut func(bool)) {
		ask(all[1:], 20, 2*time.Minute)
		cut(true)
		all[1].stop()
		crashed := time.Now()
		// The part is held back for a minute from the last message, which may
		// have come some seconds before the crash.
		if used := len(ask(all[:1], 20, 55*time.Second)); used < 280 || used > 320 {
			t.Errorf("in the 55 s after the crash, the other one used %d of 600, want some 300", used)
		}
		if used := len(ask(all[:1], 100, 10*time.Second)); used < 250 {
			t.Errorf("%s after the crash, the other one used only %d more", time.Since(crashed), used)
		}
	})
}

// TestAReplicaThatComesBackSaysWhatItUsed and that replaces what was held back.
func TestAReplicaThatComesBackSaysWhatItUsed(t *testing.T) {
	cutOff(t, 2, []string{"600/minute", "100k/day"}, func(w *world, all []*limitedReplica, cut func(bool)) {
		ask(all, 5, 90*time.Second)
		cut(true)
		time.Sleep(45 * time.Second)
		if used, _ := all[0].used("alice"); used < 300 || used > 350 {
			t.Errorf("%d of 600 are used, want some 250 that are held back, and 75 of its own", used)
		}
		cut(false)
		time.Sleep(5 * time.Second)
		for i, r := range all {
			if used, allowed := r.used("alice"); used < 90 || used > 110 || allowed != 600 {
				t.Errorf("at replica %d, %d of %d are used", i, used, allowed)
			}
		}
	})
}

// TestAResetGivesBackWhatIsHeldBack too.
func TestAResetGivesBackWhatIsHeldBack(t *testing.T) {
	cutOff(t, 2, []string{"600/minute"}, func(w *world, all []*limitedReplica, cut func(bool)) {
		ask(all, 5, 90*time.Second)
		cut(true)
		time.Sleep(45 * time.Second)
		if used, _ := all[0].used("alice"); used < 300 {
			t.Errorf("%d of 600 are used", used)
		}
		all[0].callers.Reset(time.Now(), "alice")
		if used, _ := all[0].used("alice"); used != 0 {
			t.Errorf("%d of 600 are used", used)
		}
	})
}

// TestReplicasThatLoseTheStoreTogetherHoldNothingBack when they come back one
// after the other.
func TestReplicasThatLoseTheStoreTogetherHoldNothingBack(t *testing.T) {
	limit(t, 3, []string{"600/minute"}, func(w *world, all []*limitedReplica) {
		got := ask(all, 7, 90*time.Second)
		w.hub.Fail(errors.New("down"))
		got = append(got, ask(all, 7, 30*time.Second)...)
		w.hub.Fail(nil)
		got = append(got, ask(all, 7, 5*time.Second)...)
		then := ask(all, 7, time.Minute)
		if most := mostInAMinute(append(got, then...)); most > 660 {
			t.Errorf("%d of 600 were used in a minute", most)
		}
		if used := len(then); used < 560 {
			t.Errorf("after the outage, %d of 600 were used in a minute", used)
		}
	})
}

// TestAPoolThatAnotherReplicaHasIsNotHeldBack if the process uses another
// engine since a reload: its callers are the same.
func TestAPoolThatAnotherReplicaHasIsNotHeldBack(t *testing.T) {
	now := time.Now()
	p := newPeers()
	for id, heard := range map[string]time.Duration{"former": 20 * time.Second, "new": time.Second, "gone": 30 * time.Second, "long gone": 70 * time.Second} {
		other := peer{Peer: seam.Peer{ID: id, Heard: now.Add(-heard)}, writers: []string{"abc"}}
		if id == "gone" {
			other.writers = []string{"abd", "abe"}
		}
		p.known[id] = other
	}
	c := p.contact(now)
	until := now.Add(30 * time.Second)
	want := []limiter.Vanished{{Writer: "abd", Until: until}, {Writer: "abe", Until: until}}
	if c.Replicas != 1 || c.Missing != 2 || len(c.Vanished) != 2 || c.Vanished[0] != want[0] || c.Vanished[1] != want[1] {
		t.Errorf("got %+v", c)
	}
}
