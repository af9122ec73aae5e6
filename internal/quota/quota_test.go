package quota

import (
	"math/rand/v2"
	"net/http"
	"testing"
	"time"
)

var start = time.Date(2026, 11, 22, 9, 0, 0, 0, time.UTC)

// at is so many seconds after the start.
func at(seconds float64) time.Time { return start.Add(time.Duration(seconds * float64(time.Second))) }

var batch = Tier{Number: 2, Ceiling: .8}

// asked is a meter of which a caller of the first tier has asked for the model at the start.
func asked() *Meter {
	m := new(Meter)
	m.Ask(1, start)
	return m
}

func wantWait(t *testing.T, m *Meter, tier Tier, seconds, want float64) {
	t.Helper()
	if got := m.Wait(tier, at(seconds)).Seconds(); got < want-.01 || got > want+.01 {
		t.Errorf("after %v s the tier waits %v s, want %v", seconds, got, want)
	}
}

// see has the meter see a reply to a request that was just sent.
func see(m *Meter, header http.Header, throttles bool, now time.Time) {
	m.See(Reply{Header: header, Throttles: throttles, Sent: now}, "gpt-4o", now)
}

func header(pairs ...string) http.Header {
	h := make(http.Header)
	for i := 0; i < len(pairs); i += 2 {
		h.Set(pairs[i], pairs[i+1])
	}
	return h
}

func TestUtilizationFadesInFourSeconds(t *testing.T) {
	m := asked()
	see(m, header("azure-openai-deployment-utilization", "127%"), false, start)
	wantWait(t, m, batch, 0, 4*(1-.8/1.27))
	wantWait(t, m, batch, 1.4, .08)
	wantWait(t, m, batch, 1.5, 0)
	wantWait(t, m, Tier{Number: 3, Ceiling: .5}, 0, 4*(1-.5/1.27))
	see(m, header("azure-openai-deployment-utilization", "79.9%"), false, at(1))
	wantWait(t, m, batch, 1, 0)
}

func TestAWaitIsExact(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 100_000 {
		m, tier := asked(), Tier{Number: 2, Ceiling: float64(1+random.IntN(100)) / 100}
		m.see(tokens, 2*random.Float64(), time.Duration(random.Int64N(int64(time.Minute))), start)
		wait := m.Wait(tier, start)
		if m.Above(tier, start.Add(wait)) || wait > 0 && !m.Above(tier, start.Add(wait-time.Millisecond)) {
			t.Fatalf("it waits %s for %+v, which is not when %b falls to it", wait, tier, m.readings[tokens].Load())
		}
	}
}

func TestAThrottleIsFullAndFadesInTwoSeconds(t *testing.T) {
	m := asked()
	see(m, header(), true, start)
	wantWait(t, m, batch, 0, .4)
	wantWait(t, m, batch, .41, 0)
	wantWait(t, m, Tier{Number: 3, Ceiling: .1}, 0, 1.8)
}

func TestOnlyBetterTiersInTheLastMinuteCount(t *testing.T) {
	const full = "Azure-Openai-Deployment-Utilization"
	for name, tc := range map[string]struct {
		asks  []int
		after float64
		tier  Tier
		want  bool
	}{
		"no request":               {tier: batch},
		"a better tier":            {asks: []int{1}, tier: batch, want: true},
		"no tier is above all":     {asks: []int{0}, tier: Tier{Number: 1, Ceiling: .8}, want: true},
		"the same tier":            {asks: []int{2}, tier: batch},
		"a worse tier":             {asks: []int{3}, tier: batch},
		"59.9 s ago":               {asks: []int{1}, after: 59.9, tier: batch, want: true},
		"a minute ago":             {asks: []int{1}, after: 60, tier: batch},
		"a tier without a ceiling": {asks: []int{0, 1}, tier: Tier{Number: 2}},
		"a request without a tier": {asks: []int{0, 1, 2}},
	} {
		m := new(Meter)
		for _, tier := range tc.asks {
			m.Ask(tier, start)
		}
		see(m, header(full, "100%"), false, at(tc.after))
		if got := m.Wait(tc.tier, at(tc.after)) > 0; got != tc.want {
			t.Errorf("%s: kept away is %v, want %v", name, got, tc.want)
		}
	}
}

func TestTheWaitEndsWithTheInterestOfBetterTiers(t *testing.T) {
	m := asked()
	see(m, header("X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "0"), false, at(55))
	wantWait(t, m, batch, 55, 5) // 12
	m.Ask(1, at(55))
	wantWait(t, m, batch, 55, 12)
}

func TestRateLimitsAreReadings(t *testing.T) {
	for name, tc := range map[string]struct {
		header http.Header
		want   float64 // the wait at a ceiling of a half
	}{
		"tokens, refilled in a minute": {header("X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "0"), 30},
		"tokens, refilled in 20 s":     {header("X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "0", "X-Ratelimit-Reset-Tokens", "20s"), 10},
		"tokens, a window of Azure's":  {header("X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "0", "X-Ratelimit-Reset-Tokens", "20"), 10},
		"a reset that says nothing":    {header("X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "0", "X-Ratelimit-Reset-Tokens", "0", "X-Ratelimit-Renewalperiod-Tokens", "60"), 30},
		"a reset in six minutes":       {header("X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "0", "X-Ratelimit-Reset-Tokens", "6m0s"), 30},
		"half of the tokens":           {header("X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "500"), 0},
		"more left than the limit":     {header("X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "2000"), 0},
		"requests":                     {header("X-Ratelimit-Limit-Requests", "60", "X-Ratelimit-Remaining-Requests", "0", "X-Ratelimit-Reset-Requests", "8s"), 4},
		"requests without a reset":     {header("X-Ratelimit-Limit-Requests", "60", "X-Ratelimit-Remaining-Requests", "0"), 5},
		"Azure's requests, one of 20":  {header("X-Ratelimit-Limit-Requests", "120", "X-Ratelimit-Remaining-Requests", "19", "X-Ratelimit-Reset-Requests", "10", "X-Ratelimit-Renewalperiod-Requests", "10"), 0},
		"Azure's requests, all of 20":  {header("X-Ratelimit-Limit-Requests", "120", "X-Ratelimit-Remaining-Requests", "0", "X-Ratelimit-Reset-Requests", "10", "X-Ratelimit-Renewalperiod-Requests", "10"), 5},
		"Azure's requests, no window":  {header("X-Ratelimit-Limit-Requests", "120", "X-Ratelimit-Remaining-Requests", "19", "X-Ratelimit-Reset-Requests", "10"), 0},
		"the other spelling":           {header("X-Rate-Limit-Limit-Tokens", "1000", "X-Rate-Limit-Remaining-Tokens", "0", "X-Rate-Limit-Reset-Tokens", "20"), 10},
		"both spellings":               {header("X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "0", "X-Rate-Limit-Reset-Tokens", "20"), 10}, // openai-python#937
		"a limit by the day, a third":  {header("X-Ratelimit-Limit-Requests", "3", "X-Ratelimit-Remaining-Requests", "1", "X-Ratelimit-Reset-Requests", "55m0s"), 0},
		"another deployment's":         {header("X-Ms-Deployment-Name", "spill", "X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "0"), 0},
		"a limit by the day":           {header("X-Ratelimit-Limit-Requests", "14400", "X-Ratelimit-Remaining-Requests", "0", "X-Ratelimit-Reset-Requests", "4h12m0s"), 0},
		"a Unix time":                  {header("X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "0", "X-Ratelimit-Reset-Tokens", "1795000000000"), 0},
		"not tracked":                  {header("X-Ratelimit-Limit-Tokens", "-1", "X-Ratelimit-Remaining-Tokens", "-1", "X-Ratelimit-Reset-Tokens", "0"), 0},
		"a limit of 0":                 {header("X-Ratelimit-Limit-Tokens", "0", "X-Ratelimit-Remaining-Tokens", "0"), 0},
		"no numbers":                   {header("X-Ratelimit-Limit-Tokens", "many", "X-Ratelimit-Remaining-Tokens", "NaN", "X-Ratelimit-Reset-Tokens", "NaN"), 0},
		"no number in the reset":       {header("X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "0", "X-Ratelimit-Reset-Tokens", "NaN"), 30},
		"only the limit":               {header("X-Ratelimit-Limit-Tokens", "1000"), 0},
		"nothing":                      {header(), 0},
		"a negative utilization":       {header("Azure-Openai-Deployment-Utilization", "-1%"), 0},
		"an endless utilization":       {header("Azure-Openai-Deployment-Utilization", "1e999"), 0},
		"a utilization of a million":   {header("Azure-Openai-Deployment-Utilization", "1000000%"), 4 * (1 - .5/16)},
	} {
		t.Run(name, func(t *testing.T) {
			m := asked()
			see(m, tc.header, false, start)
			wantWait(t, m, Tier{Number: 2, Ceiling: .5}, 0, tc.want)
		})
	}
}

func TestTheHighestReadingCounts(t *testing.T) {
	m := asked()
	see(m, header("Azure-Openai-Deployment-Utilization", "10%"), true, start)
	wantWait(t, m, Tier{Number: 2, Ceiling: .4}, 0, 1.2)
	see(m, header("X-Ratelimit-Limit-Tokens", "100", "X-Ratelimit-Remaining-Tokens", "0"), false, start)
	wantWait(t, m, Tier{Number: 2, Ceiling: .4}, 0, 36)
}

func TestATableIsBounded(t *testing.T) {
	var table Table
	if table.Of("gpt-4o") != nil {
		t.Error("a model has a meter that was not made")
	}
	m := table.Make("gpt-4o")
	for i := range 2 * maxModels {
		table.Make(string(rune('a' + i)))
	}
	if table.Make("gpt-4o") != m || table.Of("gpt-4o") != m || m == nil {
		t.Error("the meter has changed")
	}
	if table.Make("gpt-5") != nil || len(table.meters.Load().byModel) != maxModels {
		t.Errorf("got %d meters", len(table.meters.Load().byModel))
	}
	if table.Clear(); table.Of("gpt-4o") != nil {
		t.Error("the meter is still there")
	}
}

func TestNothingAllocates(t *testing.T) {
	var table Table
	m := table.Make("gpt-4o")
	full := header("Azure-Openai-Deployment-Utilization", "100%", "X-Ratelimit-Limit-Tokens", "100", "X-Ratelimit-Remaining-Tokens", "0")
	if n := testing.AllocsPerRun(100, func() {
		table.Of("gpt-4o").Ask(1, start)
		see(m, full, true, start)
		m.Above(batch, start)
	}); n > 0 {
		t.Errorf("got %v allocations", n)
	}
}

func BenchmarkAbove(b *testing.B) {
	m, now := asked(), at(1)
	see(m, header("Azure-Openai-Deployment-Utilization", "100%"), true, start)
	for b.Loop() {
		m.Above(batch, now)
	}
}
