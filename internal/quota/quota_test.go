package quota

import (
	"math"
	"math/rand/v2"
	"net/http"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

var start = time.Date(2026, 11, 22, 9, 0, 0, 0, time.UTC)

// at is so many seconds after the start.
func at(seconds float64) time.Time { return start.Add(time.Duration(seconds * float64(time.Second))) }

// beyond is a tier of this number, which has got more than its share, and for
// which others keep this part of a backend.
func beyond(number int, others float64) Tier {
	return Tier{Number: number, Shares: &Shares{1: others}}
}

var batch = beyond(2, .2)

// asked is a meter of which a caller of the first tier has asked for the model
// at the start.
func asked() *Meter {
	m := new(Meter)
	m.Ask(1, start)
	return m
}

func wantWait(t *testing.T, m *Meter, tier Tier, seconds, want float64) {
	t.Helper()
	m.gives(tier.Number, 1, at(seconds))
	if got := m.waits(tier, at(seconds)).Seconds(); got < want-.01 || got > want+.01 {
		t.Errorf("after %v s the tier waits %v s, want %v", seconds, got, want)
	}
}

// keepsAway reports whether requests of the tier may not go to the backend,
// which is the only one.
func (m *Meter) keepsAway(t Tier, now time.Time) bool {
	of, kept := m.Kept(t, At(now))
	got := Got{Group: of}
	got.Add(m, t, At(now))
	return !m.Leaves(kept, 1, At(now)) && (!t.KeepsShare() || !got.IsWithinShare(t))
}

// waits is how long the shares of others keep requests of the tier away.
func (m *Meter) waits(t Tier, now time.Time) time.Duration {
	_, kept := m.Kept(t, At(now))
	return m.Wait(kept, 1, now)
}

// gives has a tier get something, which is not deducted from limits.
func (m *Meter) gives(tier int, cost int64, now time.Time) {
	m.counter.add(tier, cost, instant(now))
}

// see has the meter see a reply to a request that was just sent.
func see(m *Meter, header http.Header, throttles bool, now time.Time) {
	m.See(Reply{Rates: verdict.ReadRates(header), Throttles: throttles, Sent: now}, "gpt-4o", now)
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
	wantWait(t, m, beyond(3, .5), 0, 4*(1-.5/1.27))
	see(m, header("azure-openai-deployment-utilization", "79.9%"), false, at(1))
	wantWait(t, m, batch, 1, 0)
}

func TestAWaitIsExact(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 100_000 {
		m, tier := asked(), beyond(2, float64(1+random.IntN(100))/100)
		m.gives(2, 1, start)
		if random.IntN(2) == 0 {
			m.see(utilization, 2*random.Float64(), start)
		} else {
			reset := "X-Ratelimit-Reset-Tokens"
			see(m, header("X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", strconv.Itoa(random.IntN(1000)), reset, strconv.Itoa(1+random.IntN(60))), false, start)
		}
		wait := m.waits(tier, start)
		if m.gives(2, 1, start.Add(wait)); m.keepsAway(tier, start.Add(wait)) || wait > 2*time.Millisecond && !m.keepsAway(tier, start.Add(wait-2*time.Millisecond)) {
			t.Fatalf("it waits %s for %v, which is not when that is left", wait, tier.Shares[1])
		}
	}
}

func TestAThrottleIsFullAndFadesInTwoSeconds(t *testing.T) {
	m := asked()
	see(m, header(), true, start)
	wantWait(t, m, batch, 0, .4)
	wantWait(t, m, batch, .41, 0)
	wantWait(t, m, beyond(3, .9), 0, 1.8)
}

// keeps are the shares of three tiers.
var keeps = &Shares{1: .5, 2: .3, 3: .2}

func TestATierBeyondItsShareLeavesThoseOfOthersThatAskedInTheLastMinute(t *testing.T) {
	for name, tc := range map[string]struct {
		asks  []int
		after float64
		tier  Tier
		want  bool
	}{
		"no request":                       {tier: Tier{Number: 2, Shares: keeps}},
		"a better tier":                    {asks: []int{1}, tier: Tier{Number: 2, Shares: keeps}, want: true},
		"a worse tier":                     {asks: []int{3}, tier: Tier{Number: 2, Shares: keeps}, want: true},
		"the same tier":                    {asks: []int{2}, tier: Tier{Number: 2, Shares: keeps}},
		"a tier without a share":           {asks: []int{4, 0}, tier: Tier{Number: 2, Shares: keeps}},
		"59.9 s ago":                       {asks: []int{1}, after: 59.9, tier: Tier{Number: 2, Shares: keeps}, want: true},
		"a minute ago":                     {asks: []int{1}, after: 60, tier: Tier{Number: 2, Shares: keeps}},
		"a request that heeds no share":    {asks: []int{0, 1, 2}, tier: Tier{Number: 2}},
		"a tier that has nothing reserved": {asks: []int{1}, tier: Tier{Number: 4, Shares: keeps}, want: true},
	} {
		m := new(Meter)
		for _, tier := range tc.asks {
			m.Ask(tier, start)
		}
		m.gives(tc.tier.Number, 1, at(tc.after))
		see(m, header("Azure-Openai-Deployment-Utilization", "100%"), false, at(tc.after))
		if got := m.waits(tc.tier, at(tc.after)) > 0; got != tc.want {
			t.Errorf("%s: kept away is %v, want %v", name, got, tc.want)
		}
	}
}

func TestATierWithinItsShareGoesToAFullBackend(t *testing.T) {
	silver, full := Tier{Number: 2, Shares: keeps}, header("Azure-Openai-Deployment-Utilization", "100%")
	for name, tc := range map[string]struct {
		got   [4]int64 // by the tiers' numbers
		after float64
		then  [4]int64 // what they get after that time
		want  bool
	}{
		"nobody has got anything":      {},
		"it has got nothing":           {got: [4]int64{1: 9}},
		"it has got its share":         {got: [4]int64{1: 50, 2: 30, 3: 20}},
		"it has got more":              {got: [4]int64{1: 50, 2: 31, 3: 20}, want: true},
		"it has got all":               {got: [4]int64{2: 1}, want: true},
		"requests without a tier, too": {got: [4]int64{0: 70, 2: 30}},
		"it got more 19 s ago":         {got: [4]int64{1: 50, 2: 31, 3: 20}, after: 19, want: true},
		"it got more 33 s ago":         {got: [4]int64{1: 50, 2: 31, 3: 20}, after: 33},
		"it got most 20 s ago":         {got: [4]int64{2: 10}, after: 20, then: [4]int64{1: 9}, want: true},
		"it got most 30 s ago":         {got: [4]int64{2: 10}, after: 30, then: [4]int64{1: 9}},
	} {
		m := new(Meter)
		for tier, cost := range tc.got {
			m.gives(tier, 1000*cost, start)
			m.gives(tier, 1000*tc.then[tier], at(tc.after))
		}
		m.Ask(1, start)
		see(m, full, false, at(tc.after))
		if got := m.keepsAway(silver, at(tc.after)); got != tc.want {
			t.Errorf("%s: kept away is %v, want %v", name, got, tc.want)
		}
	}
}

// With a limit by the minute, what a tier got at the beginning of the minute
// counts until its end.
func TestWithinALimitByTheMinuteAMinuteCounts(t *testing.T) {
	for seconds, want := range map[float64]bool{1: true, 25: true, 59: true, 71: false} {
		m := new(Meter)
		m.gives(2, 10_000, start)
		m.gives(1, 8_000, at(seconds))
		m.Ask(1, at(seconds))
		see(m, header("X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "100", "X-Ratelimit-Reset-Tokens", "60"), false, at(seconds))
		if got := m.keepsAway(Tier{Number: 2, Shares: keeps}, at(seconds)); got != want {
			t.Errorf("after %v s kept away is %v, want %v", seconds, got, want)
		}
	}
}

func TestARequestThatIsNotExecutedIsGivenBack(t *testing.T) {
	m := new(Meter)
	m.Ask(1, start)
	m.DeductFor(1, 10, start)
	mark := m.DeductFor(2, 10, start)
	see(m, header(), true, start)
	silver := Tier{Number: 2, Shares: keeps}
	if !m.keepsAway(silver, start) {
		t.Error("what it got does not count")
	}
	if mark.Return(); m.keepsAway(silver, start) {
		t.Error("what it did not get counts")
	}
}

// In four minutes, tiers with 50, 30 and 20 % ask for multiples of what a limit
// by the minute of which the window begins at some time, or one that grows all
// the time, gives.
func TestSharesOfALimit(t *testing.T) {
	for name, of := range map[string]struct{ demand, least, most [4]float64 }{
		"all ask for more":           {[4]float64{1: 1.3, 2: 1.3, 3: 1.3}, [4]float64{1: .46, 2: .26, 3: .16}, [4]float64{1: .55, 2: .34, 3: .24}},
		"the last asks for the most": {[4]float64{1: .6, 2: .6, 3: 2.8}, [4]float64{1: .45, 2: .25, 3: .15}, [4]float64{1: .56, 2: .36, 3: .26}},
		"the first needs little":     {[4]float64{1: .1, 2: 2, 3: 2}, [4]float64{1: .094, 2: .27, 3: .17}, [4]float64{1: .101, 2: 1, 3: 1}},
		"half of it":                 {[4]float64{1: .1, 2: .1, 3: .3}, [4]float64{1: .099, 2: .099, 3: .299}, [4]float64{1: .101, 2: .101, 3: .301}},
	} {
		for _, refills := range []bool{false, true} {
			const limit, cost, minutes = 10_000, 10, 4
			random, m, left := rand.New(rand.NewPCG(3, 4)), new(Meter), float64(limit)
			var got, credit [4]float64
			for ms := range minutes * 60_000 {
				now := start.Add(time.Duration(ms) * time.Millisecond)
				switch {
				case refills:
					left = min(limit, left+limit/60_000.)
				case ms%60_000 == 17_000:
					left = limit
				}
				for _, tier := range random.Perm(3) {
					tier++
					if credit[tier] += of.demand[tier] * limit / cost / 60_000; credit[tier] < 1 {
						continue
					}
					credit[tier]--
					if m.Ask(tier, now); m.keepsAway(Tier{Number: tier, Shares: keeps}, now) || left < cost {
						continue
					}
					mark := m.DeductFor(tier, cost, now)
					left -= cost
					if ms >= 60_000 {
						got[tier] += cost / (limit * (minutes - 1.))
					}
					reset := strconv.Itoa(1 + (60_000-(ms+43_000)%60_000)/1000)
					if refills {
						reset = strconv.FormatFloat((limit-left)*60/limit, 'f', 3, 64) + "s"
					}
					m.See(Reply{Rates: verdict.ReadRates(header("X-Ratelimit-Limit-Tokens", strconv.Itoa(limit), "X-Ratelimit-Remaining-Tokens", strconv.Itoa(int(left)), "X-Ratelimit-Reset-Tokens", reset)),
						Served: true, Cost: cost, Mark: mark, Sent: now}, "gpt-4o", now)
				}
			}
			for tier := 1; tier < 4; tier++ {
				if got[tier] < of.least[tier] || got[tier] > of.most[tier] {
					t.Errorf("%s, grows all the time %v: tier %d gets %.3f, want %.2f to %.2f", name, refills, tier, got[tier], of.least[tier], of.most[tier])
				}
			}
			if sum := got[1] + got[2] + got[3]; of.demand[3] > 1 && sum < .95 {
				t.Errorf("%s, grows all the time %v: %.3f of it is used", name, refills, sum)
			}
		}
	}
}

func TestRateLimitsAreReadings(t *testing.T) {
	for name, tc := range map[string]struct {
		header http.Header
		want   float64 // the wait until half of it is left
	}{
		"tokens without a reset":       {header("X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "0"), 0},
		"tokens, refilled by and by":   {header("X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "0", "X-Ratelimit-Reset-Tokens", "1m0s"), 20},
		"tokens, all in 20 s":          {header("X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "0", "X-Ratelimit-Reset-Tokens", "20s"), 20},
		"tokens, a window of Azure's":  {header("X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "0", "X-Ratelimit-Reset-Tokens", "20"), 20},
		"a reset that says nothing":    {header("X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "0", "X-Ratelimit-Reset-Tokens", "0", "X-Ratelimit-Renewalperiod-Tokens", "60"), 0},
		"a reset in six minutes":       {header("X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "0", "X-Ratelimit-Reset-Tokens", "6m0s"), 0},
		"more than half of the tokens": {header("X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "530"), 0},
		"more left than the limit":     {header("X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "2000"), 0},
		"requests":                     {header("X-Ratelimit-Limit-Requests", "60", "X-Ratelimit-Remaining-Requests", "0", "X-Ratelimit-Reset-Requests", "1m0s"), 20},
		"requests, 30 s":               {header("X-Ratelimit-Limit-Requests", "60", "X-Ratelimit-Remaining-Requests", "0", "X-Ratelimit-Reset-Requests", "30"), 30},
		"requests, all in 8 s":         {header("X-Ratelimit-Limit-Requests", "60", "X-Ratelimit-Remaining-Requests", "0", "X-Ratelimit-Reset-Requests", "8s"), 8},
		"requests by the hour":         {header("X-Ratelimit-Limit-Requests", "1000", "X-Ratelimit-Remaining-Requests", "400", "X-Ratelimit-Reset-Requests", "1800"), 0},
		"requests by the hour, 30m":    {header("X-Ratelimit-Limit-Requests", "1000", "X-Ratelimit-Remaining-Requests", "400", "X-Ratelimit-Reset-Requests", "30m0s"), 0},
		"requests without a reset":     {header("X-Ratelimit-Limit-Requests", "60", "X-Ratelimit-Remaining-Requests", "0"), 0},
		"Azure's requests, one of 20":  {header("X-Ratelimit-Limit-Requests", "120", "X-Ratelimit-Remaining-Requests", "19", "X-Ratelimit-Reset-Requests", "10", "X-Ratelimit-Renewalperiod-Requests", "10"), 0},
		"Azure's requests, all of 20":  {header("X-Ratelimit-Limit-Requests", "120", "X-Ratelimit-Remaining-Requests", "0", "X-Ratelimit-Reset-Requests", "10", "X-Ratelimit-Renewalperiod-Requests", "10"), 10},
		"Azure's requests, no window":  {header("X-Ratelimit-Limit-Requests", "120", "X-Ratelimit-Remaining-Requests", "19", "X-Ratelimit-Reset-Requests", "10"), 0},
		"the other spelling":           {header("X-Rate-Limit-Limit-Tokens", "1000", "X-Rate-Limit-Remaining-Tokens", "0", "X-Rate-Limit-Reset-Tokens", "20"), 20},
		"both spellings":               {header("X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "0", "X-Rate-Limit-Reset-Tokens", "20"), 20}, // openai-python#937
		"a limit by the day, a third":  {header("X-Ratelimit-Limit-Requests", "3", "X-Ratelimit-Remaining-Requests", "1", "X-Ratelimit-Reset-Requests", "55m0s"), 0},
		"another deployment's":         {header("X-Ms-Deployment-Name", "spill", "X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "0"), 0},
		"a limit by the day":           {header("X-Ratelimit-Limit-Requests", "14400", "X-Ratelimit-Remaining-Requests", "0", "X-Ratelimit-Reset-Requests", "4h12m0s"), 0},
		"a Unix time":                  {header("X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "0", "X-Ratelimit-Reset-Tokens", "1795000000000"), 0},
		"not tracked":                  {header("X-Ratelimit-Limit-Tokens", "-1", "X-Ratelimit-Remaining-Tokens", "-1", "X-Ratelimit-Reset-Tokens", "0"), 0},
		"a limit of 0":                 {header("X-Ratelimit-Limit-Tokens", "0", "X-Ratelimit-Remaining-Tokens", "0"), 0},
		"no numbers":                   {header("X-Ratelimit-Limit-Tokens", "many", "X-Ratelimit-Remaining-Tokens", "NaN", "X-Ratelimit-Reset-Tokens", "NaN"), 0},
		"no number in the reset":       {header("X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "0", "X-Ratelimit-Reset-Tokens", "NaN"), 0},
		"only the limit":               {header("X-Ratelimit-Limit-Tokens", "1000"), 0},
		"nothing":                      {header(), 0},
		"a negative utilization":       {header("Azure-Openai-Deployment-Utilization", "-1%"), 0},
		"an endless utilization":       {header("Azure-Openai-Deployment-Utilization", "1e999"), 0},
		"a utilization of a million":   {header("Azure-Openai-Deployment-Utilization", "1000000%"), 4 * (1 - .5/16)},
	} {
		t.Run(name, func(t *testing.T) {
			m := asked()
			see(m, tc.header, false, start)
			wantWait(t, m, beyond(2, .5), 0, tc.want)
		})
	}
}

func TestTheHighestReadingCounts(t *testing.T) {
	m := asked()
	see(m, header("Azure-Openai-Deployment-Utilization", "10%"), true, start)
	wantWait(t, m, beyond(2, .6), 0, 1.2)
	see(m, header("X-Ratelimit-Limit-Tokens", "100", "X-Ratelimit-Remaining-Tokens", "0", "X-Ratelimit-Reset-Tokens", "60"), false, start)
	wantWait(t, m, beyond(2, .6), 0, 60)
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
		m.DeductFor(2, 1, start)
		see(m, full, true, start)
		m.keepsAway(batch, start)
	}); n > 0 {
		t.Errorf("got %v allocations", n)
	}
}

func BenchmarkReserved(b *testing.B) {
	m, now := asked(), at(1)
	m.gives(2, 1, now)
	see(m, header("Azure-Openai-Deployment-Utilization", "100%"), true, start)
	for b.Loop() {
		m.keepsAway(batch, now)
	}
}

func TestACostCountsLessTheOlderItIs(t *testing.T) {
	m := new(Meter)
	m.gives(1, 1000, at(0))
	mark := m.DeductFor(2, 1000, at(0))
	m.gives(2, 500, at(0))
	const older = 1.25 // or younger, in seconds: the middle of its part is
	for _, seconds := range []float64{0, 7, 20, 27, 40, 59.9, 66} {
		m.Ask(1, at(seconds))
		got := m.TierCosts(at(seconds))
		if want := 1000 * max(0, min(1, (30-seconds)/20)); math.Abs(float64(got[0][1])-want) > 1+1000*older/20 {
			t.Errorf("after %v s the tier has got %d of 1000 lately, want %.0f", seconds, got[0][1], want)
		}
		if want := int64(1000); seconds < 60 && got[1][1] != want || seconds > 65 && got[1][1] != 0 {
			t.Errorf("after %v s the tier has got %d in a minute, want %d", seconds, got[1][1], want)
		}
	}
	mark.Return()
	m.Ask(2, at(50))
	if got := m.TierCosts(at(50))[1][2]; got != 500 {
		t.Errorf("after 1000 came back the other tier has got %d, want 500", got)
	}
}

// While it is not known when a window of 6000 tokens ends, a tier above its
// share uses 105 of them in a second, whatever a request declares.
func TestALimitWhoseWindowIsNotKnownIsPaced(t *testing.T) {
	for _, cost := range []int64{1, 1 << 62} {
		m, second := new(Meter), Tier{Number: 2, Shares: keeps}
		m.Ask(1, at(0))
		m.Ask(2, at(0))
		see(m, header("X-Ratelimit-Limit-Tokens", "6000", "X-Ratelimit-Remaining-Tokens", "2000", "X-Ratelimit-Reset-Tokens", "0"), false, at(0))
		m.gives(2, 2000, at(0))
		if got := m.waits(second, at(1)); got > 0 {
			t.Errorf("after 2000 in the last second it waits for %s, want 0", got)
		}
		m.DeductFor(2, 200, at(1))
		if got := m.waits(second, at(1.1)); got < time.Second/2 || got > 2*time.Second {
			t.Errorf("after 2200 it waits for %s, want about 1 s", got)
		}
		m.DeductFor(2, cost, at(1))
		if got := m.waits(second, at(1.1)); got < time.Second/2 || got > 30*time.Second {
			t.Errorf("after %d more it waits for %s", cost, got)
		}
		see(m, header("X-Ratelimit-Limit-Tokens", "6000", "X-Ratelimit-Remaining-Tokens", "2000", "X-Ratelimit-Reset-Tokens", "0"), false, at(40))
		if got := m.waits(second, at(40)); got > 0 {
			t.Errorf("after 40 s it waits for %s, want 0", got)
		}
	}
}

// A limit of which most remains is not paced, however much requests declare.
func TestALimitOfWhichMostRemainsIsNotPaced(t *testing.T) {
	m, none := new(Meter), Tier{Number: 3, Shares: &Shares{1: .1}}
	for _, costs := range []struct{ got, next int64 }{{0, 8000}, {8000, 1}} {
		m.Ask(1, at(0))
		m.gives(3, costs.got, at(0))
		see(m, header("X-Ratelimit-Limit-Tokens", "10000", "X-Ratelimit-Remaining-Tokens", "9900", "X-Ratelimit-Reset-Tokens", "0"), false, at(1))
		if _, kept := m.Kept(none, At(at(1))); m.Wait(kept, costs.next, at(1)) > 0 {
			t.Errorf("after %d tokens that were not used, a request of %d does not pass", costs.got, costs.next)
		}
	}
}

// TestReadingsShowWhenAWindowBegins has a reading each second, and a throttle
// with other fields in the middle of each window.
func TestReadingsShowWhenAWindowBegins(t *testing.T) {
	for seconds, renewal := range map[int]string{60: "", 10: "10"} {
		m := new(Meter)
		for s := range 5 * seconds {
			passed := s % seconds
			h := header("X-Ratelimit-Limit-Tokens", "6000", "X-Ratelimit-Remaining-Tokens", strconv.Itoa((seconds-passed)*90), "X-Ratelimit-Reset-Tokens", "0")
			if renewal != "" {
				h.Set("X-Ratelimit-Renewalperiod-Tokens", renewal)
			}
			see(m, h, false, at(float64(s)))
			a := &m.allowances[tokens]
			if end := time.Duration(a.until.Load() - int64(At(at(float64(s-passed+seconds))))); s >= seconds && (!a.isInWindow(At(at(float64(s)))) || end.Abs() > time.Second) {
				t.Errorf("windows of %d s: after %d s the end is known: %v, and wrong by %s", seconds, s, a.isInWindow(At(at(float64(s)))), end)
			}
			if passed == seconds/2 {
				see(m, header("X-Ratelimit-Limit-Tokens", "6000", "X-Ratelimit-Remaining-Tokens", "0", "X-Ratelimit-Reset-Tokens", "5"), true, at(float64(s)+.1))
			}
		}
	}
}

func TestWhatIsTakenBackAfterItsPartDoesNotCount(t *testing.T) {
	m := new(Meter)
	m.Ask(1, at(0))
	m.gives(1, 5, at(0))
	mark := m.DeductFor(1, 7, at(0))
	for _, step := range []struct {
		seconds float64
		want    int64
	}{{0, 12}, {6, 12}} {
		if got := m.TierCosts(at(step.seconds))[1][1]; got != step.want {
			t.Errorf("after %v s the tier has got %d, want %d", step.seconds, got, step.want)
		}
	}
	mark.Return()
	if got := m.TierCosts(at(6))[1][1]; got != 5 {
		t.Errorf("the tier has got %d after 7 of 12 came back", got)
	}
}

func TestWhatIsAddedToThePartBeforeCounts(t *testing.T) {
	m := new(Meter)
	m.Ask(1, at(0))
	m.gives(1, 5, at(0))
	if got := m.TierCosts(at(6))[1][1]; got != 5 { // so it is summed up
		t.Fatalf("the tier has got %d, want 5", got)
	}
	m.gives(1, 7, at(4.9)) // a request whose time was taken just before the part was over
	if got := m.TierCosts(at(6))[1][1]; got != 12 {
		t.Errorf("the tier has got %d, want 12", got)
	}
}

// A client may declare any cost, which comes back when a backend refuses it.
func TestAHugeCostThatComesBackLeavesTheOthers(t *testing.T) {
	m := new(Meter)
	for range 100 {
		m.gives(1, 120, at(0))
		m.Ask(1, at(0))
		m.DeductFor(1, 1<<62, at(0)).Return()
	}
	if got := m.TierCosts(at(0))[0][1]; got != 12_000 {
		t.Errorf("the tier has got %d, want 12000", got)
	}
}

// A request whose time was taken just before another one counts as before it.
func TestCostsMayComeOutOfOrder(t *testing.T) {
	a, b := new(Meter), new(Meter)
	a.gives(1, 500, at(1))
	a.gives(1, 700, at(0))
	a.Ask(1, at(1))
	b.Ask(1, at(1))
	b.gives(1, 700, at(0))
	b.gives(1, 500, at(1))
	if a, b := a.TierCosts(at(2)), b.TierCosts(at(2)); a != b || a[0][1] == 0 {
		t.Errorf("got %v and %v", a, b)
	}
}

func TestATierThatAsksNoMoreIsNotActiveElsewhere(t *testing.T) {
	m := new(Meter)
	m.DeductFor(1, 100_000, at(0))
	if before, after := m.TierCosts(at(59.9)), m.TierCosts(at(60)); before.IsZero() || !after.IsZero() {
		t.Errorf("just before a minute the tier has got %v, and then %v", before, after)
	}
}

func TestSharesInParallel(t *testing.T) {
	m, tier := new(Meter), Tier{Number: 2, Shares: keeps}
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			for ms := range 20_000 {
				now := start.Add(time.Duration(ms) * time.Millisecond)
				m.Ask(1, now)
				mark := m.DeductFor(1+i%3, 1, now)
				if m.keepsAway(tier, now); ms%2 == 0 {
					mark.Return()
				}
				if ms%1000 == 0 {
					m.Hear(strconv.Itoa(i), m.TierCosts(now), now)
				}
				see(m, header(), ms%7 == 0, now)
			}
		})
	}
	all.Wait()
	got := m.TierCosts(start.Add(20 * time.Second))
	for i, want := range [...]int64{30_000, 30_000, 20_000} { // in 20 s
		if sum := got[1][1+i]; sum != want {
			t.Errorf("tier %d got %d, want %d", 1+i, sum, want)
		}
	}
}

func TestWhatOtherReplicasSayIsBounded(t *testing.T) {
	m := new(Meter)
	for i := range 2 * maxOthers {
		m.Hear(strconv.Itoa(i), TierCosts{{1: -1, 2: math.MaxInt64}, {1: math.MinInt64, 2: math.MaxInt64}}, start)
	}
	if n := len(m.others.replicas); n != maxOthers {
		t.Errorf("%d replicas are kept", n)
	}
	m.gives(1, 1, start)
	see(m, header(), true, start)
	if !m.keepsAway(Tier{Number: 2, Shares: &Shares{1: .5, 2: .5}}, start) && m.elsewhere(instant(start))[1][2] <= 0 {
		t.Error("the sum is not right")
	}
	m.Hear("0", TierCosts{}, at(6))
	if n := len(m.others.replicas); n != 1 {
		t.Errorf("%d replicas are kept that are gone", n-1)
	}
}

func TestAClockThatIsSetBackDoesNoHarm(t *testing.T) {
	m := new(Meter)
	for _, now := range []time.Time{{}, time.Unix(-1<<40, 0), time.Unix(1<<40, 0), start, at(-3600), at(3600), start} {
		m.Ask(1, now)
		mark := m.DeductFor(2, 100, now)
		see(m, header(), true, now)
		if !m.keepsAway(Tier{Number: 2, Shares: keeps}, now) && now.Equal(start) {
			t.Error("what it got does not count")
		}
		for _, then := range []time.Time{{}, now, time.Unix(1<<40, 0)} {
			for _, costs := range m.TierCosts(then) {
				if costs[2] < 0 || costs[2] > highestHeard {
					t.Errorf("at %v it has got %d", then, costs[2])
				}
			}
		}
		mark.Return()
	}
}

func TestAClockThatIsFarOffDoesNoHarm(t *testing.T) {
	for i := range parts { // one of them has the place of the part that is far ahead
		m, start := new(Meter), start.Add(time.Duration(i)*part*time.Millisecond)
		for _, now := range []time.Time{{}, time.Unix(-1<<40, 0), time.Unix(1<<40, 0), start} {
			m.Ask(1, now)
			mark := m.DeductFor(2, 1, now)
			see(m, header(), true, now)
			if !m.keepsAway(Tier{Number: 2, Shares: keeps}, now) && now.Equal(start) {
				t.Error("what it got does not count")
			}
			mark.Return()
		}
	}
}
