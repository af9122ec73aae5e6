package replicas

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap/zapcore"

	"github.com/openai-lb/caddy-openai-lb/internal/ownership"
	"github.com/openai-lb/caddy-openai-lb/state"
	"github.com/openai-lb/caddy-openai-lb/state/statetest"
)

const (
	minutes = 10 * time.Minute // how long owners are kept
	waiting = 50 * time.Millisecond
)

var alice, bob = ownership.CallerNamed("alice"), ownership.CallerNamed("bob")

// owners are those of the pool that all replicas have, with the accounts a and
// b.
func (r *testReplica) owners() *Owners { return r.link.ownersOf("a pool", "a", "b") }

func (l *Link) ownersOf(pool string, accounts ...string) *Owners {
	return l.Owners(pool, accounts).(*Owners)
}

func (o *Owners) ask(ids ...string) []ownership.Found {
	found, _ := o.askAs(alice, ids...)
	return found
}

func (o *Owners) askAs(c ownership.CallerDigest, ids ...string) ([]ownership.Found, error) {
	keys := make([]ownership.Key, len(ids))
	for i, id := range ids {
		keys[i] = ownership.KeyOf(id)
	}
	return o.Lookup(c, keys)
}

func (o *Owners) tell(id, account string, caller ownership.CallerDigest) {
	o.Send(ownership.KeyOf(id), ownership.Owner{Account: account, Caller: caller}, minutes)
}

func (w *world) wantOwner(at int, id, account string, caller ownership.CallerDigest) {
	w.Helper()
	got := w.replicas[at].owners().ask("resp_unknown", id)
	want := ownership.Owner{Account: account, Caller: caller}
	if len(got) != 2 || got[0].TTL != 0 || got[1].Owner != want || got[1].TTL > minutes || got[1].TTL < minutes/2 {
		w.Errorf("replica %d found %+v of %s, want %+v", at, got, id, want)
	}
}

func TestWhatOneReplicaLearnsTheOthersCanAskFor(t *testing.T) {
	share(t, 3, func(w *world) {
		w.replicas[0].owners().tell("resp_1", "b", alice)
		w.replicas[0].owners().tell("resp_2", "a", 0)
		w.replicas[0].link.ownersOf("another pool").tell("resp_3", "a", 0)
		w.replicas[0].owners().tell("resp_4", "c", alice)
		synctest.Wait()
		for i := range w.replicas {
			w.wantOwner(i, "resp_1", "b", alice)
			w.wantOwner(i, "resp_2", "a", 0)
			w.wantOwner(i, "resp_4", Gone, alice)
			if got := w.replicas[i].owners().ask("resp_3"); len(got) != 1 || got[0].TTL != 0 {
				t.Errorf("replica %d found %+v of another pool", i, got)
			}
		}
		// who found it by asking, or in a list, does not take it from its
		// caller
		w.replicas[1].owners().tell("resp_1", "b", 0)
		w.replicas[1].owners().tell("resp_1", "a", bob)
		w.replicas[1].owners().tell("resp_2", "a", bob)
		synctest.Wait()
		w.wantOwner(2, "resp_1", "b", alice)
		w.wantOwner(2, "resp_2", "a", bob)
		time.Sleep(minutes)
		if got := w.replicas[2].owners().ask("resp_1"); got[0].TTL != 0 {
			t.Errorf("after its time, %+v is found", got)
		}
	})
}

// TestALookupWaitsAsLongAsTheStoreIsFarAway measures what lookups take by the
// comparisons, so that a store in another region is asked, and one that does
// not answer is not waited for any longer than before.
func TestALookupWaitsAsLongAsTheStoreIsFarAway(t *testing.T) {
	for _, tt := range []struct{ away, lookup, waits time.Duration }{
		{0, 49 * time.Millisecond, 50 * time.Millisecond},
		{10 * time.Millisecond, 49 * time.Millisecond, 50 * time.Millisecond},
		{80 * time.Millisecond, 200 * time.Millisecond, 240 * time.Millisecond},
		{400 * time.Millisecond, 900 * time.Millisecond, time.Second},
	} {
		share(t, 2, func(w *world) {
			w.hub.Delay(tt.away/2, tt.away)
			w.replicas[0].owners().tell("resp_1", "b", alice)
			time.Sleep(30 * time.Second)
			w.hub.SlowDown(tt.lookup)
			w.wantOwner(1, "resp_1", "b", alice)
			w.hub.SlowDown(time.Minute)
			began := time.Now()
			w.replicas[1].owners().ask("resp_1")
			if waited := time.Since(began); waited != tt.waits {
				t.Errorf("with a store %v away, a lookup waited for %v, want %v", tt.away, waited, tt.waits)
			}
		})
	}
}

func TestTheStoreLearnsNoNames(t *testing.T) {
	share(t, 1, func(w *world) {
		account := "contoso.openai.azure.com fingerprint"
		w.replicas[0].link.ownersOf("a pool", account).tell("resp_1", account, alice)
		synctest.Wait()
		for _, e := range w.hub.Entries() {
			for _, text := range [][]byte{[]byte(e.Key), e.Value} {
				key := ownership.KeyOf("resp_1")
				for _, secret := range []string{"pool", "contoso", "finger", "alice", "resp", string(key[:])} {
					if bytes.Contains(text, []byte(secret)) {
						t.Errorf("%q shows %q", text, secret)
					}
				}
			}
			if len(e.Key) != 22 || len(e.Value) != 16 || !e.Firm {
				t.Errorf("kept is %+v", e)
			}
		}
	})
}

func TestNobodyWaitsLongForAnOwner(t *testing.T) {
	share(t, 2, func(w *world) {
		w.replicas[0].owners().tell("resp_1", "a", 0)
		synctest.Wait()
		o := w.replicas[1].owners()
		took := func(want time.Duration, finds int) {
			t.Helper()
			before, began := w.hub.Finds(), time.Now()
			if got := o.ask("resp_1"); got != nil {
				t.Errorf("found %+v", got)
			}
			if took := time.Since(began); took != want || w.hub.Finds()-before != finds {
				t.Errorf("it took %v and asked %d times, want %v and %d", took, w.hub.Finds()-before, want, finds)
			}
		}
		w.hub.SlowDown(10 * time.Second)
		took(waiting, 1)
		took(0, 0) // after one was late, the others of its caller do not wait for the same
		time.Sleep(2 * time.Second)
		took(waiting, 1) // until a second has passed
		w.hub.SlowDown(waiting - 1)
		time.Sleep(2 * time.Second)
		w.wantOwner(1, "resp_1", "a", 0)
		w.hub.SlowDown(0)

		w.hub.Fail(errors.New("down"))
		if began := time.Now(); o.ask("resp_1") != nil || time.Since(began) != 0 {
			t.Error("it does not fail at once, whether or not that was noticed yet")
		}
		took(0, 0)
		time.Sleep(2 * time.Second)
		took(0, 1)
		w.hub.Fail(nil)
		time.Sleep(2 * time.Second)
		w.wantOwner(1, "resp_1", "a", 0)
	})
}

func TestALateLookupMakesNoOtherCallersSkipTheirs(t *testing.T) {
	share(t, 2, func(w *world) {
		w.replicas[0].owners().tell("resp_1", "a", alice)
		synctest.Wait()
		o := w.replicas[1].owners()
		w.hub.SlowDown(time.Minute)
		if _, err := o.askAs(bob, "resp_1"); !errors.Is(err, ownership.ErrNoAnswer) {
			t.Errorf("bob got %v", err)
		}
		w.hub.SlowDown(0)
		w.wantOwner(1, "resp_1", "a", alice) // whom alice asks for
		if _, err := o.askAs(bob, "resp_1"); !errors.Is(err, ownership.ErrNoAnswer) {
			t.Errorf("bob got %v", err)
		}
		time.Sleep(ownership.Skipping)
		if found, err := o.askAs(bob, "resp_1"); err != nil || found[0].Caller != alice {
			t.Errorf("bob got %v, %v", found, err)
		}
	})
}

// TestOnlyLookupsDecideWhetherOwnersAreLookedUp and neither messages nor
// writes.
func TestOnlyLookupsDecideWhetherOwnersAreLookedUp(t *testing.T) {
	for name, fault := range map[string]func(*statetest.Hub){
		"no message arrives": func(h *statetest.Hub) { h.LoseMessages(true) },
		"the store is full": func(h *statetest.Hub) {
			h.FailWrites(errors.New("OOM command not allowed when used memory > 'maxmemory'"))
		},
		"writes hang": func(h *statetest.Hub) { h.Delay(time.Minute, 0) },
	} {
		t.Run(name, func(t *testing.T) {
			share(t, 2, func(w *world) {
				w.replicas[0].owners().tell("resp_1", "a", alice)
				synctest.Wait()
				fault(w.hub)
				time.Sleep(time.Minute)
				w.wantOwner(1, "resp_1", "a", alice)
			})
		})
	}
}

// TestManyLookupsOfACallerAreLateForNoCaller where one after the other takes
// less time than all of them at once.
func TestManyLookupsOfACallerAreLateForNoCaller(t *testing.T) {
	share(t, 2, func(w *world) {
		w.replicas[0].owners().tell("resp_1", "a", alice)
		synctest.Wait()
		w.hub.Cost(10 * time.Microsecond)
		o := w.replicas[1].owners()
		ids := make([]string, 1000)
		for i := range ids {
			ids[i] = fmt.Sprint("resp_of_nobody_", i)
		}
		var all sync.WaitGroup
		for range 16 {
			all.Go(func() {
				if _, err := o.askAs(bob, ids...); err != nil {
					t.Errorf("bob's many ids: %v", err)
				}
			})
		}
		synctest.Wait()
		for _, c := range []ownership.CallerDigest{alice, bob} {
			all.Go(func() {
				if found, err := o.askAs(c, "resp_1"); err != nil || found[0].Caller != alice {
					t.Errorf("%v, %v", found, err)
				}
			})
		}
		all.Wait()
		if n := w.replicas[1].stored.lookups.Len(); n != 0 {
			t.Errorf("%d callers are remembered", n)
		}
	})
}

func TestALookupThatCannotBeMadeInTimeIsNoAnswer(t *testing.T) {
	share(t, 1, func(w *world) {
		w.hub.SlowDown(waiting - 1)
		var crowded atomic.Int32
		var all sync.WaitGroup
		for range 100 {
			all.Go(func() {
				switch _, err := w.replicas[0].owners().askAs(bob, "resp_1"); {
				case errors.Is(err, ownership.ErrCrowded):
					crowded.Add(1)
				case err != nil:
					t.Error(err)
				}
			})
		}
		all.Wait()
		if n := crowded.Load(); n != 100-2*21 {
			t.Errorf("%d have no turn in time", n)
		}
	})
}

func TestOnlyCallersWhoseLookupsWereLateAreRemembered(t *testing.T) {
	share(t, 1, func(w *world) {
		r := w.replicas[0]
		for i := range 5 * ownership.MaxIdle {
			if i%100 == 0 {
				w.hub.Fail(errors.New("down"))
			}
			_, _ = r.owners().askAs(ownership.CallerNamed(fmt.Sprint(i)), "resp_1")
			w.hub.Fail(nil)
			time.Sleep(time.Millisecond)
		}
		if n := r.stored.lookups.Len(); n > ownership.MaxIdle {
			t.Errorf("%d callers are remembered", n)
		}
	})
}

func TestAReplicaThatDoesNotRunYetAsksNobody(t *testing.T) {
	share(t, 0, func(w *world) {
		r := New(w.hub.Store(), nil)
		if got := r.NewLink().ownersOf("a pool").ask("resp_1"); got != nil || w.hub.Finds() != 0 {
			t.Errorf("found %+v", got)
		}
	})
}

func TestOwnersWaitUntilTheStoreIsBackAndTheOldestGoFirst(t *testing.T) {
	share(t, 1, func(w *world) {
		o := w.replicas[0].owners()
		w.hub.Fail(errors.New("down"))
		const told = 2 * maxOwned
		for i := range told {
			o.tell(fmt.Sprint("resp_", i), "a", 0)
			if i == 0 {
				time.Sleep(time.Second) // so that it is on its way
			}
		}
		if n := o.replica.stored.queue.len(); n != maxOwned {
			t.Errorf("%d wait, want %d", n, maxOwned)
		}
		time.Sleep(time.Minute)
		w.hub.Fail(nil)
		time.Sleep(2 * time.Second)
		for i, f := range o.ask("resp_0", "resp_1", fmt.Sprint("resp_", told-maxOwned-1), fmt.Sprint("resp_", told-maxOwned), fmt.Sprint("resp_", told-1)) {
			if known := f.TTL != 0; known != (i > 2) {
				t.Errorf("%d is known: %v", i, known)
			}
		}
		if n := len(w.hub.Entries()); n != maxOwned {
			t.Errorf("%d are kept, want %d", n, maxOwned)
		}
	})
}

func TestTheLastOwnersAreToldWhenAReplicaEnds(t *testing.T) {
	share(t, 2, func(w *world) {
		for i := range 3 * maxBatch {
			w.replicas[0].owners().tell(fmt.Sprint("resp_", i), "a", 0)
		}
		w.replicas[0].stop()
		if n := len(w.hub.Entries()); n != 3*maxBatch {
			t.Errorf("%d are kept, want %d", n, 3*maxBatch)
		}
	})
}

func TestAStoreThatKeepsNoOwnersIsLoggedOnce(t *testing.T) {
	share(t, 1, func(w *world) {
		r := w.replicas[0]
		w.hub.Refuse(errors.New("NOPERM"))
		r.owners().tell("resp_1", "a", 0)
		time.Sleep(minutes / 2)
		w.hub.Refuse(nil)
		time.Sleep(time.Second)
		r.owners().tell("resp_2", "a", 0)
		time.Sleep(time.Second)
		warned, told := r.logs.FilterMessage("could not share owners"), r.logs.FilterMessage("sharing owners again").Len()
		if warned.Len() != 1 || told != 1 || warned.All()[0].Level != zapcore.WarnLevel || warned.All()[0].ContextMap()["error"] != "NOPERM" {
			t.Errorf("logged %v", r.logs.All())
		}
		w.wantOwner(0, "resp_1", "a", 0)
	})
}

func TestAnOwnerThatIsNotKeptIsInNobodysWay(t *testing.T) {
	share(t, 1, func(w *world) {
		r := w.replicas[0]
		key := func(id string) string { return entryKey("a pool", ownership.KeyOf(id)) }
		var refused []string
		for i := range 2 * maxBatch { // more than go at a time
			refused = append(refused, key(fmt.Sprint("shard_", i)))
		}
		w.hub.Refuse(errors.New("a shard is down"), refused...)
		for i := range 2 * maxBatch {
			r.owners().tell(fmt.Sprint("shard_", i), "a", 0)
		}
		for i := range 3 * maxBatch {
			r.owners().tell(fmt.Sprint("resp_", i), "a", 0)
		}
		time.Sleep(3 * time.Second)
		if n := len(w.hub.Entries()); n != 3*maxBatch {
			t.Errorf("%d are kept, want %d", n, 3*maxBatch)
		}
		if n := r.stored.queue.len(); n > 2*maxBatch {
			t.Errorf("%d wait, want those that are refused", n)
		}
		time.Sleep(10 * time.Second)
		w.hub.Refuse(nil)
		time.Sleep(2 * time.Second)
		if n := len(w.hub.Entries()); n != 5*maxBatch {
			t.Errorf("%d are kept at last, want %d", n, 5*maxBatch)
		}
		warned, told := r.logs.FilterMessage("could not share owners"), r.logs.FilterMessage("sharing owners again").Len()
		if warned.Len() != 1 || told != 1 {
			t.Errorf("logged %v", r.logs.All())
		}
	})
}

func TestOwnersThatAreRefusedAreLoggedWheneverTheRestWorks(t *testing.T) {
	share(t, 1, func(w *world) {
		r := w.replicas[0]
		w.hub.Fail(errors.New("down"))
		r.owners().tell("resp_1", "a", 0)
		time.Sleep(loggedFrom * time.Second) // so that it fails this often before it is in touch again
		w.hub.Refuse(errors.New("NOPERM"))
		w.hub.Fail(nil)
		time.Sleep(minutes / 2)
		if warned := r.logs.FilterMessage("could not share owners"); warned.Len() != 1 || warned.All()[0].ContextMap()["error"] != "NOPERM" {
			t.Errorf("logged %v", r.logs.All())
		}
	})
}

func TestWhatNoReplicaWouldWriteIsUnknown(t *testing.T) {
	share(t, 1, func(w *world) {
		o := w.replicas[0].owners()
		for i, value := range []string{"", "short", "somewhat longer", "much longer than anything is that replicas write"} {
			id := fmt.Sprint("resp_", i)
			e := state.Entry{Key: entryKey("a pool", ownership.KeyOf(id)), Value: []byte(value), TTL: time.Hour}
			if _, err := w.hub.Store().Keep(context.Background(), []state.Entry{e}); err != nil {
				t.Fatal(err)
			}
			if got := o.ask(id); len(got) != 1 || got[0].TTL != 0 {
				t.Errorf("found %+v in %q", got, value)
			}
		}
	})
}
