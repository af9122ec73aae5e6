package quota

import (
	"math"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// A flight is a request on its way.
type flight struct {
	m    *Meter
	mark Mark
	sent time.Time
}

func send(m *Meter, cost int64, seconds float64) flight {
	return flight{m, m.Deduct(cost), at(seconds)}
}

// comes has its reply come, with the headers of Azure's if none are given.
func (f flight) comes(seconds float64, h http.Header) {
	f.m.See(Reply{Rates: verdict.ReadRates(h), Mark: f.mark, Sent: f.sent}, "gpt-4o", at(seconds))
}

// azure are Azure's headers of a deployment with 1000 tokens and 60 requests a
// minute.
func azure(requests, tokens, reset string) http.Header {
	return header("X-Ratelimit-Limit-Requests", "60", "X-Ratelimit-Remaining-Requests", requests, "X-Ratelimit-Reset-Requests", "10", "X-Ratelimit-Renewalperiod-Requests", "10",
		"X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", tokens, "X-Ratelimit-Reset-Tokens", reset, "X-Ratelimit-Renewalperiod-Tokens", "60")
}

// openAI are OpenAI's headers of such a limit.
func openAI(requests, requestsReset, tokens, tokensReset string) http.Header {
	return header("X-Ratelimit-Limit-Requests", "60", "X-Ratelimit-Remaining-Requests", requests, "X-Ratelimit-Reset-Requests", requestsReset,
		"X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", tokens, "X-Ratelimit-Reset-Tokens", tokensReset)
}

func wantRoom(t *testing.T, m *Meter, cost int64, seconds float64, want bool) {
	t.Helper()
	if got := m.HasRoom(cost, At(at(seconds))); got != want {
		t.Errorf("after %v s the room for %d tokens is %v, want %v", seconds, cost, got, want)
	}
}

func TestAMeterWithoutAReadingHasRoom(t *testing.T) {
	m := new(Meter)
	m.Deduct(1 << 62)
	m.Deduct(math.MaxInt64)
	wantRoom(t, m, math.MaxInt64, 0, true)
}

func TestWhatWasSentAfterAReadingIsDeductedFromIt(t *testing.T) {
	m := new(Meter)
	first := send(m, 100, 0)
	second := send(m, 100, .1) // before the reply
	first.comes(1, azure("9", "500", "60"))
	wantRoom(t, m, 400, 1, true)
	wantRoom(t, m, 401, 1, false)
	third := send(m, 100, 1) // after it
	wantRoom(t, m, 300, 1, true)
	wantRoom(t, m, 301, 1, false)
	third.comes(2, azure("7", "250", "60")) // another replica has used 50
	wantRoom(t, m, 250, 2, true)
	wantRoom(t, m, 251, 2, false)
	second.comes(3, azure("8", "400", "60")) // it was slow, and says nothing of the third
	wantRoom(t, m, 250, 3, true)
	wantRoom(t, m, 251, 3, false)
}

func TestAnEstimateComesBackOnceToTheReadingsBeforeIt(t *testing.T) {
	for name, tc := range map[string]struct {
		do   func(before, refused, after flight)
		left int64
	}{
		"after the reading":                     {func(b, r, a flight) { b.comes(1, azure("9", "500", "60")); r.mark.Return() }, 400},
		"before the reading":                    {func(b, r, a flight) { r.mark.Return(); b.comes(1, azure("9", "500", "60")) }, 400},
		"after the reading of a later request":  {func(b, r, a flight) { a.comes(1, azure("9", "500", "60")); r.mark.Return() }, 500},
		"before the reading of a later request": {func(b, r, a flight) { r.mark.Return(); a.comes(1, azure("9", "500", "60")) }, 500},
		"its own reading":                       {func(b, r, a flight) { r.comes(1, azure("9", "500", "60")); r.mark.Return() }, 400},
		"two readings": {func(b, r, a flight) {
			b.comes(1, azure("9", "600", "60"))
			r.mark.Return()
			a.comes(1, azure("9", "500", "60"))
		}, 500},
	} {
		t.Run(name, func(t *testing.T) {
			m := new(Meter)
			send(m, 100, -1).comes(-1, azure("10", "1000", "60"))
			tc.do(send(m, 100, 0), send(m, 1<<60, 0), send(m, 100, 0))
			wantRoom(t, m, tc.left, 1, true)
			wantRoom(t, m, tc.left+1, 1, false)
		})
	}
}

func TestAnEstimateIsNeverMoreThanTheLimit(t *testing.T) {
	m := new(Meter)
	first := send(m, 10, 0)
	for range 1000 {
		m.Deduct(1_000_000_000_000)
	}
	if sum := m.allowances[1].estimated.Load(); sum > 1001*highestUnknown { // 2^23 of them would exceed 63 bits
		t.Errorf("the sum of the estimates is %d", sum)
	}
	first.comes(1, azure("9", "1000", "60"))
	wantRoom(t, m, 1, 1, false)
	last := send(m, 10, 2)
	last.comes(2, azure("9", "1000", "60"))
	send(m, 1_000_000_000_000, 3)
	if left := m.Left(at(3)); left[1].Left != 0 || m.allowances[1].left(At(at(3))) != 0 {
		t.Errorf("%+v", left)
	}
}

func TestTheRequestsOfAnotherKeySayNothing(t *testing.T) {
	before, m := send(new(Meter), 100, 0), new(Meter)
	send(m, 100, 1).comes(1, azure("9", "500", "60"))
	f := flight{m, before.mark, before.sent}
	f.comes(2, azure("0", "0", "60"))
	before.mark.Return()
	wantRoom(t, m, 500, 2, true)
	wantRoom(t, m, 501, 2, false)
}

func TestTheLastRequestOfALimitHasRoom(t *testing.T) { // litellm#33032: a deployment was left one request early
	m := new(Meter)
	send(m, 10, 0).comes(0, azure("2", "1000", "60"))
	for left := 2; left > 0; left-- {
		wantRoom(t, m, 10, 1, true)
		send(m, 10, 1)
	}
	wantRoom(t, m, 10, 1, false)

	m = new(Meter)
	send(m, 10, 0).comes(0, azure("9", "20", "60"))
	wantRoom(t, m, 20, 1, true)
	wantRoom(t, m, 21, 1, false)
	send(m, 20, 1)
	wantRoom(t, m, 1, 1, false)
	wantRoom(t, m, 0, 1, true)
}

func TestAReadingLastsUntilItsReset(t *testing.T) {
	for name, tc := range map[string]struct {
		header http.Header
		until  float64 // 0: it is ignored
	}{
		"Azure's tokens":            {azure("9", "0", "40"), 40},
		"Azure's reset of 0":        {azure("9", "0", "0"), 60}, // as it was seen with whatever remains
		"Azure's reset of the doc":  {azure("9", "0", "300"), 60},
		"Azure's requests":          {azure("0", "2000", "60"), 10},
		"OpenAI's tokens":           {openAI("59", "1s", "0", "20s"), 20},
		"OpenAI's long reset":       {openAI("59", "1s", "0", "6m0s"), 60},
		"a reset in the past":       {openAI("59", "1s", "0", "-3s"), 0},
		"a bucket that is full":     {openAI("60", "0s", "1000", "0s"), 60},
		"a contradiction":           {openAI("59", "1s", "0", "0s"), 0},
		"no reset":                  {header("X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "0"), 60},
		"a reset of no number":      {header("X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "0", "X-Ratelimit-Reset-Tokens", "soon"), 60},
		"the other spelling":        {header("X-Rate-Limit-Limit-Tokens", "1000", "X-Rate-Limit-Remaining-Tokens", "0", "X-Rate-Limit-Reset-Tokens", "40"), 40},
		"one header in the other":   {header("X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "0", "X-Rate-Limit-Reset-Tokens", "55"), 55}, // openai-python#937
		"not tracked":               {header("X-Ratelimit-Limit-Tokens", "-1", "X-Ratelimit-Remaining-Tokens", "-1", "X-Ratelimit-Reset-Tokens", "0"), 0},     // openai-dotnet#838
		"nothing known of the rest": {header("X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "-1", "X-Ratelimit-Reset-Tokens", "60"), 0},
		"a limit of 0":              {header("X-Ratelimit-Limit-Tokens", "0", "X-Ratelimit-Remaining-Tokens", "0", "X-Ratelimit-Reset-Tokens", "60"), 0},
		"no numbers":                {header("X-Ratelimit-Limit-Tokens", "many", "X-Ratelimit-Remaining-Tokens", "NaN", "X-Ratelimit-Reset-Tokens", "60"), 0},
		"a day's, nearly full":      {header("X-Ratelimit-Limit-Requests", "14400", "X-Ratelimit-Remaining-Requests", "14370", "X-Ratelimit-Reset-Requests", "2m59.56s"), 0}, // Groq's
		"a day's, used up":          {header("X-Ratelimit-Limit-Requests", "200", "X-Ratelimit-Remaining-Requests", "0", "X-Ratelimit-Reset-Requests", "24h0m0s"), 0},
		"another deployment's":      {header("X-Ms-Deployment-Name", "gpt-4o-spill", "X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "0"), 0},
		"its own":                   {header("X-Ms-Deployment-Name", "GPT-4o", "X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "0"), 60},
	} {
		t.Run(name, func(t *testing.T) {
			m := new(Meter)
			send(m, 10, 0).comes(3, tc.header) // it counts from when the request was sent
			cost := int64(1001)                // more than any refill brings
			wantRoom(t, m, cost, 3, tc.until == 0)
			if tc.until > 0 {
				wantRoom(t, m, cost, tc.until-.01, false)
				wantRoom(t, m, cost, tc.until, true)
			}
		})
	}
}

func TestABucketRefillsAllTheTime(t *testing.T) {
	m := new(Meter)
	send(m, 10, 0).comes(0, openAI("59", "1s", "400", "36s")) // 1,000 in a minute
	wantRoom(t, m, 400, 0, true)
	wantRoom(t, m, 410, 0, false)
	wantRoom(t, m, 560, 10, true)
	wantRoom(t, m, 570, 10, false)
	send(m, 500, 10)
	wantRoom(t, m, 70, 10, false)
	wantRoom(t, m, 140, 15, true)
	wantRoom(t, m, 160, 15, false)
}

// TestALimitThatWouldRefillTooFastIsAWindow has a server whose windows of a
// minute are named in OpenAI's style.
func TestALimitThatWouldRefillTooFastIsAWindow(t *testing.T) {
	m := new(Meter)
	send(m, 10, 0).comes(0, openAI("59", "1s", "400", "30s")) // 600 in 30 s
	wantRoom(t, m, 400, 29, true)
	wantRoom(t, m, 410, 29, false)
	wantRoom(t, m, 1000, 30, true)
}

func TestALimitThatIsCutCountsAtOnce(t *testing.T) { // Azure cuts limits for hours
	m := new(Meter)
	send(m, 10, 0).comes(0, azure("9", "900", "60"))
	cut := azure("9", "50", "60")
	cut.Set("X-Ratelimit-Limit-Tokens", "100")
	send(m, 10, 1).comes(1, cut)
	wantRoom(t, m, 51, 1, false)
	left := m.Left(at(1))
	if len(left) != 2 || left[1] != (Left{Kind: "tokens", Limit: 100, Left: 50, Ratio: .5, HasRatio: true, Reset: time.Minute}) {
		t.Errorf("got %+v", left)
	}
}

func TestWhatIsLeft(t *testing.T) {
	m := new(Meter)
	if left := m.Left(start); left != nil {
		t.Errorf("got %+v", left)
	}
	first := send(m, 100, 0)
	send(m, 300, 0)
	first.comes(1, azure("9", "800", "50"))
	left := m.Left(at(5))
	want := []Left{
		{Kind: "requests", Limit: 60, Left: 8, Ratio: .8, HasRatio: true, Reset: 5 * time.Second}, // 10 in 10 s
		{Kind: "tokens", Limit: 1000, Left: 500, Ratio: .5, HasRatio: true, Reset: 45 * time.Second},
	}
	if len(left) != 2 || left[0] != want[0] || left[1] != want[1] {
		t.Errorf("got %+v, want %+v", left, want)
	}
	send(m, 1000, 5)
	if left := m.Left(at(12)); len(left) != 1 || left[0].Left != 0 || left[0].Ratio != 0 {
		t.Errorf("got %+v", left)
	}
}

func TestRepliesAtTheSameMomentLeaveAReading(t *testing.T) {
	m := new(Meter)
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 1000 {
				f := send(m, 1, 0)
				m.HasRoom(1, At(at(1)))
				f.comes(1, azure("9", "100", "60"))
			}
		})
	}
	all.Wait()
	order := m.allowances[1].order.Load()
	if got := m.allowances[1].base.Load() - order; got < 100-8 || got > 100+8 { // the order and the sum of eight requests may differ
		t.Errorf("the reading is of %d", got)
	}
	if order < 4000 {
		t.Errorf("the reading is of the request %d of 8000", order)
	}
}

func TestRoomAllocatesNothing(t *testing.T) {
	m := new(Meter)
	h := azure("9", "100", "60")
	if n := testing.AllocsPerRun(100, func() {
		f := send(m, 1, 0)
		f.comes(1, h)
		m.HasRoom(1, At(at(1)))
	}); n > 0 {
		t.Errorf("got %v allocations", n)
	}
}

func BenchmarkHasRoom(b *testing.B) {
	m, now := new(Meter), At(at(1))
	send(m, 1, 0).comes(1, openAI("59", "1s", "900", "6s"))
	for b.Loop() {
		m.HasRoom(100, now)
	}
}

// BenchmarkSee is what a reply costs, with and without the headers of limits.
func BenchmarkSee(b *testing.B) {
	for name, h := range map[string]http.Header{"limits": azure("9", "100", "60"), "none": header("Content-Type", "application/json", "X-Request-Id", "1")} {
		b.Run(name, func(b *testing.B) {
			m, now := new(Meter), at(1)
			b.ReportAllocs()
			for b.Loop() {
				m.See(Reply{Rates: verdict.ReadRates(h), Mark: m.Deduct(1), Sent: now}, "gpt-4o", now)
			}
		})
	}
}

// Some gateways name the largest number of their language for a limit that they
// do not have.
func TestALimitBeyondAllNumbersHasRoom(t *testing.T) {
	for _, limit := range []string{"9223372036854775807", "1e300"} {
		for _, remaining := range []string{"9223372036850000000", "1e299", "100000"} {
			m, h := new(Meter), openAI("50", "1s", remaining, "60s")
			h.Set("X-Ratelimit-Limit-Tokens", limit)
			send(m, 10, 0).comes(1, h)
			for seconds := 1.; seconds < 70; seconds++ {
				wantRoom(t, m, 1000, seconds, true)
			}
		}
	}
}

// A backend whose key changes has a new meter. Requests that were sent with the
// old key are still under way.
func TestAReplyToARequestThatAnotherMeterCountedSaysNothing(t *testing.T) {
	var table Table
	table.Make("gpt-4o").Deduct(1_000_000)
	old := send(table.Make("gpt-4o"), 100, 0)
	table.Clear()
	old.m = table.Make("gpt-4o")
	old.comes(1, azure("59", "900", "60"))
	send(old.m, 100, 2).comes(3, azure("50", "10", "60"))
	wantRoom(t, old.m, 11, 3, false)
}
