package replicas

import (
	"errors"
	"fmt"
	"testing"
	"time"
)

// TestWhatEndedReplicasUsedOutlivesTheStoresData has a store lose its data
// after a restart of all replicas, one after the other, and before another one.
func TestWhatEndedReplicasUsedOutlivesTheStoresData(t *testing.T) {
	for _, pause := range []time.Duration{100 * time.Millisecond, 10 * time.Second} {
		for _, lose := range []func(*world){
			func(w *world) { w.hub.Flush() },
			func(w *world) {
				w.hub.Fail(errors.New("down"))
				time.Sleep(5 * time.Second)
				w.hub.Flush()
				w.hub.Fail(nil)
				time.Sleep(time.Second)
			},
		} {
			limit(t, 3, []string{"100k/month"}, func(w *world, all []*limitedReplica) {
				restart := func() {
					for i, r := range all {
						r.stop()
						all[i] = w.startLimited("100k/month")
						time.Sleep(pause)
					}
				}
				want := int64(0)
				for i := range 400 {
					all[i%3].spend(fmt.Sprint("caller ", i%200), 10)
					want += 10
				}
				time.Sleep(5 * time.Second)
				restart()
				time.Sleep(5 * time.Second)
				lose(w)
				time.Sleep(2 * time.Second) // it is noticed once a second
				restart()
				time.Sleep(5 * time.Second)
				for i, r := range all {
					got := int64(0)
					for j := range 200 {
						used, _ := r.used(fmt.Sprint("caller ", j))
						got += used
					}
					if got != want {
						t.Errorf("with pauses of %s, replica %d knows of %d, want %d", pause, i, got, want)
					}
				}
			})
		}
	}
}

// TestWhatIsInTheStoreIsNotWrittenAgain because that would be much at many
// replicas.
func TestWhatIsInTheStoreIsNotWrittenAgain(t *testing.T) {
	limit(t, 3, []string{"1000/month"}, func(w *world, all []*limitedReplica) {
		group := "use-" + digest("callers of the pool")
		for _, r := range all {
			r.spend("alice", 100)
		}
		time.Sleep(3 * time.Second)
		all[0].stop()
		want := w.hub.Len(group)
		for range 3 {
			w.hub.Fail(errors.New("down"))
			time.Sleep(3 * time.Second)
			w.hub.Fail(nil)
			time.Sleep(10 * time.Second)
		}
		if got := w.hub.Len(group); got != want {
			t.Errorf("there are %d records, want %d", got, want)
		}
		w.hub.Flush()
		time.Sleep(10 * time.Second)
		if got := w.hub.Len(group); got != want {
			t.Errorf("after the store lost its data, there are %d records, want %d", got, want)
		}
	})
}
