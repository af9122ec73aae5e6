package pool

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/quota"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// weighedPool is a pool whose members have no weights of their own, but those
// given as name:priority:weight.
func weighedPool(t testing.TB, members ...string) (testPool, map[string]*Member) {
	p, m, _ := poolOf(t, members...)
	p.Steers, p.follows = true, true
	for _, m := range m {
		m.FollowsLimits = m.Weight == 1
		m.health.rememberServed("m")
	}
	return p, m
}

// names has a member name limits of requests and of tokens in a reply. A limit
// of 0 is not named.
func names(m *Member, requests, tokens int, now time.Time) {
	h := http.Header{}
	for kind, limit := range map[string]int{"Requests": requests, "Tokens": tokens} {
		if limit > 0 {
			h["X-Ratelimit-Limit-"+kind], h["X-Ratelimit-Remaining-"+kind] = []string{fmt.Sprint(limit)}, []string{fmt.Sprint(limit)}
		}
	}
	m.Quota("m").See(quota.Reply{Rates: verdict.ReadRates(h), Mark: m.Deduct("m", 0), Sent: now, Served: true}, "m", now)
}

// weightsAfter returns the weights of members at a time by which requests have
// come each second.
func weightsAfter(p testPool, from, to float64) map[string]float64 {
	for seconds := from; seconds <= to; seconds++ {
		if m := p.Pick(&asks{model: "m"}, at(seconds)); m != nil {
			m.Release()
		}
	}
	all := make(map[string]float64)
	for _, m := range p.Members {
		if weight, learned := m.LearnedWeights()["m"]; learned {
			all[m.Name] = math.Round(100*weight) / 100
		}
	}
	return all
}

func TestWeightsFollowLimits(t *testing.T) {
	type limits struct{ requests, tokens int }
	for name, tc := range map[string]struct {
		members []string
		limits  map[string]limits
		want    map[string]float64
	}{
		"tokens":            {[]string{"a", "b"}, map[string]limits{"a": {0, 30_000}, "b": {0, 60_000}}, map[string]float64{"a": 1, "b": 2}},
		"requests":          {[]string{"a", "b"}, map[string]limits{"a": {120, 0}, "b": {480, 0}}, map[string]float64{"a": 1, "b": 4}},
		"tokens come first": {[]string{"a", "b"}, map[string]limits{"a": {480, 30_000}, "b": {120, 60_000}}, map[string]float64{"a": 1, "b": 2}},
		"requests are common to all": {
			[]string{"a", "b"}, map[string]limits{"a": {480, 30_000}, "b": {120, 0}}, map[string]float64{"a": 4, "b": 1},
		},
		"different kinds":      {[]string{"a", "b"}, map[string]limits{"a": {480, 0}, "b": {0, 60_000}}, map[string]float64{}},
		"one is not known":     {[]string{"a", "b", "c"}, map[string]limits{"a": {0, 10_000}, "b": {0, 60_000}}, map[string]float64{}},
		"in steps":             {[]string{"a", "b"}, map[string]limits{"a": {0, 100_000}, "b": {0, 105_000}}, map[string]float64{"a": 1, "b": 1}},
		"at most 32":           {[]string{"a", "b"}, map[string]limits{"a": {0, 100}, "b": {0, 100_000}}, map[string]float64{"a": 1, "b": 32}},
		"without a limit":      {[]string{"a", "b"}, map[string]limits{"a": {0, 30_000}, "b": {0, math.MaxInt32}}, map[string]float64{"a": 1, "b": 32}},
		"a weight in a rank":   {[]string{"a", "b:1:3"}, map[string]limits{"a": {0, 30_000}, "b": {0, 60_000}}, map[string]float64{}},
		"weight 0":             {[]string{"a", "b", "c:1:0"}, map[string]limits{"a": {0, 30_000}, "b": {0, 60_000}}, map[string]float64{"a": 1, "b": 2}},
		"a weight beyond it":   {[]string{"a", "b", "c:2:3"}, map[string]limits{"a": {0, 30_000}, "b": {0, 60_000}}, map[string]float64{"a": 1, "b": 2}},
		"each rank for itself": {[]string{"a", "b", "c:2:1", "d:2:1"}, map[string]limits{"a": {0, 30_000}, "b": {0, 60_000}, "c": {9, 0}, "d": {36, 0}}, map[string]float64{"a": 1, "b": 2, "c": 1, "d": 4}},
	} {
		t.Run(name, func(t *testing.T) {
			p, m := weighedPool(t, tc.members...)
			for name, its := range tc.limits {
				names(m[name], its.requests, its.tokens, start)
			}
			if early := weightsAfter(p, 0, 9); len(early) > 0 {
				t.Errorf("the weights are %v at once", early)
			}
			if got := weightsAfter(p, 10, 12); !maps.Equal(got, tc.want) {
				t.Errorf("the weights are %v, want %v", got, tc.want)
			}
		})
	}
}

func TestAStepOfALimitMustHold(t *testing.T) {
	p, m := weighedPool(t, "a", "b")
	names(m["a"], 0, 30_000, start)
	names(m["b"], 0, 60_000, start)
	weightsAfter(p, 0, 11)
	names(m["b"], 0, 15_000, at(12)) // a cut of Azure's
	if got := weightsAfter(p, 12, 20); got["b"] != 2 {
		t.Errorf("the weight of b is %v before the step held, want 2", got["b"])
	}
	names(m["b"], 0, 60_000, at(21))
	if got := weightsAfter(p, 21, 40); got["b"] != 2 {
		t.Errorf("the weight of b is %v although the step did not hold, want 2", got["b"])
	}
	names(m["b"], 0, 15_000, at(41))
	if got := weightsAfter(p, 41, 55); got["b"] != 1 || got["a"] != 2 {
		t.Errorf("the weights are %v after the step held, want 2 for a and 1 for b", got)
	}
	m["b"].StartFresh("one")
	m["b"].StartFresh("two") // another key may have other limits
	if got := weightsAfter(p, 56, 70); len(got) > 0 {
		t.Errorf("the weights are %v without the limits of b", got)
	}
}

func TestADrainedMemberDoesNotKeepWeightsFromFollowingLimits(t *testing.T) {
	p, m := weighedPool(t, "a", "b", "c")
	names(m["a"], 0, 30_000, start)
	names(m["b"], 0, 60_000, start)
	m["c"].Drain(Order{})
	if got := weightsAfter(p, 0, 12); got["a"] != 1 || got["b"] != 2 || got["c"] != 1 {
		t.Errorf("the weights are %v, want 1, 2 and the lowest one for c", got)
	}
}

func TestWeightsAreThoseOfAModel(t *testing.T) {
	p, m := weighedPool(t, "a", "b")
	names(m["a"], 0, 30_000, start)
	names(m["b"], 0, 60_000, start)
	weightsAfter(p, 0, 12)
	for _, model := range []string{"n", ""} {
		if w := p.Weights(model, at(13)); w != nil {
			t.Errorf("the weights of model %q are %v", model, w.members)
		}
	}
}

func TestMadeUpModelsHaveNoWeights(t *testing.T) {
	p, _ := weighedPool(t, "a", "b")
	for i := range 3 * maxWeighed {
		p.Pick(&asks{model: fmt.Sprint("made up ", i)}, start).Release()
	}
	if all := p.learned.byModel.Load(); all != nil {
		t.Errorf("%d models are remembered", len(*all))
	}
}

func TestFewModelsHaveWeights(t *testing.T) {
	p, m := weighedPool(t, "a", "b")
	m["a"].Names, m["b"].Names = make(map[string]string), make(map[string]string)
	for i := range 3 * maxWeighed {
		name := fmt.Sprint("renamed ", i)
		m["a"].Names[name], m["b"].Names[name] = "m", "m"
	}
	names(m["a"], 0, 30_000, start)
	for name := range m["a"].Names {
		p.Pick(&asks{model: name}, start).Release()
	}
	if n := len(*p.learned.byModel.Load()); n != maxWeighed {
		t.Errorf("%d models are remembered, want %d", n, maxWeighed)
	}
}

// TestRequestsFollowLearnedWeights looks at each way to choose among members:
// at random, by the key of a prompt, and for what a caller makes.
func TestRequestsFollowLearnedWeights(t *testing.T) {
	const requests = 4000
	for name, ask := range map[string]func(i int) Affinity{
		"at random":   func(int) Affinity { return Affinity{} },
		"by key":      func(i int) Affinity { return Affinity{Key: mix(uint64(i) + 1)} },
		"for a maker": func(i int) Affinity { return Affinity{Maker: &Maker{Order: mix(uint64(i) + 1)}} },
	} {
		t.Run(name, func(t *testing.T) {
			p, m := weighedPool(t, "a", "b")
			p.Relocations = new(Relocations)
			names(m["a"], 0, 10_000_000, start)
			names(m["b"], 0, 40_000_000, start)
			for i, m := range []*Member{m["a"], m["b"]} {
				m.Account = fmt.Sprint("account ", i)
			}
			p.findAccounts()
			weightsAfter(p, 0, 12)
			got := make(map[string]int)
			for i := range requests {
				m := p.Pick(&asks{model: "m", affinity: ask(i)}, at(13))
				got[m.Name]++
				m.Release()
			}
			if share := float64(got["b"]) / requests; math.Abs(share-.8) > .03 {
				t.Errorf("b got %.2f of the requests, want 0.8", share)
			}
		})
	}
}

// TestReplicasLearnTheSameWeights has four pools, each of which sees its own
// replies of the same backends, also while these cut their limits for a while.
func TestReplicasLearnTheSameWeights(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	limits := map[string]int{"a": 30_000, "b": 45_000, "c": 240_000}
	pools, members := make([]testPool, 4), make([]map[string]*Member, 4)
	for i := range pools {
		pools[i], members[i] = weighedPool(t, "a", "b", "c")
	}
	for second := range 120 {
		switch second {
		case 40:
			limits["c"] = 90_000
		case 80:
			limits["c"] = 240_000
		}
		for i, p := range pools {
			for name, limit := range limits {
				if random.IntN(2) == 0 { // not each of them has a reply in each second
					names(members[i][name], 0, limit, at(float64(second)))
				}
			}
			weightsAfter(p, float64(second), float64(second))
		}
		if second%40 < 25 {
			continue
		}
		first := members[0]["c"].LearnedWeights()
		for _, m := range members[1:] {
			if got := m["c"].LearnedWeights(); !maps.Equal(got, first) {
				t.Fatalf("after %d s the weights are %v and %v", second, first, got)
			}
		}
	}
	if got := slices.Sorted(maps.Values(weightsAfter(pools[0], 120, 121))); !slices.Equal(got, []float64{1, 1.41, 8}) {
		t.Errorf("the weights are %v, want 1, 1.41 and 8", got)
	}
}

// BenchmarkPickByLimits is what it costs that weights follow limits, for three
// members.
func BenchmarkPickByLimits(b *testing.B) {
	for _, follows := range []bool{false, true} {
		b.Run(fmt.Sprintf("follows=%v", follows), func(b *testing.B) {
			p, m := weighedPool(b, "a", "b", "c")
			p.follows = follows
			for name, limit := range map[string]int{"a": 10_000_000, "b": 20_000_000, "c": 40_000_000} {
				names(m[name], 0, limit, start)
			}
			weightsAfter(p, 0, 12)
			r := (&asks{model: "m", cost: 1}).of(p.Pool)
			b.ReportAllocs()
			for b.Loop() {
				r.Weights = p.Weights("m", at(13))
				p.Pool.Pick(r, at(13))
			}
		})
	}
}
