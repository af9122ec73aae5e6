package replicas

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
	"github.com/openai-lb/caddy-openai-lb/state"
	"github.com/openai-lb/caddy-openai-lb/state/statetest"
)

// world is some replicas with the same backends, in virtual time.
type world struct {
	*testing.T
	hub      *statetest.Hub
	replicas []*testReplica
}

type testReplica struct {
	*Replica
	link    *Link
	members map[string]*pool.Member
	pool    *pool.Pool
	logs    *observer.ObservedLogs
	stop    func()
}

// share runs a test with n replicas that are in touch.
func share(t *testing.T, n int, test func(*world)) {
	t.Helper()
	bubble.Test(t, func(t *testing.T) {
		w := &world{T: t, hub: statetest.NewHub()}
		for range n {
			w.start()
		}
		time.Sleep(2 * time.Second)
		test(w)
	})
}

// models are those of the config.
var models = []string{"m", "other"}

// start adds a replica with the backend a and its spare b.
func (w *world) start() *testReplica { return w.startWith(w.hub.Store()) }

func (w *world) startWith(store state.Store) *testReplica {
	core, logs := observer.New(zapcore.DebugLevel)
	r := &testReplica{Replica: New(store, zap.New(core)), members: make(map[string]*pool.Member), logs: logs}
	var members []*pool.Member
	r.link = r.NewLink()
	for i, name := range []string{"a", "b"} {
		m := pool.NewMember(name, new(pool.Health))
		m.Priority, m.Models = i+1, models
		r.members[name] = m
		r.link.Name(m, "https://"+name+" key")
		members = append(members, m)
	}
	r.pool = pool.New(members, r.link)
	r.link.Open(r.pool)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		r.Run(ctx)
		close(done)
	}()
	stopped := false
	r.stop = func() {
		if !stopped {
			stopped = true
			cancel()
			<-done
			r.link.Close()
			r.pool.Close()
		}
	}
	w.Cleanup(r.stop)
	w.replicas = append(w.replicas, r)
	return r
}

func throttle(wait time.Duration) pool.Refusal {
	return pool.Refusal{Reason: pool.Reason{Class: string(verdict.Throttled), Status: 429, Hint: "retry-after"}, Throttle: true, Model: "m", Cost: 100, Wait: wait}
}

// wantCooldown checks how long the cooldown of a backend still lasts at every
// replica.
func (w *world) wantCooldown(backend string, want time.Duration) {
	w.Helper()
	for i, r := range w.replicas {
		if got := r.cooldownLeft(backend); got < want || got > want+10*time.Millisecond {
			w.Errorf("at replica %d, the cooldown of %s lasts for %v, want %v", i, backend, got, want)
		}
	}
}

// cooldownLeft returns how long the cooldown of a backend still lasts, or 0.
func (r *testReplica) cooldownLeft(backend string) (left time.Duration) {
	now := time.Now()
	for _, s := range r.pool.Snapshot(now) {
		for _, b := range s.Cooldowns {
			if s.Member.Name == backend {
				left = max(left, b.Until.Sub(now))
			}
		}
	}
	return left
}

func (w *world) at(i int, backend string) *pool.Member { return w.replicas[i].members[backend] }

func TestACooldownHoldsAtAllReplicasAtOnce(t *testing.T) {
	share(t, 3, func(w *world) {
		w.at(0, "a").CoolDown(throttle(10*time.Second), time.Now())
		synctest.Wait()
		w.wantCooldown("a", 10*time.Second)
		w.wantCooldown("b", 0)
		time.Sleep(2 * time.Second)
		w.at(2, "a").CoolDown(throttle(20*time.Second), time.Now())
		synctest.Wait()
		w.wantCooldown("a", 20*time.Second)
		w.at(1, "a").CoolDown(throttle(time.Second), time.Now())
		synctest.Wait()
		w.wantCooldown("a", 20*time.Second)
		time.Sleep(20 * time.Second)
		w.wantCooldown("a", 0)
	})
}

func TestAReplicaThatStartsKnowsWhatTheOthersKnow(t *testing.T) {
	share(t, 2, func(w *world) {
		w.at(0, "a").CoolDown(throttle(30*time.Second), time.Now())
		w.at(0, "b").Drain(pool.Order{})
		time.Sleep(5 * time.Second)
		w.start()
		synctest.Wait()
		w.wantCooldown("a", 25*time.Second)
		if !w.at(2, "b").Drained() {
			t.Error("the drain does not hold at the new replica")
		}
	})
}

func TestACooldownOfServiceTiersIsTheSameAtAllReplicas(t *testing.T) {
	share(t, 3, func(w *world) {
		all := []pool.ServiceTiers{pool.UsualTiers, pool.Flex, pool.Ultrafast, pool.UnknownTiers}
		for i, tiers := range all {
			r := throttle(time.Duration(i+1) * 10 * time.Second)
			r.Tiers = tiers
			w.at(0, "a").CoolDown(r, time.Now())
		}
		time.Sleep(5 * time.Second)
		w.start() // which reads what the store keeps
		synctest.Wait()
		for i, r := range w.replicas {
			left := make(map[pool.ServiceTiers]time.Duration)
			for _, b := range r.pool.Snapshot(time.Now())[0].Cooldowns {
				left[b.Tiers] = time.Until(b.Until).Round(time.Second)
			}
			want := map[pool.ServiceTiers]time.Duration{
				pool.UsualTiers: 5 * time.Second, pool.Flex: 15 * time.Second, pool.Ultrafast: 25 * time.Second, pool.UnknownTiers: 35 * time.Second,
			}
			if !maps.Equal(left, want) {
				t.Errorf("at replica %d, the cooldowns last for %v, want %v", i, left, want)
			}
		}
	})
}

func TestACooldownOfAnOperationIsTheSameAtAllReplicas(t *testing.T) {
	share(t, 3, func(w *world) {
		all := map[string]time.Duration{"": 10 * time.Second, "/embeddings": 20 * time.Second, "/images/generations": 30 * time.Second}
		for operation, length := range all {
			w.at(0, "a").CoolDown(pool.Refusal{
				Reason: pool.Reason{Class: string(verdict.NotPermitted), Status: 403}, Model: "m", Operation: operation, Wait: length,
			}, time.Now())
		}
		time.Sleep(5 * time.Second)
		w.start() // which reads what the store keeps
		synctest.Wait()
		cooldowns := func(i int) map[string]time.Duration {
			left := make(map[string]time.Duration)
			for _, b := range w.replicas[i].pool.Snapshot(time.Now())[0].Cooldowns {
				left[b.Operation] = time.Until(b.Until).Round(time.Second) + 5*time.Second
			}
			return left
		}
		for i := range w.replicas {
			if left := cooldowns(i); !maps.Equal(left, all) {
				t.Errorf("at replica %d, the cooldowns last for %v, want %v", i, left, all)
			}
		}
		w.at(1, "a").Served(pool.Scope{Model: "m", Operation: "/embeddings"}, time.Now())
		synctest.Wait()
		for i := range w.replicas {
			if left := cooldowns(i); len(left) != 1 || left["/images/generations"] == 0 {
				t.Errorf("at replica %d, the cooldowns are %v after embeddings were served", i, left)
			}
		}
	})
}

func TestACooldownThatIsDisprovedIsOverForAll(t *testing.T) {
	share(t, 3, func(w *world) {
		began := time.Now()
		w.at(0, "a").CoolDown(throttle(30*time.Second), began)
		time.Sleep(5 * time.Second)
		w.at(1, "a").Served(pool.Scope{Model: "m"}, began.Add(time.Second))
		synctest.Wait()
		w.wantCooldown("a", 0)
		for range 5 { // nor does it begin again by what the store keeps
			time.Sleep(time.Second)
			w.wantCooldown("a", 0)
		}
		w.at(2, "a").CoolDown(throttle(7*time.Second), time.Now())
		synctest.Wait()
		w.wantCooldown("a", 7*time.Second)
	})
}

func TestACooldownForAnOldKeyDoesNotComeBack(t *testing.T) {
	share(t, 2, func(w *world) {
		a := w.at(0, "a")
		a.StartFresh("old key")
		a.CoolDown(throttle(time.Minute), time.Now())
		synctest.Wait()
		a.StartFresh("new key")
		time.Sleep(10 * time.Second)
		if left := w.replicas[0].cooldownLeft("a"); left > 0 {
			t.Errorf("where the key is new, the cooldown of a lasts for %v", left)
		}
		if left := w.replicas[1].cooldownLeft("a"); left < 49*time.Second {
			t.Errorf("where the key is the old one, the cooldown of a lasts for %v", left)
		}
	})
}

func TestADoubtIsHeard(t *testing.T) {
	for name, lose := range map[string]func(w *world, doubt func()){
		"at once": func(_ *world, doubt func()) { doubt() },
		"after it was lost": func(w *world, doubt func()) {
			w.hub.Fail(errors.New("down"))
			doubt()
			synctest.Wait()
			w.hub.Fail(nil)
			time.Sleep(2 * time.Second)
		},
		"after the store lost it": func(w *world, doubt func()) {
			w.hub.LoseMessages(true)
			doubt()
			synctest.Wait()
			w.hub.Flush()
			w.hub.LoseMessages(false)
			time.Sleep(2 * time.Second)
		},
	} {
		t.Run(name, func(t *testing.T) { testDoubtIsHeard(t, lose) })
	}
}

func testDoubtIsHeard(t *testing.T, lose func(w *world, doubt func())) {
	share(t, 2, func(w *world) {
		began := time.Now()
		w.at(0, "a").CoolDown(throttle(30*time.Second), began)
		synctest.Wait()
		lose(w, func() { w.at(0, "a").Doubt(false, pool.Scope{Model: "m"}, began) })
		synctest.Wait()
		for i, r := range w.replicas {
			if m := r.pool.Pick(asks{cost: 100, only: "a"}.of(r.pool), time.Now()); m != nil {
				t.Errorf("replica %d sends a large request to a", i)
			}
		}
		if m := w.replicas[1].pool.Pick(asks{cost: 10, only: "a"}.of(w.replicas[1].pool), time.Now()); m == nil {
			t.Error("a small request may not check the cooldown that is in doubt")
		}
	})
}

// asks is a request of some cost, which one member can serve, or any.
type asks struct {
	cost int64
	// only is the member that it may go to. Empty: any.
	only string
	// model is m if it is empty.
	model string
}

// of is what it asks of a pool.
func (a asks) of(p *pool.Pool) *pool.Ask {
	ask := &pool.Ask{Cost: a.cost}
	for _, m := range p.Members {
		ask.At = append(ask.At, pool.At{Model: cmp.Or(a.model, "m"), Takes: a.only == "" || m.Name == a.only})
	}
	return ask
}

func TestADrainHoldsForAllUntilItsEnd(t *testing.T) {
	share(t, 3, func(w *world) {
		want := func(drained bool) {
			t.Helper()
			for i := range w.replicas {
				if w.at(i, "a").Drained() != drained || w.at(i, "b").Drained() {
					t.Errorf("at replica %d, a is drained: %v, want %v", i, !drained, drained)
				}
			}
		}
		w.at(0, "a").Drain(pool.Order{})
		synctest.Wait()
		want(true)
		time.Sleep(time.Minute)
		want(true)
		w.hub.Flush()
		time.Sleep(2 * time.Second)
		want(true)
		w.hub.Fail(errors.New("down"))
		w.at(1, "a").Resume(pool.Order{}) // while the store is down
		time.Sleep(time.Minute)
		w.hub.Fail(nil)
		time.Sleep(2 * time.Second)
		want(false)
		time.Sleep(time.Minute)
		want(false)
	})
}

// A comparison may read what is kept before an order arrives at the store, and
// take it in after that.
func TestWhatTheStoreKeptBeforeDoesNotOverruleADrain(t *testing.T) {
	share(t, 2, func(w *world) {
		const delay = 200 * time.Millisecond
		w.hub.Delay(delay, 300*time.Millisecond)
		for i := range 50 {
			time.Sleep(time.Duration(i) * 50 * time.Millisecond) // at any moment of a comparison
			drain, by := i%2 == 0, i%3%2
			if drain {
				w.at(by, "a").Drain(pool.Order{})
			} else {
				w.at(by, "a").Resume(pool.Order{})
			}
			for began := time.Now(); time.Since(began) < 2*time.Second; time.Sleep(10 * time.Millisecond) {
				synctest.Wait()
				for n := range w.replicas {
					if knows := n == by || time.Since(began) >= delay; knows && w.at(n, "a").Drained() != drain {
						w.Fatalf("order %d is overruled at replica %d after %v", i, n, time.Since(began))
					}
				}
			}
		}
	})
}

func TestReplicasThatAreRefusedAtOnceSendOneProbe(t *testing.T) {
	share(t, 5, func(w *world) {
		const delay = 5 * time.Millisecond
		w.hub.Delay(delay, delay)
		for i := range w.replicas {
			w.at(i, "a").CoolDown(throttle(time.Second+time.Duration(i%2)*time.Millisecond), time.Now())
		}
		time.Sleep(time.Second + 3*delay)
		var probes []*testReplica
		for _, r := range w.replicas {
			if m := r.pool.Pick(asks{cost: 1}.of(r.pool), time.Now()); m != nil && m.Name == "a" {
				probes = append(probes, r)
			}
		}
		if len(probes) != 1 {
			w.Fatalf("%d replicas send the probe, want 1", len(probes))
		}
		time.Sleep(time.Millisecond)
		probes[0].members["a"].Served(pool.Scope{Model: "m"}, time.Now())
		time.Sleep(2 * delay)
		if n := w.picks("a"); n != 5 {
			t.Errorf("after it was served, %d replicas call a, want 5", n)
		}
	})
}

func TestOneReplicaSendsTheProbe(t *testing.T) {
	share(t, 5, func(w *world) {
		longer := throttle(time.Minute)
		longer.Model = "other"
		w.at(0, "a").CoolDown(longer, time.Now())
		time.Sleep(time.Second)
		w.at(0, "a").CoolDown(throttle(20*time.Second), time.Now())
		time.Sleep(20 * time.Second)
		if n := w.picks("a"); n != 1 {
			t.Errorf("%d replicas send the probe, want 1", n)
		}
		time.Sleep(500 * time.Millisecond)
		if n := w.picks("a"); n != 0 {
			t.Errorf("%d replicas do not wait for what becomes of the probe", n)
		}
		time.Sleep(500 * time.Millisecond) // it was not refused
		if n := w.picks("a"); n != 5 {
			t.Errorf("after that, %d replicas call a, want 5", n)
		}
	})
}

func TestReplicasTryAGuessInTurn(t *testing.T) {
	share(t, 3, func(w *world) {
		refuse := func(i int) {
			guess := throttle(10 * time.Second)
			guess.Guess = true
			w.at(i, "a").CoolDown(guess, time.Now())
			synctest.Wait()
		}
		refuse(0)
		tries := 0
		for range 100 { // for 5 s
			time.Sleep(50 * time.Millisecond)
			for i, r := range w.replicas {
				if r.pool.Pick(asks{only: "a"}.of(r.pool), time.Now()) != nil {
					tries++
					refuse(i)
				}
			}
		}
		if tries != 10 {
			t.Errorf("three replicas tried it %d times, want once in each twentieth of the guess", tries)
		}
	})
}

func TestWithoutTheStoreEachReplicaSendsAProbe(t *testing.T) {
	share(t, 5, func(w *world) {
		w.at(0, "a").CoolDown(throttle(20*time.Second), time.Now())
		time.Sleep(10 * time.Second)
		w.hub.Fail(errors.New("down"))
		time.Sleep(10 * time.Second)
		if n := w.picks("a"); n != 5 {
			t.Errorf("%d replicas send a probe, want 5", n)
		}
	})
}

func TestACooldownOfAModelThatIsNoUTF8IsShared(t *testing.T) {
	share(t, 2, func(w *world) {
		odd := throttle(time.Minute)
		for name, model := range map[string]string{"a": strings.Repeat("é", 200) + "\xff", "b": "\xff"} {
			odd.Model = model
			w.at(0, name).Served(pool.Scope{Model: model}, time.Now())
			w.at(0, name).CoolDown(odd, time.Now())
		}
		time.Sleep(3 * time.Second)
		for _, name := range []string{"a", "b"} {
			if w.replicas[1].cooldownLeft(name) == 0 {
				t.Errorf("the cooldown of %s is not shared", name)
			}
		}
	})
}

// picks is how many replicas choose the member for a request.
func (w *world) picks(name string) (n int) {
	for _, r := range w.replicas {
		if m := r.pool.Pick(asks{cost: 1}.of(r.pool), time.Now()); m != nil && m.Name == name {
			n++
		}
	}
	return n
}

func TestNobodyIsToldWhatConcernsOneReplica(t *testing.T) {
	share(t, 2, func(w *world) {
		w.at(0, "a").CoolDown(pool.Refusal{Reason: pool.Reason{Class: string(verdict.Credential), Status: 401}, Whole: true, Wait: time.Minute}, time.Now())
		w.at(0, "a").CoolDown(pool.Refusal{Reason: pool.Reason{Class: string(verdict.Unreachable), Cause: "dns"}, Whole: true, Unreachable: true, Wait: time.Minute}, time.Now())
		time.Sleep(3 * time.Second)
		if got := w.replicas[1].cooldownLeft("a"); got != 0 {
			t.Errorf("another replica has a cooldown of %v", got)
		}
	})
}

func TestReplicasAreCounted(t *testing.T) {
	share(t, 3, func(w *world) {
		for i, r := range w.replicas {
			if peers := r.peers.list(time.Now()); len(peers) != 3 || time.Since(peers[0].Heard) > 2*time.Second {
				t.Errorf("replica %d knows of %v, want 3", i, peers)
			}
		}
		w.replicas[0].stop()
		time.Sleep(12 * time.Second)
		if peers := w.replicas[1].peers.list(time.Now()); len(peers) != 2 {
			t.Errorf("after one has left, %d are known, want 2", len(peers))
		}
		if s := (Module{}).Statuses(); len(s) != 2 || !s[0].InTouch || s[0].Queue != 0 {
			t.Errorf("the status is %+v", s)
		}
	})
}

// TestACooldownThatTurnedAndEndedDoesNotComeBack has a cooldown that gets a
// reason which concerns one replica.
func TestACooldownThatTurnedAndEndedDoesNotComeBack(t *testing.T) {
	share(t, 2, func(w *world) {
		a := w.at(0, "a")
		coolDown := func(class verdict.Class, wait time.Duration) {
			a.CoolDown(pool.Refusal{Reason: pool.Reason{Class: string(class), Status: 403}, Whole: true, Wait: wait}, time.Now())
			time.Sleep(time.Second)
		}
		coolDown(verdict.NotPermitted, time.Minute)
		coolDown(verdict.Credential, 30*time.Second)
		a.Reset(pool.Order{})
		for range 5 {
			time.Sleep(time.Second)
			if left := w.replicas[0].cooldownLeft("a"); left > 0 {
				t.Fatalf("the cooldown lasts for %v", left)
			}
		}
	})
}
