package pool

import (
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

var cannotReach = Refusal{Reason: Reason{Class: "unreachable"}, Whole: true, Unreachable: true}

// dues counts when a recheck of a member was due.
type dues struct{ times []time.Time }

func (d *dues) Happened(e Event) {
	if e.Happening == RecheckDue {
		d.times = append(d.times, time.Now())
	}
}

func TestABackendThatIsReachedIsNotLostWhateverHappensAtTheSameTime(t *testing.T) {
	for range 2000 {
		m := NewMember("a", new(Health))
		p := New([]*Member{m})
		m.Bench(cannotReach, time.Now())
		var wg sync.WaitGroup
		wg.Go(func() { m.Bench(cannotReach, time.Now()) })
		wg.Go(m.Reached)
		wg.Wait()
		if benches := p.Snapshot(time.Now())[0].Benches; (len(benches) > 0) != m.Unreachable() {
			t.Fatalf("the benches are %+v, and lost is %t", benches, m.Unreachable())
		}
		p.Close()
	}
}

// TestALostBackendOutlivesAReload has the pool of the config before bench it,
// and then close.
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
				closes(p, func() { before.Bench(cannotReach, time.Now()) })
				time.Sleep(firstPause)
				synctest.Wait()
				if len(due.times) != 1 {
					t.Errorf("%d attempts to reach it are due, want 1", len(due.times))
				}
				after.Reached()
				time.Sleep(time.Hour)
				synctest.Wait()
				if len(due.times) != 1 || after.Unreachable() || len(slices.Collect(after.health.benches())) > 0 {
					t.Errorf("after it was reached: %d attempts, unreachable %t", len(due.times), after.Unreachable())
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
		m.Bench(cannotReach, time.Now())
		time.Sleep(firstPause)
		synctest.Wait()
		if len(due.times) != 1 {
			t.Errorf("%d attempts to reach it are due, want 1", len(due.times))
		}
		if s := p.Snapshot(time.Now())[0]; len(s.Benches) != 2 {
			t.Errorf("during the attempt, its benches are %+v", s.Benches)
		}
	})
}

func TestAnotherKeyMakesABackendNotLost(t *testing.T) {
	m := NewMember("a", new(Health))
	p := New([]*Member{m})
	defer p.Close()
	m.StartFresh("one")
	m.Bench(cannotReach, time.Now())
	if m.StartFresh("two"); m.Unreachable() {
		t.Error("it is unreachable without a bench")
	}
}

func TestABackendThatIsReachedKeepsItsOtherBench(t *testing.T) {
	credential := Refusal{Reason: Reason{Class: "credential"}, Whole: true, Wait: time.Minute}
	for name, happens := range map[string]func(m *Member, now time.Time){
		"before it was unreachable": func(m *Member, now time.Time) {
			m.Bench(credential, now)
			m.Bench(cannotReach, now)
		},
		"after it was unreachable": func(m *Member, now time.Time) {
			m.Bench(cannotReach, now)
			m.Bench(credential, now)
		},
	} {
		t.Run(name, func(t *testing.T) {
			m, now := NewMember("a", new(Health)), time.Now()
			p := New([]*Member{m})
			defer p.Close()
			happens(m, now)
			m.Reached()
			s := p.Snapshot(now)[0]
			if m.Unreachable() || len(s.Benches) != 1 || s.Benches[0].Class != "credential" || !s.Benches[0].Until.Equal(now.Add(time.Minute)) {
				t.Errorf("unreachable %t, and its benches are %+v", m.Unreachable(), s.Benches)
			}
			if usable, wait := p.Usable(now); usable || wait != time.Minute {
				t.Errorf("usable %t, in %s", usable, wait)
			}
		})
	}
}

// TestABackendStaysLostWhateverOthersDisprove has another replica tell of a
// bench of the whole backend, and of its end.
func TestABackendStaysLostWhateverOthersDisprove(t *testing.T) {
	m, now := NewMember("a", new(Health)), time.Now()
	p := New([]*Member{m})
	defer p.Close()
	m.Bench(cannotReach, now)
	heard := Bench{Reason: Reason{Class: "not_permitted"}, ID: 1, Whole: true, Since: now, Until: now.Add(time.Minute)}
	m.Hear(heard, time.Minute, now)
	m.HearDisproved(heard)
	if s := p.Snapshot(now)[0]; !m.Unreachable() || len(s.Benches) != 1 || s.Benches[0].Class != "unreachable" {
		t.Errorf("unreachable %t, and its benches are %+v", m.Unreachable(), s.Benches)
	}
}

// TestARecheckThatIsToldLateDoesNotBegin has a recheck end between the moment
// when the next one seems due and its start.
func TestARecheckThatIsToldLateDoesNotBegin(t *testing.T) {
	m, now := NewMember("a", new(Health)), time.Now()
	p := New([]*Member{m})
	defer p.Close()
	m.Bench(cannotReach, now)
	if m.StartRecheck(now) {
		t.Error("a recheck begins before it is due")
	}
	now = now.Add(firstPause)
	if !m.StartRecheck(now) || m.StartRecheck(now) {
		t.Error("not one recheck begins when it is due")
	}
	m.StillUnreachable(cannotReach, now)
	m.EndRecheck()
	if m.StartRecheck(now) {
		t.Error("a recheck begins when one has just ended")
	}
	if !m.StartRecheck(now.Add(2 * firstPause)) {
		t.Error("no recheck begins after the next pause")
	}
	m.EndRecheck()
	if m.Reached(); m.StartRecheck(now.Add(time.Hour)) {
		t.Error("a backend that is reached is rechecked")
	}
}

// turns records the causes for which benches began or turned.
type turns struct{ causes []string }

func (l *turns) Happened(e Event) {
	if e.Happening == Began || e.Happening == Turned {
		l.causes = append(l.causes, e.Bench.Cause)
	}
}

// TestAnotherCauseOfABackendThatCannotBeReachedIsReportedOnce has a backend
// whose host is gone after its port was, and two addresses of which each
// request gets another one.
func TestAnotherCauseOfABackendThatCannotBeReachedIsReportedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, seen := NewMember("a", new(Health)), new(turns)
		p := New([]*Member{m}, seen)
		defer p.Close()
		for _, cause := range []string{"refused", "refused", "dns", "refused", "dns", "certificate"} {
			r := cannotReach
			r.Cause = cause
			m.Bench(r, time.Now())
			if cause == "certificate" {
				if shown := p.Snapshot(time.Now())[0].Benches[0].Cause; shown != cause {
					t.Errorf("the cause is %s, want %s", shown, cause)
				}
			}
			time.Sleep(time.Second)
			synctest.Wait()
		}
		if want := []string{"refused", "dns", "certificate"}; !slices.Equal(seen.causes, want) {
			t.Errorf("the causes %q were reported, want %q", seen.causes, want)
		}
	})
}
