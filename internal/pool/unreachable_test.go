package pool

import (
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
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
		m.CoolDown(cannotReach, time.Now())
		var wg sync.WaitGroup
		wg.Go(func() { m.CoolDown(cannotReach, time.Now()) })
		wg.Go(m.Reached)
		wg.Wait()
		if cooldowns := p.Snapshot(time.Now())[0].Cooldowns; (len(cooldowns) > 0) != m.Unreachable() {
			t.Fatalf("the cooldowns are %+v, and lost is %t", cooldowns, m.Unreachable())
		}
		p.Close()
	}
}

// TestALostBackendOutlivesAReload has the pool of the previous config start the
// cooldown, and then close.
func TestALostBackendOutlivesAReload(t *testing.T) {
	for name, closes := range map[string]func(before *Pool, coolDown func()){
		"the cooldown starts before it closes":           func(p *Pool, coolDown func()) { coolDown(); p.Close() },
		"a request that outlives it starts the cooldown": func(p *Pool, coolDown func()) { p.Close(); coolDown() },
	} {
		t.Run(name, func(t *testing.T) {
			bubble.Test(t, func(t *testing.T) {
				health, due := new(Health), new(dues)
				before, after := NewMember("a", health), NewMember("a", health)
				p := New([]*Member{before})
				next := New([]*Member{after}, due)
				defer next.Close()
				closes(p, func() { before.CoolDown(cannotReach, time.Now()) })
				time.Sleep(firstPause)
				synctest.Wait()
				if len(due.times) != 1 {
					t.Errorf("%d attempts to reach it are due, want 1", len(due.times))
				}
				after.Reached()
				time.Sleep(time.Hour)
				synctest.Wait()
				if len(due.times) != 1 || after.Unreachable() || len(slices.Collect(after.health.cooldowns())) > 0 {
					t.Errorf("after it was reached: %d attempts, unreachable %t", len(due.times), after.Unreachable())
				}
			})
		})
	}
}

func TestAnAttemptIsDueBesideALongerCooldown(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		due := new(dues)
		m := NewMember("a", new(Health))
		p := New([]*Member{m}, due)
		defer p.Close()
		m.CoolDown(Refusal{Reason: Reason{Class: "credential"}, Whole: true, Wait: time.Minute}, time.Now())
		m.CoolDown(cannotReach, time.Now())
		time.Sleep(firstPause)
		synctest.Wait()
		if len(due.times) != 1 {
			t.Errorf("%d attempts to reach it are due, want 1", len(due.times))
		}
		if s := p.Snapshot(time.Now())[0]; len(s.Cooldowns) != 2 {
			t.Errorf("during the attempt, its cooldowns are %+v", s.Cooldowns)
		}
	})
}

func TestAnotherKeyMakesABackendNotLost(t *testing.T) {
	m := NewMember("a", new(Health))
	p := New([]*Member{m})
	defer p.Close()
	m.StartFresh("one")
	m.CoolDown(cannotReach, time.Now())
	if m.StartFresh("two"); m.Unreachable() {
		t.Error("it is unreachable without a cooldown")
	}
}

func TestABackendThatIsReachedKeepsItsOtherCooldown(t *testing.T) {
	credential := Refusal{Reason: Reason{Class: "credential"}, Whole: true, Wait: time.Minute}
	for name, happens := range map[string]func(m *Member, now time.Time){
		"before it was unreachable": func(m *Member, now time.Time) {
			m.CoolDown(credential, now)
			m.CoolDown(cannotReach, now)
		},
		"after it was unreachable": func(m *Member, now time.Time) {
			m.CoolDown(cannotReach, now)
			m.CoolDown(credential, now)
		},
	} {
		t.Run(name, func(t *testing.T) {
			m, now := NewMember("a", new(Health)), time.Now()
			p := New([]*Member{m})
			defer p.Close()
			happens(m, now)
			m.Reached()
			s := p.Snapshot(now)[0]
			if m.Unreachable() || len(s.Cooldowns) != 1 || s.Cooldowns[0].Class != "credential" || !s.Cooldowns[0].Until.Equal(now.Add(time.Minute)) {
				t.Errorf("unreachable %t, and its cooldowns are %+v", m.Unreachable(), s.Cooldowns)
			}
			if usable, wait := p.Usable(now); usable || wait != time.Minute {
				t.Errorf("usable %t, in %s", usable, wait)
			}
		})
	}
}

// TestABackendStaysLostWhateverOthersDisprove has another replica tell of a
// cooldown of the whole backend, and of its end.
func TestABackendStaysLostWhateverOthersDisprove(t *testing.T) {
	m, now := NewMember("a", new(Health)), time.Now()
	p := New([]*Member{m})
	defer p.Close()
	m.CoolDown(cannotReach, now)
	heard := Cooldown{Reason: Reason{Class: "not_permitted"}, ID: 1, Whole: true, Since: now, Until: now.Add(time.Minute)}
	m.Hear(heard, time.Minute, now)
	m.HearDisproved(heard)
	if s := p.Snapshot(now)[0]; !m.Unreachable() || len(s.Cooldowns) != 1 || s.Cooldowns[0].Class != "unreachable" {
		t.Errorf("unreachable %t, and its cooldowns are %+v", m.Unreachable(), s.Cooldowns)
	}
}

// TestARecheckThatIsToldLateDoesNotBegin has a recheck end between the moment
// when the next one seems due and its start.
func TestARecheckThatIsToldLateDoesNotBegin(t *testing.T) {
	m, now := NewMember("a", new(Health)), time.Now()
	p := New([]*Member{m})
	defer p.Close()
	m.CoolDown(cannotReach, now)
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

// turns records the causes for which cooldowns started or turned.
type turns struct{ causes []string }

func (l *turns) Happened(e Event) {
	if e.Happening == Began || e.Happening == Turned {
		l.causes = append(l.causes, e.Cooldown.Cause)
	}
}

// TestAnotherCauseOfABackendThatCannotBeReachedIsReportedOnce has a backend
// whose host is gone after its port was, and two addresses of which each
// request gets another one.
func TestAnotherCauseOfABackendThatCannotBeReachedIsReportedOnce(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		m, seen := NewMember("a", new(Health)), new(turns)
		p := New([]*Member{m}, seen)
		defer p.Close()
		for _, cause := range []string{"refused", "refused", "dns", "refused", "dns", "certificate"} {
			r := cannotReach
			r.Cause = cause
			m.CoolDown(r, time.Now())
			if cause == "certificate" {
				if shown := p.Snapshot(time.Now())[0].Cooldowns[0].Cause; shown != cause {
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
