package pool

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// prompts are the sessions of the 256 prompts that a member used latest, which it has cached.
type prompts []int

// takeIn takes in the next prompt of a session. It begins with the one before, if that is cached.
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

// conversations are 300 sessions of ten turns at three members, which take up to
// a second for a turn.
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
