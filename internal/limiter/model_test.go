package limiter

import (
	"math/big"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// model is a caller's use in the simplest form: a sum for each limit and part
// of a window.
type model struct {
	limits []ratelimit.Limit
	sums   map[ratelimit.ID]map[int64]int64
	// last is when a part was last charged, as at counts it.
	last map[ratelimit.ID]map[int64]int64
	// debt returns the debt of a limit, which has a test of its own.
	debt func(id ratelimit.ID, now time.Time) int64
}

func (m *model) add(id ratelimit.ID, part, amount int64) {
	if m.sums[id] == nil {
		m.sums[id], m.last[id] = make(map[int64]int64), make(map[int64]int64)
	}
	m.sums[id][part] += amount
}

func (m *model) charge(id ratelimit.ID, part, amount, passed int64) {
	m.add(id, part, amount)
	m.last[id][part] = max(m.last[id][part], passed)
}

// at returns the part of a time, 24 a window, and how much of it has passed, in
// 24ths of a nanosecond. It is found without the code that is tested. Those of
// the calendar have one part, and no length.
func (m *model) at(id ratelimit.ID, now time.Time) (part, passed, length int64) {
	switch id.Unit() {
	case ratelimit.Day:
		return now.Unix() / 86400 * 24, 0, 0
	case ratelimit.Month:
		return (int64(now.Year())*12 + int64(now.Month()) - 1) * 24, 0, 0
	}
	length = int64(map[ratelimit.Unit]time.Duration{ratelimit.Second: time.Second, ratelimit.Minute: time.Minute, ratelimit.Hour: time.Hour}[id.Unit()])
	rest := now.UnixNano() % length * 24
	return now.UnixNano()/length*24 + rest/length, rest % length, length
}

func (m *model) used(id ratelimit.ID, now time.Time) int64 {
	used, debt := m.spent(id, now), m.debt(id, now)
	if id.Unit() >= ratelimit.Day {
		return used + debt
	}
	return max(used, min(used, m.amount(id))+debt)
}

func (m *model) spent(id ratelimit.ID, now time.Time) int64 {
	part, passed, length := m.at(id, now)
	if length == 0 {
		return m.sums[id][part]
	}
	oldest := m.sums[id][part-24]
	used, last := int64(0), m.last[id][part-24]
	if passed < last {
		left := new(big.Int).Mul(big.NewInt(oldest), big.NewInt(last-passed))
		left.Add(left, big.NewInt(last-1))
		used = max(left.Div(left, big.NewInt(last)).Int64(), oldest-m.amount(id)/24)
	}
	for i := part - 23; i <= part; i++ {
		used += m.sums[id][i]
	}
	return used
}

// amount returns the amount of a limit: of two of a kind and unit, the last one
// counts.
func (m *model) amount(id ratelimit.ID) (amount int64) {
	for _, l := range m.limits {
		if l.ID() == id {
			amount = l.Amount
		}
	}
	return amount
}

func (m *model) admits(tokens int64, now time.Time) bool {
	for _, l := range m.limits {
		need := int64(1)
		if l.Kind == ratelimit.Tokens {
			need = tokens
		}
		if need > l.Amount && l.Kind == ratelimit.Tokens || m.used(l.ID(), now)+min(need, l.Amount) > l.Amount {
			return false
		}
	}
	return true
}

// each calls f with what a request charges: each limit, and the tokens of the
// day and the month.
func (m *model) each(f func(id ratelimit.ID)) {
	done := make(map[ratelimit.ID]bool)
	for _, id := range counted {
		f(id)
		done[id] = true
	}
	for _, l := range m.limits {
		if !done[l.ID()] {
			f(l.ID())
		}
	}
}

// FuzzAdmitAndSettle compares a caller with the model, in any order of
// requests. At the end nothing is reserved, and the settled use is exactly the
// sum of what the requests have cost.
func FuzzAdmitAndSettle(f *testing.F) {
	for seed := range uint64(40) {
		f.Add(seed, int64(1+seed*37%500), int64(1+seed*91%3000), uint8(seed))
	}
	f.Fuzz(func(t *testing.T, seed uint64, rate, most int64, units uint8) {
		random := rand.New(rand.NewPCG(seed, 1))
		rate, most = 1+max(0, rate)%1_000_000, 1+max(0, most)%1_000_000
		m := &model{sums: make(map[ratelimit.ID]map[int64]int64), last: make(map[ratelimit.ID]map[int64]int64), limits: []ratelimit.Limit{
			{Kind: ratelimit.Tokens, Amount: rate, Unit: ratelimit.Unit(ratelimit.Units % 5)},
			{Kind: ratelimit.Requests, Amount: 1 + rate/10, Unit: ratelimit.Unit(ratelimit.Units / 5 % 5)},
			{Kind: ratelimit.Tokens, Amount: rate * 7, Unit: ratelimit.Unit((ratelimit.Units%5 + 1 + ratelimit.Units/25%4) % 5)},
		}}
		c := callerWith(nil)
		c.Change(noon, Settings{Limits: m.limits})
		m.debt = func(id ratelimit.ID, now time.Time) int64 {
			of := &c.counters[id]
			if of.calendar() {
				return of.debt.due
			}
			return of.owed(now.UnixNano())
		}
		type request struct {
			Reservation
			from   time.Time
			tokens int64
		}
		var open []request
		now, total, lost := noon, int64(0), int64(0)
		settle := func(i int) {
			r := open[i]
			open[i] = open[len(open)-1]
			open = open[:len(open)-1]
			cost := ratelimit.Cost{Requests: random.Int64N(2), Prompt: random.Int64N(2 * most)}
			if random.IntN(3) == 0 {
				cost.Prompt = r.tokens
			}
			r.Settle(now, cost)
			r.Settle(now, cost)
			total += cost.Prompt
			m.each(func(id ratelimit.ID) {
				delta := cost.Prompt - r.tokens
				if id.Kind() == ratelimit.Requests {
					delta = cost.Requests - 1
				}
				part, passed, _ := m.at(id, now)
				from, _, _ := m.at(id, r.from)
				switch {
				case delta > 0:
					m.charge(id, part, delta, passed)
				case from/24 >= part/24-1:
					m.add(id, from, delta)
				case id == counted[1]:
					lost -= delta // that window is not kept
				}
			})
		}
		for range 400 {
			switch random.IntN(8) {
			case 0, 1, 2, 3:
				tokens := 1 + random.Int64N(most)
				r, refusal := c.admit(now, exactly(tokens))
				if want := m.admits(tokens, now); want != (refusal == nil) {
					t.Fatalf("%d tokens at %s: want %t, got %+v", tokens, now, want, refusal)
				}
				if refusal == nil {
					open = append(open, request{r, now, tokens})
					m.each(func(id ratelimit.ID) {
						part, passed, _ := m.at(id, now)
						if id.Kind() == ratelimit.Requests {
							m.charge(id, part, 1, passed)
						} else {
							m.charge(id, part, tokens, passed)
						}
					})
				} else if refusal.Reason == ratelimit.OverRate && random.IntN(4) == 0 { // it is let in exactly then, as far as this limit counts
					id := refusal.Limit.ID()
					if m.debt(id, now) > 0 {
						continue // it may be let in earlier
					}
					if m.admitsBy(refusal, id, now.Add(refusal.Wait-1)) || !m.admitsBy(refusal, id, now.Add(refusal.Wait)) {
						t.Fatalf("%d tokens at %s: the wait is wrong: %+v", tokens, now, refusal)
					}
				}
			case 4, 5, 6:
				if len(open) > 0 {
					settle(random.IntN(len(open)))
				}
			case 7:
				now = now.Add(time.Duration(random.Int64N(int64([]time.Duration{time.Millisecond, time.Second, time.Minute, time.Hour, 26 * time.Hour}[random.IntN(5)]))))
			}
			s := c.Snapshot(now)
			addUp(t, c)
			reserved := int64(0)
			for _, r := range open {
				reserved += r.tokens
			}
			if s.Reserved != reserved || s.InFlight != len(open) {
				t.Fatalf("%d tokens of %d requests are reserved, want %d of %d", s.Reserved, s.InFlight, reserved, len(open))
			}
			for _, u := range s.Limits {
				if want := m.used(u.Limit.ID(), now); u.Used != want {
					t.Fatalf("%s at %s: %d are used, want %d", u.Limit.ID(), now, u.Used, want)
				}
			}
		}
		for len(open) > 0 {
			settle(len(open) - 1)
		}
		sum := int64(0)
		for _, month := range m.sums[counted[1]] {
			sum += month
		}
		if s := c.Snapshot(now); s.Reserved != 0 || s.InFlight != 0 || sum != total+lost || s.Month != m.used(counted[1], now) {
			t.Fatalf("at the end %+v, of %d tokens", s, total)
		}
	})
}

// admitsBy reports whether the limit of a refusal would admit the request at a
// time.
func (m *model) admitsBy(r *ratelimit.Refusal, id ratelimit.ID, now time.Time) bool {
	return m.used(id, now)+min(r.Requested, r.Allowed) <= r.Allowed
}

// addUp checks that the parts of all windows add up to what is used in these.
func addUp(t *testing.T, c *Limiter) {
	t.Helper()
	for id := range ratelimit.ID(ratelimit.MaxLimits) {
		m := &c.counters[id]
		if slides := m.limit.Amount > 0 && !m.calendar(); slides != (m.local.parts != nil) || slides && m.others.parts == nil {
			t.Fatalf("%s: parts of the limit %s", id, m.limit)
		}
		for _, s := range []sums{m.local, m.others} {
			for w, used := range s.used {
				sum := used
				if s.parts != nil {
					for _, part := range s.parts[w] {
						if sum -= part; part < 0 {
							t.Fatalf("%s: a part is negative: %+v", id, s.parts)
						}
					}
				}
				if s.parts != nil && sum != 0 || used < 0 {
					t.Fatalf("%s: the parts of %d are %v", id, used, s.parts[w])
				}
			}
		}
	}
}

// Whatever happens, the parts add up, and no use is negative: with clocks that
// are set, other replicas, reloads and what is restored.
func TestPartsAlwaysAddUp(t *testing.T) {
	for seed := range uint64(100) {
		random := rand.New(rand.NewPCG(seed, 3))
		settings := []Settings{{Limits: limits(t, "tokens 1k/minute", "requests 10/second", "tokens 10k/hour", "tokens 1M/day")},
			{Limits: limits(t, "tokens 2k/minute", "tokens 1M/month")}, {}}
		c, now := caller(t), noon
		var open []Reservation
		for version := range uint64(500) {
			switch random.IntN(8) {
			case 0:
				c.Change(now, settings[random.IntN(len(settings))])
			case 1, 2:
				if r, refusal := c.admit(now, exactly(1+random.Int64N(300))); refusal == nil {
					open = append(open, r)
				}
			case 3:
				if len(open) > 0 {
					i := random.IntN(len(open))
					open[i].Settle(now, spent(random.Int64N(400)))
				}
			case 4:
				id := ratelimit.ID(random.IntN(ratelimit.MaxLimits))
				used := random.Int64N([]int64{3, 1000, 1 << 62}[random.IntN(3)])
				w := windowAt(id.Unit(), now.UnixNano(), time.UTC).index - 1
				c.Heard(now, string(rune('a'+random.IntN(3))), version, []Entry{{id, w + random.Int64N(3), used, 0}})
			case 5:
				saved := c.save(now, "own")
				if random.IntN(4) == 0 {
					c = caller(t)
					for writer, figures := range saved {
						c.restore(now, writer, figures)
					}
				}
			default:
				step := []time.Duration{10 * time.Millisecond, time.Second, time.Minute, time.Hour}[random.IntN(4)]
				now = now.Add(time.Duration(random.Int64N(int64(3*step))) - step)
			}
			s := c.Snapshot(now)
			addUp(t, c)
			for _, u := range s.Limits {
				if u.Used < 0 || (u.Reset > 0) != (u.Used > 0) {
					t.Fatalf("%s: %+v", u.Limit, u)
				}
			}
		}
	}
}

// From idle, at any phase of the clock, with bursts and pauses of any length,
// at one replica or several: in no window is more admitted than the limit and a
// twenty-fourth of it. A wait ends exactly when the request is admitted.
func TestInNoWindowIsMoreThan25TwentyFourthsOfALimitAdmitted(t *testing.T) {
	most := 0.0
	for seed := range uint64(300) {
		random := rand.New(rand.NewPCG(seed, 4))
		unit := ratelimit.Unit(seed % 3)
		length := unit.Length()
		limit := 1 + random.Int64N([]int64{10, 100, 10_000}[random.IntN(3)])
		replicas := make([]*Limiter, 1+random.IntN(3))
		for i := range replicas {
			replicas[i] = callerWith(nil)
			replicas[i].Change(noon, Settings{Limits: []ratelimit.Limit{{Kind: ratelimit.Tokens, Amount: limit, Unit: unit}}})
		}
		now := noon.Add(time.Duration(random.Int64N(int64(length))))
		type charge struct {
			at     time.Time
			tokens int64
		}
		var admitted []charge
		try := func(tokens int64) *ratelimit.Refusal {
			c := replicas[random.IntN(len(replicas))]
			r, refusal := c.admit(now, exactly(tokens))
			if refusal != nil {
				return refusal
			}
			if len(replicas) == 1 { // the others do not hear where an excess came from
				tokens -= random.Int64N(tokens) * random.Int64N(2)
			}
			r.Settle(now, spent(tokens))
			tell(now, uint64(len(admitted)+1), replicas...)
			admitted = append(admitted, charge{now, tokens})
			return nil
		}
		for range 300 {
			tokens := 1 + random.Int64N(1+limit/[]int64{1, 5, 50}[random.IntN(3)])
			switch random.IntN(8) {
			case 0:
				now = now.Add(time.Duration(random.Int64N(int64(length))))
			case 1:
				now = now.Add(time.Duration(random.Int64N(int64(length / 24))))
			case 2: // the end of a part
				now = now.Truncate(length / 24).Add(length/24 - time.Nanosecond)
			}
			refusal := try(min(tokens, limit))
			if refusal == nil || refusal.Wait == 0 {
				continue
			}
			if now = now.Add(refusal.Wait - time.Nanosecond); try(refusal.Requested) == nil {
				t.Fatalf("seed %d: %d are admitted before %s", seed, refusal.Requested, refusal.Wait)
			}
			if now = now.Add(time.Nanosecond); try(refusal.Requested) != nil {
				t.Fatalf("seed %d: %d are not admitted after %s", seed, refusal.Requested, refusal.Wait)
			}
		}
		first, sum := 0, int64(0)
		for _, c := range admitted {
			for sum += c.tokens; !admitted[first].at.After(c.at.Add(-length)); first++ {
				sum -= admitted[first].tokens
			}
			if sum > limit+limit/24 {
				t.Fatalf("seed %d: %d are admitted within a %s, of a limit of %d", seed, sum, unit, limit)
			}
			most = max(most, float64(sum)/float64(limit))
		}
	}
	t.Logf("at most %.1f %%", 100*most)
}
