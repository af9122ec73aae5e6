package pool

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// prompts are the sessions of the 256 prompts that a member used latest, which
// it has cached.
type prompts []int

// takeIn takes in the next prompt of a session. It begins with the one before,
// if that is cached.
func (p *prompts) takeIn(session int) (cached bool) {
	for i := len(*p) - 1; i >= 0 && !cached; i-- {
		if cached = (*p)[i] == session; cached {
			*p = append(slices.Delete(*p, i, i+1), session) // it is the latest again
		}
	}
	if *p = append(*p, session); len(*p) > 256 {
		*p = (*p)[len(*p)-256:]
	}
	return cached
}

// conversations are 300 sessions of ten turns at three members, which take up
// to a second for a turn.
type conversations struct {
	cached    int // turns whose prompt began in the cache
	mostTurns int // of a member
}

// talk lets as many be in flight at a time. The next turn is that of one of so
// many sessions that waited longest.
func (c *conversations) talk(t *testing.T, seed uint64, inFlight, oneOf int, keyed bool) {
	type flight struct {
		session int
		at      *Member
		ends    time.Time
	}
	p, members := withKeys(t, "a", "b", "c")
	random := rand.New(rand.NewPCG(seed, 1))
	Random = random.Float64
	keys, turns, waiting := make([]uint64, 300), make([]int, 300), make([]int, 300)
	for i := range keys {
		keys[i], waiting[i] = random.Uint64(), i
	}
	caches, served := make(map[*Member]*prompts), make(map[*Member]int)
	for _, m := range members {
		caches[m] = new(prompts)
	}
	now := start
	var flying []flight
	for len(waiting)+len(flying) > 0 {
		if len(waiting) > 0 && len(flying) < inFlight {
			next := random.IntN(min(oneOf, len(waiting)))
			session := waiting[next]
			waiting = slices.Delete(waiting, next, next+1)
			r := &asks{model: "m"}
			if keyed {
				r.affinity.Key = keys[session]
			}
			m := p.Pick(r, now)
			if served[m]++; caches[m].takeIn(session) {
				c.cached++
			}
			flying = append(flying, flight{session, m, now.Add(time.Duration(random.Int64N(int64(time.Second))))})
			continue
		}
		over := slices.MinFunc(flying, func(a, b flight) int { return a.ends.Compare(b.ends) })
		flying = slices.DeleteFunc(flying, func(f flight) bool { return f.session == over.session })
		now = over.ends
		over.at.Release()
		if turns[over.session]++; turns[over.session] < 10 {
			waiting = append(waiting, over.session)
		}
	}
	for _, n := range served {
		c.mostTurns = max(c.mostTurns, n)
	}
}

// TestSessionsFindTheirPromptsCached with few and with many of them in flight.
// One in ten turns is the first of its session, which no cache knows.
func TestSessionsFindTheirPromptsCached(t *testing.T) {
	const all = 3000
	for _, inFlight := range []int{1, 3, 8, 12, 20, 30, 36, 60, 100} {
		for _, oneOf := range []int{1, 60} {
			name := fmt.Sprintf("%d in flight, one of %d", inFlight, oneOf)
			var usual conversations
			usual.talk(t, 1, inFlight, oneOf, false)
			if rate := float64(usual.cached) / all; rate > 0.5 {
				t.Errorf("%s: the usual choice has a hit rate of %.3f: the test shows nothing", name, rate)
			}
			lowest, most := 1., 0.
			for seed := range uint64(3) {
				var kept conversations
				kept.talk(t, seed, inFlight, oneOf, true)
				lowest, most = min(lowest, float64(kept.cached)/all), max(most, float64(kept.mostTurns)/(all/3))
			}
			t.Logf("%s: the hit rate is %.3f or more, where the usual choice has %.3f; a member gets %.2f times its share at most",
				name, lowest, float64(usual.cached)/all, most)
			if lowest < 0.85 || most > 1.3 {
				t.Errorf("%s: the hit rate is %.3f, want 0.85, and a member has %.2f times its share, want 1.3", name, lowest, most)
			}
		}
	}
}

// weighted are sessions at a member with nine times the weight of the other
// one, which throttles now and then. A member caches a prompt for five minutes
// after its last use. A turn adds as much to the prompt of its session as the
// first one had.
type weighted struct {
	sessions       int
	period, takes  time.Duration // of a turn, and of the request for it
	throttle, each time.Duration

	turns, hits    int     // hits are turns of which all that came before is cached
	tokens, cached int     // in turns
	share          float64 // of the turns in the last ten of thirty minutes, at the lighter member
	moves          int
}

func (w *weighted) talk(t *testing.T, seed uint64) {
	p, members := withKeys(t, "a:1:9", "b:1:1")
	random := rand.New(rand.NewPCG(seed, 1))
	Random = random.Float64
	type cache struct {
		turns int
		used  time.Time
	}
	type session struct {
		key    uint64
		turns  int
		next   time.Time
		at     *Member // during a turn
		caches map[*Member]cache
	}
	sessions := make([]*session, w.sessions)
	for i := range sessions {
		sessions[i] = &session{key: random.Uint64(), next: start.Add(time.Duration(random.Int64N(int64(w.period)))), caches: make(map[*Member]cache)}
	}
	throttles := start.Add(5 * time.Minute)
	late, lateThere := 0, 0
	for {
		s := slices.MinFunc(sessions, func(a, b *session) int { return a.next.Compare(b.next) })
		now := s.next
		if now.After(start.Add(30 * time.Minute)) {
			break
		}
		if s.at != nil { // its turn is over
			s.at.Release()
			s.at = nil
			s.next = now.Add(w.period/2 + time.Duration(random.Int64N(int64(w.period))) - w.takes)
			continue
		}
		if w.throttle > 0 && !now.Before(throttles) {
			members["a"].CoolDown(throttle(w.throttle.Seconds(), 1), now)
			throttles = now.Add(w.each)
		}
		r := &asks{model: "m", cost: 1, affinity: Affinity{Key: s.key}}
		m := p.Pick(r, now)
		c := s.caches[m]
		if now.Sub(c.used) > 5*time.Minute {
			c.turns = 0
		}
		if w.turns++; s.turns > 0 && c.turns == s.turns {
			w.hits++
		}
		w.cached += c.turns
		s.turns++
		w.tokens += s.turns
		s.caches[m] = cache{s.turns, now}
		if r.affinity.Result == Move {
			w.moves++
		}
		if now.After(start.Add(20 * time.Minute)) {
			if late++; m == members["b"] {
				lateThere++
			}
		}
		s.at, s.next = m, now.Add(w.takes)
	}
	w.share = float64(lateThere) / float64(late)
}

// TestAThrottleDoesNotOverturnTheWeights has b, of a tenth of the weights, keep
// about the sessions that live there, and prompts stay cached.
func TestAThrottleDoesNotOverturnTheWeights(t *testing.T) {
	short := weighted{sessions: 20, period: time.Second, takes: 10 * time.Millisecond}
	long := weighted{sessions: 60, period: 10 * time.Second, takes: time.Second}
	for _, c := range []struct {
		name           string
		sessions       weighted
		throttle, each time.Duration
		share          float64 // of b at most
	}{
		{"short, never", short, 0, 0, 0.16},
		{"short, two seconds", short, 2 * time.Second, time.Hour, 0.2},
		{"short, two seconds of ten", short, 2 * time.Second, 10 * time.Second, 0.4},
		{"long, never", long, 0, 0, 0.16},
		{"long, ten seconds", long, 10 * time.Second, time.Hour, 0.2},
		{"long, ten seconds of sixty", long, 10 * time.Second, time.Minute, 0.4},
	} {
		w := c.sessions
		w.throttle, w.each = c.throttle, c.each
		w.talk(t, 1)
		cached := float64(w.cached) / float64(w.tokens)
		t.Logf("%s: b has %.3f of the turns, %d of %d moved, %.3f of the tokens were cached, all before %.3f of the turns",
			c.name, w.share, w.moves, w.turns, cached, float64(w.hits)/float64(w.turns))
		if w.share > c.share || cached < 0.97 {
			t.Errorf("%s: b has %.3f of the turns, want %.2f at most, and %.3f of the tokens were cached, want 0.97", c.name, w.share, c.share, cached)
		}
	}
}
