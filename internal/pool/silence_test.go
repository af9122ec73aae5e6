package pool

import (
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/latency"
)

// streamed and whole are kinds of requests.
var streamed, whole = latency.KindOf(true, 0, 0), latency.KindOf(false, 0, 0)

// ask sends a request to the member.
func ask(m *Member, r *asks, sent time.Time) *Wait {
	w := new(Wait)
	w.Begin(r.of(m.pool), m, Moves{})
	w.Sent(sent)
	return w
}

// serve has the member serve requests that wait for so long, from now on.
func serve(m *Member, r *asks, n int, now time.Time, wait time.Duration) {
	m.Served(Scope{Model: r.model}, now)
	for range n {
		w := ask(m, r, now)
		w.Heard(now.Add(wait))
		w.Served()
	}
}

// silent makes the member silent for a model from now on.
func silent(t *testing.T, m *Member, model string, now time.Time) *Wait {
	t.Helper()
	r := &asks{model: model, kind: streamed}
	serve(m, r, 20, now.Add(-10*time.Second), time.Second)
	first := ask(m, r, now.Add(-5*time.Second))
	ask(m, r, now.Add(-5*time.Second)).Late(now)
	if first.Late(now); m.silence(r.of(m.pool)) == nil {
		t.Fatal("no silence")
	}
	return first
}

func TestASilentMemberIsASuspectForWhatItIsAskedInVain(t *testing.T) {
	p, members, _ := poolOf(t, "a:1:1", "b:2:1")
	p.Watches = true
	its := silent(t, members["a"], "m", at(0))
	pick := func(want string, r *asks, now time.Time) {
		t.Helper()
		m := p.Pick(r, now)
		if m == nil || m.Name != want {
			t.Errorf("at %s, %+v goes to %v, want %s", now.Sub(start), r, m, want)
		}
		if m != nil {
			m.Release()
		}
	}
	streams := asks{model: "m", kind: streamed}
	pick("b", &streams, at(0.1))
	pick("b", &asks{model: "m", kind: whole}, at(0.1)) // it is as silent
	pick("a", &asks{model: "m"}, at(0.1))
	pick("a", &asks{model: "n", kind: streamed}, at(0.1))
	pick("b", &asks{model: "m", kind: streamed, once: true}, at(1.1)) // no trial
	pick("a", &streams, at(1.1))                                      // the trial
	pick("b", &streams, at(1.2))
	pick("a", &asks{model: "m", kind: streamed, tried: []*Member{members["b"]}}, at(1.2)) // no other is left
	p.Watches = false
	pick("a", &streams, at(1.2))
	p.Watches = true
	its.Heard(at(1.3))
	pick("a", &streams, at(1.3)) // it is slow, and tried again
	pick("b", &streams, at(1.3))
	serve(members["a"], &asks{model: "m", kind: whole}, 1, at(1.3), 0) // a reply to any request in time
	pick("a", &streams, at(1.3))
}

func TestANewIdentityHasNoSilence(t *testing.T) {
	p, members, _ := poolOf(t, "a:1:1", "b:2:1")
	p.Watches = true
	members["a"].StartFresh("one")
	silent(t, members["a"], "m", at(0))
	members["a"].StartFresh("two")
	if m := p.Pick(&asks{model: "m", kind: streamed}, at(0.1)); m != members["a"] {
		t.Errorf("the request goes to %s", m.Name)
	}
}

func TestARequestMovesOnlyWhereItMayGo(t *testing.T) {
	p, members, _ := poolOf(t, "a:1:1", "drained:1:1", "throttled:1:1", "full:1:1", "suspect:1:1", "late:2:1", "b:3:1")
	p.Watches = true
	silent(t, members["a"], "m", at(0))
	members["drained"].Drain(Order{})
	members["throttled"].CoolDown(throttle(60, 1), at(0))
	members["full"].MaxRequests = 1
	p.Pick(&asks{model: "m", tried: []*Member{members["a"], members["suspect"], members["late"], members["b"]}}, at(0)) // takes its place
	members["suspect"].CoolDown(Refusal{Reason: Reason{Class: "failed"}, Model: "m", Wait: time.Minute}, at(0))
	serve(members["late"], &asks{model: "m", kind: streamed}, 20, at(-1), time.Second)
	ask(members["late"], &asks{model: "m", kind: streamed}, at(-20)).Heard(at(0))
	r := asks{model: "m", kind: streamed, tried: []*Member{members["a"]}}
	for _, want := range []string{"b", "drained", ""} {
		moving, got := p.PickAnswering(r.of(p.Pool), time.Second, at(0.1)), ""
		if moving != nil {
			got = moving.To.Name
			moving.To.Release()
			r.tried = append(r.tried, moving.To)
		}
		if got != want {
			t.Errorf("the request moves to %q, want %q", got, want)
		}
	}
}

func TestARequestMovesWhereTheLimitsHaveRoom(t *testing.T) {
	p, members, _ := poolOf(t, "a:1:1", "spent:2:1", "b:2:1", "far:3:1")
	p.Watches, p.Steers = true, true
	silent(t, members["a"], "m", start)
	says(members["spent"], 5, 99, start)
	for _, name := range []string{"spent", "b", "far"} {
		serve(members[name], &asks{model: "m", kind: streamed}, 1, at(0), 0)
	}
	r := asks{model: "m", cost: 100, kind: streamed, tried: []*Member{members["a"]}}
	for _, want := range []string{"b", "spent", "far"} { // never the worse priority
		for range 20 {
			moving := p.PickAnswering(r.of(p.Pool), time.Second, at(0.1))
			if moving == nil || moving.To.Name != want {
				t.Fatalf("the request moves to %v, want %s", moving, want)
			}
			moving.To.Release()
		}
		r.tried = append(r.tried, members[want])
	}
}

func TestUntilAMemberIsKnownWhatIsUsualAtTheOthersApplies(t *testing.T) {
	p, members, _ := poolOf(t, "a:1:1", "b:1:1")
	p.Watches = true
	small, large := &asks{model: "m", kind: streamed}, &asks{model: "m", kind: latency.KindOf(true, 1<<20, 0)}
	if w := ask(members["a"], small, at(0)); w.tracker != nil || w.Late(at(1)) != time.Second {
		t.Error("there is a tracker of a model that was never served")
	}
	usual := func(r *asks, want time.Duration) {
		t.Helper()
		w := ask(members["a"], r, at(10))
		if got := w.waits.Threshold; got != want {
			t.Errorf("the threshold at a is %s, want %s", got, want)
		}
		w.Unsent()
	}
	serve(members["b"], small, 5, at(0), time.Second)
	usual(small, 8*time.Second)  // which five replies show
	usual(large, 40*time.Second) // of which nothing is known
	serve(members["b"], small, 5, at(0), time.Second)
	usual(small, 4*time.Second)
	serve(members["a"], small, 10, at(0), 2*time.Second) // its own wait counts once it is known
	usual(small, 8*time.Second)
	serve(members["b"], large, 10, at(0), 20*time.Second)
	usual(large, 80*time.Second)
	usual(&asks{model: "n", kind: streamed}, 0)
}

// TestARequestThatWaitsForAModelThatIsNotKnownMoves begins to wait before any
// member has served the model.
func TestARequestThatWaitsForAModelThatIsNotKnownMoves(t *testing.T) {
	p, members, heard := poolOf(t, "a:1:1", "b:1:1")
	p.Watches = true
	r := &asks{model: "m", kind: streamed}
	first, second := ask(members["a"], r, at(0)), ask(members["a"], r, at(0))
	serve(members["b"], r, 10, at(0), 100*time.Millisecond)
	first.moves.May, second.moves.May = true, true
	second.Late(at(1))
	if again := first.Late(at(1)); again != 0 {
		t.Errorf("it looks again after %s: %v", again, *heard)
	}
	if again := second.Late(at(1)); again == 0 {
		t.Error("another one follows before the first got its byte")
	}
	first.Left(at(1))
	if to := first.Moved(); to == nil || to.To != members["b"] {
		t.Errorf("it moves to %v", to)
	}
	first.Begin(r.of(p.Pool), members["b"], Moves{})
	first.Sent(at(1))
	first.Heard(at(1.4))
	if again := second.Late(at(1.4)); again != 0 {
		t.Error("another one does not follow")
	}
}

// TestARequestLooksAtAllMembersOnceInAMoment is what keeps the cost of many
// attempts from growing with their square.
func TestARequestLooksAtAllMembersOnceInAMoment(t *testing.T) {
	p, members, _ := poolOf(t, "a:1:1", "b:1:1", "c:1:1")
	p.Watches = true
	its := &asks{model: "m", kind: streamed}
	serve(members["c"], its, 5, at(0), time.Second)
	r := its.of(p.Pool)
	attempt := func(m *Member, now time.Time, want time.Duration) {
		t.Helper()
		var w Wait
		w.Begin(r, m, Moves{})
		if w.Sent(now); w.waits.Threshold != want {
			t.Errorf("the threshold at %s is %s, want %s", m.Name, w.waits.Threshold, want)
		}
	}
	attempt(members["a"], at(1), 8*time.Second)
	serve(members["c"], its, 5, at(1), time.Second)
	attempt(members["b"], at(1.05), 8*time.Second) // as a moment ago
	attempt(members["b"], at(1.2), 4*time.Second)
}
