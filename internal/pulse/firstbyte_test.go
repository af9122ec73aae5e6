package pulse

import (
	"container/heap"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// epoch is when the times of these tests begin.
var epoch = time.Now()

func sinceEpoch(d time.Duration) time.Time { return epoch.Add(d) }

func TestAFirstByteRisesAtOnceAndFallsSlowly(t *testing.T) {
	var f FirstByte
	if got := f.At(epoch); got != 0 {
		t.Errorf("without a first byte it is %s", got)
	}
	for _, step := range []struct {
		at, took, want time.Duration
	}{
		{0, 300 * time.Millisecond, 300 * time.Millisecond},
		{time.Second, 3 * time.Second, 3 * time.Second},
		{11 * time.Second, time.Second, 1735758882}, // the old one has a weight of 1/e
		{11 * time.Second, 2 * time.Second, 2 * time.Second},
		{41*time.Second - 1, 2 * time.Second, 2 * time.Second},
	} {
		f.Took(step.took, sinceEpoch(step.at))
		if got := f.At(sinceEpoch(step.at)); got != step.want {
			t.Errorf("at %s it is %s, want %s", step.at, got, step.want)
		}
	}
	if f.At(sinceEpoch(71*time.Second-2)) == 0 || f.At(sinceEpoch(71*time.Second-1)) != 0 {
		t.Error("it is not forgotten after 30 s")
	}
}

func TestTheLowerCostOfTwoIsChosen(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2)).Float64
	for name, c := range map[string]struct {
		choices []Choice
		want    int // the one that wins against any other
	}{
		"one":                            {[]Choice{{1, 5, 1}}, 0},
		"the faster":                     {[]Choice{{1, 0, 3}, {1, 0, 1}, {1, 0, 2}}, 1},
		"the less busy":                  {[]Choice{{1, 5, 1}, {1, 4, 1}, {1, 6, 1}}, 1},
		"faster, but too busy":           {[]Choice{{1, 0, 3}, {1, 3, 1}}, 0},
		"unknown is as fast as the best": {[]Choice{{1, 1, 100}, {1, 0, 0}, {1, 0, 200}}, 1},
		"without times, the less busy":   {[]Choice{{1, 3, 0}, {1, 2, 0}}, 1},
		"whatever its weight":            {[]Choice{{100, 0, 3}, {1, 0, 1}}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			won := make(map[int]int)
			for range 3000 {
				won[Choose(c.choices, random)]++
			}
			for i, n := range won {
				if i != c.want && n > won[c.want] {
					t.Errorf("chosen %v, want mostly %d", won, c.want)
				}
			}
			if len(c.choices) <= 2 && won[c.want] != 3000 {
				t.Errorf("chosen %v, want always %d", won, c.want)
			}
		})
	}
}

func TestEqualBackendsAreDrawnByWeight(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2)).Float64
	counts := make([]int, 3)
	for range 60_000 {
		counts[draw([]Choice{{Weight: 1}, {Weight: 2}, {Weight: 3}}, -1, random)]++
	}
	for i, n := range counts {
		if want := 10_000 * (i + 1); math.Abs(float64(n-want)) > 500 {
			t.Errorf("drawn %v, want shares of 1, 2 and 3", counts)
		}
	}
}

// replies are the first bytes to come, the soonest first.
type replies []reply

type reply struct {
	at      time.Duration
	took    time.Duration
	backend int
}

func (r replies) Len() int           { return len(r) }
func (r replies) Less(i, j int) bool { return r[i].at < r[j].at }
func (r replies) Swap(i, j int)      { r[i], r[j] = r[j], r[i] }
func (r *replies) Push(x any)        { *r = append(*r, x.(reply)) }
func (r *replies) Pop() any {
	last := (*r)[len(*r)-1]
	*r = (*r)[:len(*r)-1]
	return last
}

// load is 20,000 requests to backends of these medians.
type load struct {
	perSecond float64
	// streamed reports whether the first bytes count, as they do for streams.
	streamed bool
	medians  []time.Duration
}

// run returns the 95th percentile of the first bytes, and the share of requests that the last backend got.
func (l load) run() (p95 time.Duration, last float64) {
	const requests = 20_000
	source := rand.New(rand.NewPCG(1, 2))
	backends, inFlight := make([]FirstByte, len(l.medians)), make([]int64, len(l.medians))
	var pending replies
	var all []time.Duration
	now := time.Duration(0)
	for range requests {
		now += time.Duration(source.ExpFloat64() / l.perSecond * float64(time.Second))
		for len(pending) > 0 && pending[0].at <= now {
			r := heap.Pop(&pending).(reply)
			backends[r.backend].Took(r.took, sinceEpoch(r.at))
			inFlight[r.backend]--
		}
		choices := make([]Choice, len(l.medians))
		for i := range choices {
			choices[i] = Choice{Weight: 1, InFlight: inFlight[i]}
			if l.streamed {
				choices[i].FirstByte = backends[i].At(sinceEpoch(now))
			}
		}
		to := Choose(choices, source.Float64)
		took := time.Duration(float64(l.medians[to]) * math.Exp(.668*source.NormFloat64())) // p95: three times the median
		heap.Push(&pending, reply{now + took, took, to})
		inFlight[to]++
		if all = append(all, took); to == len(l.medians)-1 {
			last += 1. / requests
		}
	}
	slices.Sort(all)
	return all[len(all)*95/100], last
}

const fast, slow = 300 * time.Millisecond, 3 * time.Second

func TestASlowBackendHardlyMakesFirstBytesLater(t *testing.T) {
	for _, perSecond := range []float64{5, 20, 100} {
		two, _ := load{perSecond, true, []time.Duration{fast, fast}}.run()
		three, share := load{perSecond, true, []time.Duration{fast, fast, slow}}.run()
		if float64(three) > 1.3*float64(two) || share > .02 {
			t.Errorf("%g/s: with a backend that is ten times slower, the p95 is %s instead of %s, and it gets %.3f of all requests", perSecond, three, two, share)
		}
	}
}

// If the requests in flight were equal, a backend that is ten times slower than two others would get 0.048
// of all requests.
func TestASlowBackendGetsFewRequestsForWholeReplies(t *testing.T) {
	for perSecond, most := range map[float64]float64{5: .12, 20: .08, 100: .06} {
		if _, share := (load{perSecond, false, []time.Duration{fast, fast, slow}}).run(); share > most {
			t.Errorf("%g/s: a backend that is ten times slower gets %.3f of all requests, want at most %g", perSecond, share, most)
		}
	}
}
