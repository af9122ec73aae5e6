package metrics

import (
	"fmt"
	"math"
	"net/http"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/internal/usage"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// gather returns the series of a pool: the values by the names and the labels
// that follow it, in the order of the labels' names.
func gather(t testing.TB, pool string) map[string]float64 {
	t.Helper()
	registry := prometheus.NewRegistry()
	if err := Register(registry); err != nil {
		t.Fatal(err)
	}
	if err := Register(registry); err != nil {
		t.Fatalf("the second handler of a config: %v", err)
	}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	values := make(map[string]float64)
	for _, family := range families {
		for _, metric := range family.GetMetric() {
			if key, ok := keyOf(family.GetName(), metric, pool); ok {
				values[key] = metric.GetCounter().GetValue() + metric.GetGauge().GetValue() + float64(metric.GetHistogram().GetSampleCount())
			}
		}
	}
	return values
}

func keyOf(name string, metric *dto.Metric, pool string) (key string, ok bool) {
	key = strings.TrimPrefix(name, "caddy_openai_lb_")
	for _, label := range metric.GetLabel() {
		if label.GetName() != "pool" {
			key += " " + label.GetValue()
		}
		ok = ok || label.GetName() == "pool" && label.GetValue() == pool
	}
	return key, ok
}

func wantValues(t *testing.T, pool string, want map[string]float64) {
	t.Helper()
	got := gather(t, pool)
	for key, value := range want {
		if n, ok := got[key]; math.IsNaN(value) == ok || !math.IsNaN(value) && math.Abs(n-value) > 1e-9 {
			t.Errorf("%s is %v (there: %t), want %v; there are %v", key, n, ok, value, got)
		}
	}
}

var runs atomic.Int64

// unique makes a name that no other run of a test has: what is counted stays.
func unique(name string) string { return fmt.Sprint(name, "-", runs.Add(1)) }

// none is the value of a series that must not be there.
var none = math.NaN()

// inUse makes members the pool of this name until the test is over.
func inUse(t *testing.T, name string, members ...*pool.Member) *pool.Pool {
	p := pool.New(members, Of(name))
	entry := &pools.Entry{Name: name, Pool: p}
	pools.Default.Add(entry)
	t.Cleanup(func() {
		pools.Default.Remove(entry)
		p.Close()
	})
	return p
}

func refusal(class verdict.Class, model string, wait time.Duration) pool.Refusal {
	return pool.Refusal{Reason: pool.Reason{Class: string(class)}, Throttle: class.Promise(), Whole: class.WholeBackend(), Model: model, Wait: wait}
}

func TestSoManyCallersAreToldApart(t *testing.T) {
	var l labels
	for range 2 {
		for i := range maxLabels {
			if name := fmt.Sprint("caller-", i); l.labelOf(name) != name {
				t.Fatalf("%s is %s", name, l.labelOf(name))
			}
		}
		if got := l.labelOf("one more"); got != Other {
			t.Errorf("the next one is %s, want %s", got, Other)
		}
	}
}

// someCallers are the callers of a pool.
type someCallers struct {
	pools.Callers
	all []ratelimit.Snapshot
}

func (c someCallers) Forgotten() int64                         { return 0 }
func (c someCallers) Snapshots(time.Time) []ratelimit.Snapshot { return c.all }

func TestOfCallersThatShareALabelTheMostUsedLimitCounts(t *testing.T) {
	before := &callers
	for i := range maxLabels {
		Caller(fmt.Sprint("caller-", i))
	}
	t.Cleanup(func() { clear(before.given) })
	name := unique("others")
	limit, err := ratelimit.ParseLimit(ratelimit.Tokens, "100/day")
	if err != nil {
		t.Fatal(err)
	}
	cs := someCallers{all: []ratelimit.Snapshot{{Name: "idle", Limits: []ratelimit.Use{{Limit: limit, Allowed: 100}}}}}
	for i, tokens := range []int64{20, 80, 50} {
		cs.all = append(cs.all, ratelimit.Snapshot{Name: fmt.Sprint("further-", i), Estimated: 100, Reported: float64(tokens),
			Limits: []ratelimit.Use{{Limit: limit, Allowed: 100, Used: tokens}}})
	}
	p := pool.New(nil)
	entry := &pools.Entry{Name: name, Pool: p, Callers: cs}
	pools.Default.Add(entry)
	t.Cleanup(func() {
		pools.Default.Remove(entry)
		p.Close()
	})
	wantValues(t, name, map[string]float64{"caller_limit_used_ratio other tokens  day": .8, "caller_estimate_ratio other": 2})
}

func TestACooldownCountsAsItGoesOn(t *testing.T) {
	name := unique("goes-on")
	bubble.Test(t, func(t *testing.T) {
		m := pool.NewMember("a", new(pool.Health))
		m.Models = []string{"gpt"}
		inUse(t, name, m)
		began := time.Now()
		m.CoolDown(refusal(verdict.Throttled, "gpt", 10*time.Second), began)
		time.Sleep(4 * time.Second)
		wantValues(t, name, map[string]float64{
			"cooldown_seconds_total a throttled gpt": 4, "cooldowns_total a throttled gpt": 1,
			"backend_available a gpt": 0, "cooldown_remaining_seconds a gpt": 6, "backend_available a ": 1, "cooldown_remaining_seconds a ": 0,
			"backend_available a other": none,
		})
		m.CoolDown(refusal(verdict.Throttled, "gpt", 26*time.Second), time.Now())
		time.Sleep(4 * time.Second)
		wantValues(t, name, map[string]float64{"cooldown_seconds_total a throttled gpt": 8, "cooldowns_total a throttled gpt": 1, "cooldown_remaining_seconds a gpt": 22})
		time.Sleep(time.Minute)
		wantValues(t, name, map[string]float64{"cooldown_seconds_total a throttled gpt": 30, "backend_available a gpt": 1})
		m.CoolDown(refusal(verdict.Failed, "gpt", 10*time.Second), time.Now())
		time.Sleep(3 * time.Second)
		m.Served(pool.Scope{Model: "gpt"}, time.Now())
		time.Sleep(time.Minute)
		wantValues(t, name, map[string]float64{"cooldown_seconds_total a failed gpt": 3, "cooldown_seconds_total a throttled gpt": 30})
	})
}

func TestABackendThatCannotBeReachedCountsUntilItIs(t *testing.T) {
	name := unique("lost")
	bubble.Test(t, func(t *testing.T) {
		m := pool.NewMember("a", new(pool.Health))
		inUse(t, name, m)
		lost := refusal(verdict.Unreachable, "", 0)
		lost.Unreachable = true
		m.CoolDown(lost, time.Now())
		for _, seconds := range []float64{30, 60} { // attempts to reach it hang
			time.Sleep(30 * time.Second)
			wantValues(t, name, map[string]float64{"cooldown_seconds_total a unreachable ": seconds, "backend_available a ": 0})
		}
		m.Reached()
		time.Sleep(time.Minute)
		wantValues(t, name, map[string]float64{"cooldown_seconds_total a unreachable ": 60, "backend_available a ": 1})
	})
}

func TestTheSecondsOfACooldownNeverGoBack(t *testing.T) {
	name := unique("never-back")
	other := unique("never-back-2")
	bubble.Test(t, func(t *testing.T) {
		health := new(pool.Health)
		mine, theirs := pool.NewMember("a", health), pool.NewMember("a", health)
		p := inUse(t, name, mine)
		inUse(t, other, theirs)
		mine.CoolDown(refusal(verdict.Failed, "", 10*time.Second), time.Now())
		last := 0.0
		for i := range 40 {
			switch i {
			case 5: // another pool with the same backend finds out, which is no event for this one
				theirs.Served(pool.Scope{Model: ""}, time.Now())
			case 15: // a reload takes the pool away
				mine.CoolDown(refusal(verdict.Quota, "", 10*time.Second), time.Now())
				p.Close()
			}
			now := gather(t, name)
			sum := now["cooldown_seconds_total a failed "] + now["cooldown_seconds_total a quota "]
			if sum < last {
				t.Errorf("after %d s it went from %v to %v", i, last, sum)
			}
			last = sum
			time.Sleep(time.Second)
		}
		if last > 20 {
			t.Errorf("two cooldowns of 10 s were counted as %v s", last)
		}
	})
}

// A key that may not do one operation is for a person to mend, so that an alert
// must see it. The backend serves the others.
func TestACooldownOfAnOperationIsShownAndLeavesTheModelAvailable(t *testing.T) {
	name := unique("operation")
	bubble.Test(t, func(t *testing.T) {
		m := pool.NewMember("a", new(pool.Health))
		m.Models = []string{"gpt"}
		inUse(t, name, m)
		r := refusal(verdict.NotPermitted, "gpt", time.Minute)
		r.Operation = "/embeddings"
		m.CoolDown(r, time.Now())
		shown := map[string]float64{"backend_unavailable a  not_permitted gpt": 1, "backend_available a gpt": 1, "cooldown_remaining_seconds a gpt": 0}
		wantValues(t, name, shown)
		time.Sleep(2 * time.Minute) // nobody has shown that it is over
		wantValues(t, name, shown)
		m.Served(pool.Scope{Model: "gpt", Operation: "/embeddings"}, time.Now())
		wantValues(t, name, map[string]float64{"backend_unavailable a  not_permitted gpt": none})
	})
}

func TestACooldownOfTheWholeBackendCountsForEachModel(t *testing.T) {
	name := unique("whole")
	bubble.Test(t, func(t *testing.T) {
		m := pool.NewMember("a", new(pool.Health))
		m.Models = []string{"gpt", "embed"}
		takesAny := pool.NewMember("b", new(pool.Health))
		takesAny.AnyModel = true
		inUse(t, name, m, takesAny)
		m.CoolDown(refusal(verdict.Unreachable, "gpt", 10*time.Second), time.Now())
		takesAny.CoolDown(refusal(verdict.Throttled, "made-up", 10*time.Second), time.Now())
		takesAny.CoolDown(refusal(verdict.Failed, "", time.Minute), time.Now()) // as when files cannot be listed
		takesAny.Drain(pool.Order{})
		wantValues(t, name, map[string]float64{
			"backend_available a ": 0, "backend_available a gpt": 0, "backend_available a embed": 0,
			"backend_available b ": 1, "backend_available b other": 0, "cooldown_remaining_seconds b other": 10, "backend_available b made-up": none,
			"backend_drained a": 0, "backend_drained b": 1, "requests_in_flight a": 0,
		})
	})
}

func TestGaugesGoWithTheirBackends(t *testing.T) {
	name := unique("gauges")
	header := http.Header{"X-Ratelimit-Remaining-Tokens": {"1200"}, "X-Ratelimit-Remaining-Requests": {"-1"}, "Azure-Openai-Deployment-Utilization": {" 89.3% "}}
	m := pool.NewMember("a", new(pool.Health))
	m.Models = []string{"gpt"}
	p := pool.New([]*pool.Member{m}, Of(name))
	entry := &pools.Entry{Name: name, Pool: p}
	pools.Default.Add(entry)
	Of(name).Backend("a").Saw("gpt", verdict.ReadRates(header))
	Of(name).Backend("a").Attempted("gpt", "served")
	wantValues(t, name, map[string]float64{
		"ratelimit_remaining a gpt tokens": 1200, "ratelimit_remaining a gpt requests": none, "deployment_utilization_ratio a gpt": 0.893,
		"attempts_total a served gpt": 1,
	})
	pools.Default.Remove(entry)
	wantValues(t, name, map[string]float64{
		"ratelimit_remaining a gpt tokens": none, "deployment_utilization_ratio a gpt": none, "backend_available a gpt": none, "backend_drained a": none,
		"attempts_total a served gpt": 1,
	})
}

func TestNamesThatWouldBreakAScrapeDoNot(t *testing.T) {
	name := unique("odd\xff")
	twice := new(pool.Health)
	odd := pool.NewMember("odd\xff", new(pool.Health))
	odd.Models = []string{"m\xfe", "m\xfd", "other"}
	inUse(t, name, pool.NewMember("a:80", twice), pool.NewMember("a:80", twice), odd)
	Of(name).Backend("odd\xff").Answered(Caller("al\xffice"), "", "served", 200, time.Second, time.Second)
	wantValues(t, strings.ToValidUTF8(name, "\uFFFD"), map[string]float64{
		"backend_available a:80 ": 1, "backend_available odd\uFFFD m\uFFFD": 1, "requests_total odd\uFFFD al\uFFFDice served 200 ": 1,
		"request_duration_seconds odd\uFFFD": 1,
	})
}

func TestTokensAreCountedByBackendAndByCaller(t *testing.T) {
	name := unique("tokens")
	b := Of(name).Backend("a")
	b.Used("alice", "gpt", "gpt-ptu", "default", usage.Tokens{Input: 100, Cached: 40, Output: 7, Reasoning: 3})
	b.Used("alice", "gpt", "gpt-ptu", "default", usage.Tokens{Input: 1, Output: -5})
	b.Used("", "gpt", "gpt-ptu", "default", usage.Tokens{Input: 1000})
	b.UsedUnknown("gpt")
	wantValues(t, name, map[string]float64{
		"tokens_total a gpt-ptu gpt default input": 1101, "tokens_total a gpt-ptu gpt default cached": 40, "tokens_total a gpt-ptu gpt default output": 7, "tokens_total a gpt-ptu gpt default reasoning": 3,
		"caller_tokens_total alice gpt default input": 101, "caller_tokens_total alice gpt default output": 7, "tokens_unknown_total a gpt": 1, "caller_tokens_total  gpt default input": none,
	})
}

func TestCountingAllocatesNothing(t *testing.T) {
	b, header := Of("allocates").Backend("a"), http.Header{"X-Ratelimit-Remaining-Tokens": {"1200"}, spilledFrom: {"gpt-ptu"}, spilledError: {"429"}}
	count := func() {
		b.Attempted("gpt", "throttled")
		b.FailedOver("throttled")
		b.Throttled("retry-after-ms")
		b.Saw("gpt", verdict.ReadRates(header))
		b.Spilled("gpt", &http.Response{StatusCode: 200, Header: header})
		b.ServiceTier("priority", "default")
		b.Answered("alice", "gpt", "served", 200, time.Second, time.Second)
		b.Used("alice", "gpt", "gpt-ptu", "default", usage.Tokens{Input: 100, Output: 7})
		Of("allocates").Attempts(2)
	}
	count()
	if n := testing.AllocsPerRun(100, count); n > 0 {
		t.Errorf("counting a request allocates %v times", n)
	}
}

// bounded sets the bound of a metric to this many more series, for one test.
func bounded(t *testing.T, b *bound, more int64) {
	t.Helper()
	before := b.limit.Swap(b.used.Load() + more)
	t.Cleanup(func() { b.limit.Store(before) })
}

func valueOf(t *testing.T, c prometheus.Counter) float64 {
	t.Helper()
	var m dto.Metric
	if err := c.Write(&m); err != nil {
		t.Fatal(err)
	}
	return m.GetCounter().GetValue()
}

func TestOfTooManySeriesTheModelIsGivenUpFirstAndThenTheCaller(t *testing.T) {
	name := unique("many")
	bounded(t, requestsBound, 10)
	most := requestsBound.limit.Load()
	b := Of(name).Backend("a")
	t.Cleanup(func() { Forget(name, "a") }) // or each later scrape has them
	merged := valueOf(t, requestsBound.merged)
	for range 2 {
		for i := range int(2 * most) {
			b.Answered("alice", fmt.Sprint("gpt-", i), "served", 200, 0, 0)
			b.Answered(fmt.Sprint("caller-", i), "gpt", "served", 200, 0, 0)
		}
	}
	sum, kinds := 0.0, make(map[string]int)
	for key, value := range gather(t, name) {
		if its, ok := strings.CutPrefix(key, "requests_total "); ok {
			sum += value
			labels := strings.Fields(its) // backend, caller, class, code, model
			switch caller, model := labels[1], labels[4]; {
			case caller == Other && model == Other:
				kinds["neither"]++
			case model == Other:
				kinds["without its model"]++
			case caller != Other:
				kinds["both"]++
			}
		}
	}
	if sum != float64(8*most) {
		t.Errorf("%v requests were counted, want %d", sum, 8*most)
	}
	if kinds["both"] != 10 || kinds["without its model"] != int(most/2) || kinds["neither"] != 1 {
		t.Errorf("there are %v series, with %d more and then %d", kinds, 10, most/2)
	}
	if n := valueOf(t, requestsBound.merged) - merged; n != float64(8*most-20) {
		t.Errorf("a metric says that %v were merged", n)
	}
	Forget(name, "a")
	if used := requestsBound.used.Load(); used != most-10 {
		t.Errorf("%d series are left of %d", used, most-10)
	}
}

func TestTokensOfACallerAreCountedWithoutBackends(t *testing.T) {
	name := unique("tokens")
	bounded(t, callerTokensBound, 3)
	for _, backend := range []string{"a", "b", "c", "d", "e"} {
		for _, model := range []string{"gpt-1", "gpt-2", "gpt-3", "gpt-4", "gpt-5"} {
			Of(name).Backend(backend).Used("alice", model, "d", "default", usage.Tokens{Input: 1})
		}
	}
	wantValues(t, name, map[string]float64{
		"caller_tokens_total alice gpt-3 default input": 5,
		"caller_tokens_total alice gpt-4 default input": none,
		"caller_tokens_total alice other default input": 10,
	})
}

// A new series copies all others a few times in the life of the process, and
// not each time.
func TestANewSeriesCostsLittle(t *testing.T) {
	var s series[int, *int]
	s.find = func(int) *int { return new(int) }
	i := 0
	for ; i < 5000; i++ {
		s.getOrAdd(i)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for ; i < 10_000; i++ {
		*s.getOrAdd(i)++
	}
	runtime.ReadMemStats(&after)
	if each := (after.TotalAlloc - before.TotalAlloc) / 5000; each > 1000 {
		t.Errorf("a new series takes %d bytes", each)
	}
	for ; i > 5000; i-- {
		if n := *s.getOrAdd(i - 1); n != 1 {
			t.Fatalf("series %d has %d", i-1, n)
		}
	}
}

// BenchmarkNewSeries is what each of 1,000 new series costs.
func BenchmarkNewSeries(b *testing.B) {
	s, counter := new(series[answer, *int]), new(int)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if i%1000 == 0 {
			s = &series[answer, *int]{find: func(answer) *int { return counter }}
		}
		s.getOrAdd(answer{demand{"alice", "gpt"}, "served", i % 1000})
	}
}

// Clients can make up any number of models.
func TestMadeUpModelsAreOneEntryOfTheSecondsOfCooldowns(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		name, m := unique("made-up"), pool.NewMember("a", new(pool.Health))
		m.Models, m.AnyModel = []string{"gpt"}, true
		inUse(t, name, m)
		coolDown := func(model string, wait time.Duration) {
			m.CoolDown(pool.Refusal{Reason: pool.Reason{Class: "no_model"}, Model: model, Wait: wait}, time.Now())
		}
		before := len(cooldowns.inForce)
		for i := range 10_000 {
			coolDown(fmt.Sprint("made-up-", i), time.Minute)
		}
		coolDown("gpt", time.Minute)
		if n := len(cooldowns.inForce) - before; n != 2 {
			t.Errorf("there are %d entries without a scrape", n)
		}
		time.Sleep(10 * time.Second)
		coolDown("short", time.Second)
		wantValues(t, name, map[string]float64{"cooldown_seconds_total a no_model other": 10, "cooldown_seconds_total a no_model gpt": 10})
		time.Sleep(time.Hour)
		wantValues(t, name, map[string]float64{"cooldown_seconds_total a no_model other": 60, "cooldown_seconds_total a no_model gpt": 60})
	})
}

func TestAScrapeRemembersNothingOfDeploymentsWithoutTraffic(t *testing.T) {
	name, m := unique("idle"), pool.NewMember("a", new(pool.Health))
	for i := range 10 {
		m.Models = append(m.Models, fmt.Sprint("gpt-", i))
	}
	inUse(t, name, m)
	b := Of(name).Backend("a")
	b.Saw("gpt-1", verdict.ReadRates(http.Header{"X-Ratelimit-Remaining-Tokens": {"1200"}, "Azure-Openai-Deployment-Utilization": {"50"}}))
	wantValues(t, name, map[string]float64{"ratelimit_remaining a gpt-1 tokens": 1200, "ratelimit_remaining a gpt-2 tokens": none, "backend_available a gpt-9": 1})
	if got := b.Utilization(m); len(got) != 1 || got["gpt-1"] != .5 {
		t.Errorf("got %v", got)
	}
	if n := len(*b.last.known.Load()); n != 1 {
		t.Errorf("%d deployments are kept", n)
	}
}

// BenchmarkCount is what counting a request costs that one backend refused and
// another one served.
func BenchmarkCount(b *testing.B) {
	first, second := Of("benchmark").Backend("a"), Of("benchmark").Backend("b")
	header := http.Header{"X-Ratelimit-Remaining-Tokens": {"1200"}, "X-Ratelimit-Remaining-Requests": {"12"}}
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			first.Attempted("gpt", "throttled")
			first.Throttled("retry-after-ms")
			first.Saw("gpt", verdict.ReadRates(header))
			first.FailedOver("throttled")
			second.Attempted("gpt", "served")
			second.Saw("gpt", verdict.ReadRates(header))
			second.Answered("alice", "gpt", "served", 200, time.Second, time.Second)
			second.Used("alice", "gpt", "gpt-ptu", "default", usage.Tokens{Input: 100, Output: 7})
			first.pool.Attempts(2)
		}
	})
}
