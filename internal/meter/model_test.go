package meter

import (
	"math/big"
	"math/rand/v2"
	"testing"
	"time"
)

// model is a caller's use in the simplest form: a sum for each limit and window.
type model struct {
	limits []Limit
	sums   map[ID]map[int64]int64
}

func (m *model) add(id ID, window, amount int64) {
	if m.sums[id] == nil {
		m.sums[id] = make(map[int64]int64)
	}
	m.sums[id][window] += amount
}

// at returns the window of a time, which is found without the code that is tested.
func (m *model) at(id ID, now time.Time) (index int64, passed, length time.Duration) {
	switch id.Unit() {
	case Day:
		return now.Unix() / 86400, 0, 0
	case Month:
		return int64(now.Year())*12 + int64(now.Month()) - 1, 0, 0
	}
	length = map[Unit]time.Duration{Second: time.Second, Minute: time.Minute, Hour: time.Hour}[id.Unit()]
	return now.UnixNano() / int64(length), time.Duration(now.UnixNano() % int64(length)), length
}

func (m *model) used(id ID, now time.Time) int64 {
	index, passed, length := m.at(id, now)
	if length == 0 {
		return m.sums[id][index]
	}
	left := new(big.Int).Mul(big.NewInt(m.sums[id][index-1]), big.NewInt(int64(length-passed)))
	left.Add(left, big.NewInt(int64(length-1)))
	return left.Div(left, big.NewInt(int64(length))).Int64() + m.sums[id][index]
}

func (m *model) admits(tokens int64, now time.Time) bool {
	for _, l := range m.limits {
		need := int64(1)
		if l.Kind == Tokens {
			need = tokens
		}
		if need > l.Amount && l.Kind == Tokens || m.used(l.ID(), now)+min(need, l.Amount) > l.Amount {
			return false
		}
	}
	return true
}

// each calls f with what a request charges: each limit, and the tokens of the day and the month.
func (m *model) each(f func(id ID)) {
	done := make(map[ID]bool)
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

// FuzzAdmitAndSettle compares a caller with the model, in any order of requests. At the end nothing is
// reserved, and the settled use is exactly the sum of what the requests have cost.
func FuzzAdmitAndSettle(f *testing.F) {
	for seed := range uint64(40) {
		f.Add(seed, int64(1+seed*37%500), int64(1+seed*91%3000), uint8(seed))
	}
	f.Fuzz(func(t *testing.T, seed uint64, rate, most int64, units uint8) {
		random := rand.New(rand.NewPCG(seed, 1))
		rate, most = 1+max(0, rate)%1_000_000, 1+max(0, most)%1_000_000
		m := &model{sums: make(map[ID]map[int64]int64), limits: []Limit{
			{Kind: Tokens, Amount: rate, Unit: Unit(units % 5)},
			{Kind: Requests, Amount: 1 + rate/10, Unit: Unit(units / 5 % 5)},
			{Kind: Tokens, Amount: rate * 7, Unit: Unit((units%5 + 1 + units/25%4) % 5)},
		}}
		c := NewCaller("alice", nil)
		c.Change(noon, Settings{Limits: m.limits})
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
			cost := Cost{Requests: random.Int64N(2), Prompt: random.Int64N(2 * most)}
			if random.IntN(3) == 0 {
				cost.Prompt = r.tokens
			}
			r.Settle(now, cost)
			r.Settle(now, cost)
			total += cost.Prompt
			m.each(func(id ID) {
				delta := cost.Prompt - r.tokens
				if id.Kind() == Requests {
					delta = cost.Requests - 1
				}
				window, _, _ := m.at(id, now)
				from, _, _ := m.at(id, r.from)
				switch {
				case delta > 0:
					m.add(id, window, delta)
				case from >= window-1:
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
				r, refusal := c.Admit(now, exactly(tokens))
				if want := m.admits(tokens, now); want != (refusal == nil) {
					t.Fatalf("%d tokens at %s: want %t, got %+v", tokens, now, want, refusal)
				}
				if refusal == nil {
					open = append(open, request{r, now, tokens})
					m.each(func(id ID) {
						window, _, _ := m.at(id, now)
						if id.Kind() == Requests {
							m.add(id, window, 1)
						} else {
							m.add(id, window, tokens)
						}
					})
				} else if refusal.Reason == OverRate && random.IntN(4) == 0 { // it is let in exactly then, as far as this limit counts
					id := refusal.Limit.ID()
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

// admitsBy reports whether the limit of a refusal would admit the request at a time.
func (m *model) admitsBy(r *Refusal, id ID, now time.Time) bool {
	return m.used(id, now)+min(r.Requested, r.Allowed) <= r.Allowed
}
