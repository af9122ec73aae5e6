package quota

import (
	"math"
	"net/http"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

func TestWhatReturnsFollowsFromWhatIsKnown(t *testing.T) {
	now := time.Now()
	named := func(headers ...string) func(*Meter) {
		return func(m *Meter) {
			header := make(http.Header)
			for i := 0; i < len(headers); i += 2 {
				header.Set(headers[i], headers[i+1])
			}
			m.See(Reply{Rates: verdict.ReadRates(header), Sent: now}, "gpt-4o", now)
		}
	}
	requests := func(limit, reset string) func(*Meter) {
		return named("X-Ratelimit-Limit-Requests", limit, "X-Ratelimit-Remaining-Requests", "0", "X-Ratelimit-Reset-Requests", reset)
	}
	tokens := named("X-Ratelimit-Limit-Tokens", "60000", "X-Ratelimit-Remaining-Tokens", "0", "X-Ratelimit-Reset-Tokens", "20")
	for name, row := range map[string]struct {
		learn    func(*Meter)
		cost     int64
		length   time.Duration
		replicas int
		requests float64
		every    time.Duration
	}{
		"nothing":                         {func(*Meter) {}, 100, 2 * time.Second, 3, 1, 0},
		"Azure's 10 s":                    {requests("120", "1"), 100, 2 * time.Second, 1, 20, 0},
		"two windows":                     {requests("120", "1"), 100, 10 * time.Second, 1, 40, 0},
		"replicas divide":                 {requests("120", "1"), 100, 2 * time.Second, 4, 5, 0},
		"OpenAI's limits refill":          {requests("600", "60s"), 100, 2 * time.Second, 1, 21, 50 * time.Millisecond},
		"tokens":                          {tokens, 6000, 2 * time.Second, 1, 10, 0},
		"the lowest limit":                {func(m *Meter) { requests("120", "1")(m); tokens(m) }, 6000, 2 * time.Second, 1, 10, 0},
		"a learned limit":                 {func(m *Meter) { m.learned.Store(&learnedLimit{most: 900, length: 10 * time.Second}) }, 100, 2 * time.Second, 4, 9, 0},
		"a PTU's rate":                    {func(m *Meter) { m.drain.Store(&drain{rate: 500e-9}) }, 100, 2 * time.Second, 4, 11, 100 * time.Millisecond},
		"a PTU whose rate is not known":   {func(m *Meter) { m.drain.Store(new(drain)) }, 100, 2 * time.Second, 1, 1, 0},
		"a request that is above the cap": {tokens, math.MaxInt64, 2 * time.Second, 1, 60000. / highestCost, 0},
	} {
		m := new(Meter)
		row.learn(m)
		got := m.Returning(row.cost, row.length, row.replicas)
		if math.Abs(got.Requests-row.requests) > 1e-9 || (got.Every-row.every).Abs() > time.Microsecond {
			t.Errorf("%s: got %+v, want %v requests every %s", name, got, row.requests, row.every)
		}
	}
}
