package pool

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

var unreachable = Refusal{Reason: Reason{Class: "unreachable"}, Whole: true, Lost: true}

// dues counts when an attempt to reach a member was due.
type dues struct{ times []time.Time }

func (d *dues) Happened(e Event) {
	if e.Happening == Due {
		d.times = append(d.times, time.Now())
	}
}

func TestABackendThatIsReachedIsNotLostWhateverHappensAtTheSameTime(t *testing.T) {
	for range 2000 {
		m := NewMember("a", new(Health))
		p := New([]*Member{m})
		m.Bench(unreachable, time.Now())
		var wg sync.WaitGroup
		wg.Go(func() { m.Bench(unreachable, time.Now()) })
		wg.Go(m.Reached)
		wg.Wait()
		if b := m.health.whole.failure.Load(); (b != nil && b.Lost) != m.Lost() {
			t.Fatalf("the bench is %+v, and lost is %t", b, m.Lost())
		}
		p.Close()
	}
}

// TestALostBackendOutlivesAReload has the pool of the config before bench it, and
// then close.
func TestALostBackendOutlivesAReload(t *testing.T) {
	for name, closes := range map[string]func(before *Pool, bench func()){
		"benched before it closes":              func(p *Pool, bench func()) { bench(); p.Close() },
		"benched by a request that outlives it": func(p *Pool, bench func()) { p.Close(); bench() },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				health, due := new(Health), new(dues)
				before, after := NewMember("a", health), NewMember("a", health)
				p := New([]*Member{before})
				next := New([]*Member{after}, due)
				defer next.Close()
				closes(p, func() { before.Bench(unreachable, time.Now()) })
				time.Sleep(firstPause)
				synctest.Wait()
				if len(due.times) != 1 {
					t.Errorf("%d attempts to reach it are due, want 1", len(due.times))
				}
				after.Reached()
				time.Sleep(time.Hour)
				synctest.Wait()
				if len(due.times) != 1 || after.Lost() || !after.unbenched("") {
					t.Errorf("after it was reached: %d attempts, lost %t", len(due.times), after.Lost())
				}
			})
		})
	}
}

func TestAnAttemptIsDueBesideALongerBench(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		due := new(dues)
		m := NewMember("a", new(Health))
		p := New([]*Member{m}, due)
		defer p.Close()
		m.Bench(Refusal{Reason: Reason{Class: "credential"}, Whole: true, Wait: time.Minute}, time.Now())
		m.Bench(unreachable, time.Now())
		time.Sleep(firstPause)
		synctest.Wait()
		if len(due.times) != 1 {
			t.Errorf("%d attempts to reach it are due, want 1", len(due.times))
		}
		if s := p.Snapshot(time.Now())[0]; len(s.Benches) != 1 {
			t.Errorf("during the attempt, its benches are %+v", s.Benches)
		}
	})
}

func TestAnotherKeyMakesABackendNotLost(t *testing.T) {
	m := NewMember("a", new(Health))
	p := New([]*Member{m})
	defer p.Close()
	m.StartFresh("one")
	m.Bench(unreachable, time.Now())
	if m.StartFresh("two"); m.Lost() {
		t.Error("it is lost without a bench")
	}
}
