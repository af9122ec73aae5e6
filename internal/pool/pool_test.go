package pool

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/latency"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// asks is a request for a model, which may go to each member once.
type asks struct {
	model string
	cost  int64
	tried []*Member
	// once reports whether it can be sent only once.
	once bool
	kind latency.Kind
	tier quota.Tier
	// affinity is that of the request.
	affinity Affinity
	// steered are the members that it passed over.
	steered []string
}

// of is what the request asks of the pool.
func (a *asks) of(p *Pool) *Ask {
	ask := &Ask{Cost: a.cost, Once: a.once, Kind: a.kind, Tier: a.tier, Affinity: a.affinity}
	for _, m := range p.Members {
		at := At{Model: ModelKey(a.model), Takes: true}
		if slices.Contains(a.tried, m) {
			at.Bar = Spent
		}
		ask.At = append(ask.At, at)
	}
	return ask
}

// testPool is a pool that requests of tests ask.
type testPool struct {
	*Pool
	// policy is that of its requests.
	policy *func([]*Member) *Member
}

func (p testPool) Pick(r *asks, now time.Time) *Member {
	ask := r.of(p.Pool)
	ask.Policy, ask.Weights = *p.policy, p.Weights(r.model, now)
	m := p.Pool.Pick(ask, now)
	r.affinity = ask.Affinity
	for _, other := range ask.Steered {
		r.steered = append(r.steered, other.Name)
	}
	return m
}

// events is a Listener that keeps what it is told.
type events []string

func (e *events) Happened(event Event) {
	word := map[Happening]string{Began: "began", Grew: "grew", Ended: "ended", Drained: "drained", Resumed: "resumed", WasReset: "reset", Doubted: "doubted", Disproved: "disproved"}[event.Happening]
	if event.Remote {
		word += " elsewhere"
	}
	if event.Cooldown.Until.IsZero() {
		*e = append(*e, event.Member.Name+" "+word)
		return
	}
	*e = append(*e, fmt.Sprint(event.Member.Name, " ", word, " ", event.Cooldown.Class, " ", event.Cooldown.Until.Sub(start)))
}

var start = time.Date(2026, 10, 21, 7, 28, 0, 0, time.UTC)

// at is so many seconds after the start.
func at(seconds float64) time.Time { return start.Add(time.Duration(seconds * float64(time.Second))) }

// poolOf makes a pool of members, each given as name:priority:weight.
func poolOf(t testing.TB, members ...string) (testPool, map[string]*Member, *events) {
	t.Helper()
	heard := new(events)
	p, byName := poolThatTells(t, members, heard)
	return p, byName, heard
}

// poolThatTells has these listeners. Its timer is real, although a test may use
// other times.
func poolThatTells(t testing.TB, members []string, listeners ...Listener) (testPool, map[string]*Member) {
	t.Helper()
	byName := make(map[string]*Member)
	all := make([]*Member, len(members))
	for i, text := range members {
		name, rank, _ := strings.Cut(text, ":")
		m := NewMember(name, new(Health))
		if _, err := fmt.Sscanf(rank, "%d:%d", &m.Priority, &m.Weight); rank != "" && err != nil {
			t.Fatal(err)
		}
		all[i], byName[name] = m, m
	}
	p := New(all, listeners...)
	t.Cleanup(p.Close) // or its timer goes off in another test
	Random = seeded(1, 2)
	return testPool{p, new(func([]*Member) *Member)}, byName
}

// seeded returns a source of random numbers for many goroutines, which are the
// same in each run.
func seeded(seed1, seed2 uint64) func() float64 {
	var mu sync.Mutex
	source := rand.New(rand.NewPCG(seed1, seed2))
	return func() float64 {
		mu.Lock()
		defer mu.Unlock()
		return source.Float64()
	}
}

func throttle(seconds float64, cost int64) Refusal {
	return Refusal{Reason: Reason{Class: "throttled", Status: 429}, Throttle: true, Model: "m", Cost: cost, Wait: time.Duration(seconds * float64(time.Second))}
}

func failure(seconds float64) Refusal {
	return Refusal{Reason: Reason{Class: "failed", Status: 500}, Model: "m", Wait: time.Duration(seconds * float64(time.Second))}
}

// picks tells whom a request of this cost gets at a time, or "nobody".
func picks(p testPool, cost int64, now time.Time) string {
	if m := p.Pick(&asks{model: "m", cost: cost}, now); m != nil {
		return m.Name
	}
	return "nobody"
}

func wantPick(t *testing.T, p testPool, cost int64, now time.Time, want string) {
	t.Helper()
	if got := picks(p, cost, now); got != want {
		t.Errorf("after %v a request of cost %d got %s, want %s", now.Sub(start), cost, got, want)
	}
}

func TestWeightsAreSharesOfTheBestPriority(t *testing.T) {
	p, members, _ := poolOf(t, "c:2:5", "a:1:3", "b:1:1", "d:1:0")
	shares := func() map[string]int {
		counts := make(map[string]int)
		for range 4000 {
			counts[picks(p, 1, start)]++
		}
		return counts
	}
	got := shares()
	if got["a"] < 2900 || got["a"] > 3100 || got["a"]+got["b"] != 4000 {
		t.Errorf("shares are %v, want 3 to 1 for a and b", got)
	}
	members["a"].CoolDown(throttle(10, 1), start)
	if got := shares(); !maps.Equal(got, map[string]int{"b": 4000}) {
		t.Errorf("shares are %v, want all for b", got)
	}
	members["b"].CoolDown(throttle(10, 1), start)
	if got := shares(); !maps.Equal(got, map[string]int{"c": 4000}) {
		t.Errorf("shares are %v, want all for c", got)
	}
	members["c"].CoolDown(failure(10), start)
	if got := shares(); !maps.Equal(got, map[string]int{"d": 4000}) {
		t.Errorf("shares are %v, want all for the drained d rather than the suspect c", got)
	}
	members["d"].CoolDown(throttle(10, 1), start)
	if got := shares(); !maps.Equal(got, map[string]int{"c": 4000}) {
		t.Errorf("shares are %v, want all for the suspect c", got)
	}
}

// TestMembersThatAreLeftOutDoNotChangeTheOtherShares as a request that was for
// one of them is shared by weight, too.
func TestMembersThatAreLeftOutDoNotChangeTheOtherShares(t *testing.T) {
	p, members, _ := poolOf(t, "cooling:1:4", "a:1:1", "full:1:3", "b:1:2", "drained:1:0", "c:1:3", "d:2:1")
	p.Steers = true
	members["cooling"].CoolDown(throttle(10, 1), start)
	says(members["full"], 0, 0, start)
	counts := make(map[string]int)
	for range 6000 {
		counts[picks(p, 1, start)]++
	}
	for name, want := range map[string]int{"a": 1000, "b": 2000, "c": 3000} {
		if got := counts[name]; got < want-120 || got > want+120 {
			t.Errorf("%s gets %d of 6000 requests, want %d", name, got, want)
		}
	}
	if len(counts) != 3 {
		t.Errorf("shares are %v, want only those of a, b and c", counts)
	}
}

func TestSuspectsShareByPriorityAndWeight(t *testing.T) {
	p, members, _ := poolOf(t, "a:1:1", "b:1:2", "c:2:1")
	for _, m := range members {
		m.CoolDown(failure(10), start)
	}
	counts := make(map[string]int)
	for range 3000 {
		counts[picks(p, 1, at(1))]++
	}
	if counts["c"] != 0 || counts["a"] < 900 || counts["a"] > 1100 {
		t.Errorf("shares are %v, want 1 to 2 for a and b", counts)
	}
}

func TestAThrottleHoldsToTheEndAndThenOneRequestGoesFirst(t *testing.T) {
	p, members, heard := poolOf(t, "a:1:1", "b:2:1")
	members["a"].CoolDown(throttle(9, 1), start)
	wantPick(t, p, 1, at(8.999), "b")
	wantPick(t, p, 1, at(9), "a")     // the probe
	wantPick(t, p, 1, at(9.8), "b")   // waits for it
	wantPick(t, p, 1, at(9.901), "a") // a tenth of 9 s passed in silence
	if want := []string{"a began throttled 9s", "a ended throttled 9s"}; !slices.Equal(*heard, want) {
		t.Errorf("heard %q, want %q", *heard, want)
	}
}

func TestNobodyWaitsForAProbeWhileNobodyElseIsLeft(t *testing.T) {
	p, members, _ := poolOf(t, "a", "b")
	for _, m := range members {
		m.CoolDown(throttle(10, 1), start)
	}
	wantPick(t, p, 1, at(9.9), "nobody")
	for range 10 {
		if got := picks(p, 1, at(10)); got == "nobody" {
			t.Fatal("a request waited although the time of all was over")
		}
	}
}

func TestACooldownOnlyGrows(t *testing.T) {
	p, members, heard := poolOf(t, "a")
	a := members["a"]
	if !a.CoolDown(throttle(10, 1), start) || a.CoolDown(throttle(3, 1), at(1)) || a.CoolDown(throttle(15, 1), at(2)) {
		t.Error("only the first refusal starts the cooldown")
	}
	wantPick(t, p, 1, at(16.9), "nobody")
	// an attempt that began before the extension does not end it
	a.Served(Scope{Model: "m"}, at(1))
	wantPick(t, p, 1, at(3), "nobody")
	a.Served(Scope{Model: "m"}, at(2.5))
	wantPick(t, p, 1, at(4), "a")
	if want := []string{"a began throttled 10s", "a grew throttled 17s", "a disproved throttled 17s", "a ended throttled 17s"}; !slices.Equal(*heard, want) {
		t.Errorf("heard %q, want %q", *heard, want)
	}
}

func TestACooldownIsForItsModelOrForAll(t *testing.T) {
	p, members, _ := poolOf(t, "a")
	members["a"].CoolDown(throttle(10, 1), start)
	if m := p.Pick(&asks{model: "other"}, start); m == nil {
		t.Error("another model is cooling down as well")
	}
	if usable, _ := p.Usable(start); !usable {
		t.Error("a member is unusable for one model's sake")
	}
	whole := throttle(20, 1)
	whole.Whole = true
	members["a"].CoolDown(whole, start)
	if m := p.Pick(&asks{model: "other"}, start); m != nil {
		t.Error("a model is served by a member that is cooling down as a whole")
	}
	if usable, wait := p.Usable(at(5)); usable || wait != 15*time.Second {
		t.Errorf("usable %v in %v, want in 15s", usable, wait)
	}
	if wait := p.Wait((&asks{model: "m"}).of(p.Pool), at(5)); wait != 15*time.Second {
		t.Errorf("the soonest return is in %v, want 15s", wait)
	}
}

func TestDoubtLetsOneMuchSmallerRequestCheck(t *testing.T) {
	p, members, _ := poolOf(t, "a")
	a := members["a"]
	a.CoolDown(throttle(60, 100_000), start)
	wantPick(t, p, 10, at(1), "nobody") // no doubt yet
	a.Doubt(false, Scope{Model: "m"}, start)
	wantPick(t, p, 25_001, at(1), "nobody")
	wantPick(t, p, 25_000, at(1), "a")
	wantPick(t, p, 10, at(1.5), "nobody") // one is checking
	wantPick(t, p, 10, at(2.1), "a")      // silence is consent
	wantPick(t, p, 90_000, at(2.1), "nobody")
	a.Served(Scope{Model: "m"}, at(1))
	wantPick(t, p, 90_000, at(3), "a")
}

func TestOneRequestAtATimeChecksASuspectToo(t *testing.T) {
	p, members, _ := poolOf(t, "a")
	a := members["a"]
	a.CoolDown(failure(60), start)
	a.CoolDown(throttle(60, 100_000), start)
	a.Doubt(false, Scope{Model: "m"}, start)
	wantPick(t, p, 10, at(1), "a")
	wantPick(t, p, 10, at(1.5), "nobody")
	wantPick(t, p, 10, at(2.1), "a")
}

func TestARefusedCheckEndsTheDoubt(t *testing.T) {
	p, members, _ := poolOf(t, "a")
	a := members["a"]
	a.CoolDown(throttle(60, 100_000), start)
	a.Doubt(false, Scope{Model: "m"}, start)
	wantPick(t, p, 1000, at(1), "a")
	if a.CoolDown(throttle(30, 1000), at(1)) {
		t.Error("a refused check starts a cooldown")
	}
	a.Doubt(false, Scope{Model: "m"}, start)
	wantPick(t, p, 10, at(5), "nobody")
	wantPick(t, p, 10, at(59), "nobody")
	wantPick(t, p, 10, at(60), "a")
}

func TestDoubtOfTheWholeBackendCountsForEveryModel(t *testing.T) {
	p, members, _ := poolOf(t, "a")
	a := members["a"]
	quota := Refusal{Throttle: true, Whole: true, Model: "other", Cost: 100_000, Wait: time.Minute}
	a.CoolDown(quota, start)
	wantPick(t, p, 10, at(1), "nobody")
	a.Doubt(true, Scope{Model: "other"}, start)
	wantPick(t, p, 25_001, at(1), "nobody")
	wantPick(t, p, 10, at(1), "a")
	quota.Cost = 10
	a.CoolDown(quota, at(1))
	wantPick(t, p, 1, at(5), "nobody") // the check was refused
}

func TestRequestsOfOneSizeCheckNothing(t *testing.T) {
	for _, cost := range []int64{0, 1, 3, 500} {
		p, members, _ := poolOf(t, "a")
		members["a"].CoolDown(throttle(60, cost), start)
		members["a"].Doubt(false, Scope{Model: "m"}, start)
		wantPick(t, p, cost, at(1), "nobody")
	}
}

func TestALargerRefusalDoesNotEndTheDoubt(t *testing.T) {
	p, members, _ := poolOf(t, "a")
	a := members["a"]
	a.CoolDown(throttle(60, 100_000), start)
	a.Doubt(false, Scope{Model: "m"}, start)
	a.CoolDown(throttle(70, 50_000), at(1)) // of another huge one that was on its way
	wantPick(t, p, 12_501, at(2), "nobody")
	wantPick(t, p, 12_500, at(2), "a")
}

func TestAModelThatIsNoUTF8StaysApartFromOthers(t *testing.T) {
	p, members, _ := poolOf(t, "a")
	odd := throttle(60, 1)
	odd.Model = "m\xff"
	members["a"].CoolDown(odd, start)
	wantPick(t, p, 1, at(1), "a") // m itself
	if m := p.Pick(&asks{model: "m\xff", cost: 1}, at(1)); m != nil {
		t.Error("the model is not cooling down")
	}
}

func TestWhatIsLearnedFromStrangersNamesGoesFirst(t *testing.T) {
	p, members, _ := poolOf(t, "a:1:1", "b:2:1")
	a := members["a"]
	a.Served(Scope{Model: "m"}, start)
	a.CoolDown(failure(10), start)
	for n := range 10 * tableSets * setSize {
		made := failure(60)
		made.Model = fmt.Sprint(n, strings.Repeat("x", 3*maxModelName))
		a.CoolDown(made, start)
	}
	wantPick(t, p, 1, at(1), "b")
	count := 0
	for i := range a.health.models.sets.Load() {
		for j := range a.health.models.sets.Load()[i] {
			if b := a.health.models.sets.Load()[i][j].Load(); b == nil {
				break
			} else if len(b.scope.Model) > maxModelName {
				t.Errorf("a name of %d bytes is remembered", len(b.scope.Model))
			}
			count++
		}
	}
	if most := tableSets * setSize; count > most || count < most*9/10 {
		t.Errorf("%d models are remembered, want nearly %d", count, most)
	}
}

func TestPlacesAreLimitedAndGivenBack(t *testing.T) {
	p, members, _ := poolOf(t, "a:1:1", "b:2:1")
	members["a"].MaxRequests = 2
	var got []string
	for range 3 {
		got = append(got, picks(p, 1, start))
	}
	members["a"].Release()
	got = append(got, picks(p, 1, start))
	if want := []string{"a", "a", "b", "a"}; !slices.Equal(got, want) {
		t.Errorf("picked %v, want %v", got, want)
	}
}

func TestAPolicyChoosesWithinItsTier(t *testing.T) {
	p, members, _ := poolOf(t, "a:1:1", "b:1:1", "c:2:1")
	var tiers []string
	*p.policy = func(tier []*Member) *Member {
		names := ""
		for _, m := range tier {
			names += m.Name
		}
		tiers = append(tiers, names)
		return tier[len(tier)-1]
	}
	wantPick(t, p, 1, start, "b")
	members["b"].CoolDown(throttle(10, 1), start)
	wantPick(t, p, 1, start, "a")
	members["a"].CoolDown(failure(10), start)
	wantPick(t, p, 1, start, "c")
	if want := []string{"ab", "a", "c"}; !slices.Equal(tiers, want) {
		t.Errorf("the policy saw %q, want %q", tiers, want)
	}
}

func TestANewIdentityStartsFresh(t *testing.T) {
	p, members, _ := poolOf(t, "a")
	a := members["a"]
	a.StartFresh("one")
	a.CoolDown(throttle(60, 1), start)
	a.StartFresh("one")
	wantPick(t, p, 1, at(1), "nobody")
	a.StartFresh("two")
	wantPick(t, p, 1, at(1), "a")
}

// sixteen is a pool of 16 members in 3 tiers, of which one has a cooldown.
func sixteen(t testing.TB) testPool {
	members := make([]string, 16)
	for i := range members {
		members[i] = fmt.Sprintf("%c:%d:%d", 'a'+i, 1+i/6, 1+i)
	}
	p, byName, _ := poolOf(t, members...)
	Random = rand.Float64
	for _, m := range byName {
		m.Served(Scope{Model: "m"}, start)
	}
	byName["b"].CoolDown(throttle(60, 1), start)
	return p
}

// BenchmarkPick stands beside the promise that a pick is cheap, allocates
// nothing and waits for nobody.
func BenchmarkPick(b *testing.B) {
	p := sixteen(b)
	b.Run("alone", func(b *testing.B) {
		b.ReportAllocs()
		r := (&asks{model: "m", cost: 1}).of(p.Pool)
		for b.Loop() {
			p.Pool.Pick(r, start)
		}
	})
	// with a tier beyond its share, and a reading at each member, by which
	// enough is left
	b.Run("share", func(b *testing.B) {
		b.ReportAllocs()
		half := http.Header{"Azure-Openai-Deployment-Utilization": {"50%"}}
		for _, m := range p.Members {
			m.Quota("m").Ask(2, start)
			m.Quota("m").DeductFor(1, 1, start)
			m.Quota("m").See(quota.Reply{Rates: verdict.ReadRates(half), Sent: start}, "m", start)
		}
		r := (&asks{model: "m", cost: 1, tier: quota.Tier{Number: 1, Shares: &quota.Shares{1: .5, 2: .2}}}).of(p.Pool)
		for b.Loop() {
			p.Pool.Pick(r, start)
		}
	})
	b.Run("refused", func(b *testing.B) { // the tier is beyond its share, and all members are full
		b.ReportAllocs()
		p := sixteen(b)
		for _, m := range p.Members {
			deductFor(m, map[int]int64{1: 1, 2: 2})
		}
		r := (&asks{model: "m", cost: 1, tier: quota.Tier{Number: 2, Shares: sharesOf}}).of(p.Pool)
		now := start
		for b.Loop() {
			p.Pool.Pick(r, now)
			now = now.Add(time.Nanosecond)
		}
	})
	b.Run("parallel", func(b *testing.B) {
		b.ReportAllocs()
		b.RunParallel(func(pb *testing.PB) {
			r := (&asks{model: "m", cost: 1}).of(p.Pool)
			for pb.Next() {
				p.Pool.Pick(r, start)
			}
		})
	})
}

// BenchmarkMadeUpNames starts a cooldown for a name that was never seen, as
// clients can make it happen.
func BenchmarkMadeUpNames(b *testing.B) {
	m := NewMember("a", new(Health))
	for i := range 10 {
		m.Models = append(m.Models, fmt.Sprint("model-", i))
	}
	New([]*Member{m})
	made := failure(60)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		made.Model = fmt.Sprint("made-up-", i)
		m.CoolDown(made, start)
	}
}

// All models of a config keep their cooldowns, whatever clients make up.
func TestMadeUpNamesTakeNoPlaceOfTheModelsInAConfig(t *testing.T) {
	p, members, _ := poolOf(t, "a:1:1")
	a := members["a"]
	for i := range 200 {
		a.Models = append(a.Models, fmt.Sprint("model-", i))
	}
	for i, model := range a.Models {
		r := throttle(60, 1)
		r.Model = model
		a.CoolDown(r, start)
		for n := range 100 {
			r.Model = fmt.Sprint("made-up-", i, "-", n)
			r.Wait = time.Hour
			a.CoolDown(r, start)
		}
	}
	for _, model := range a.Models {
		if m := p.Pick(&asks{model: model, cost: 1}, at(1)); m != nil {
			t.Errorf("%s is not cooling down", model)
		}
	}
}

func TestAPickAllocatesNothing(t *testing.T) {
	p := sixteen(t)
	r := (&asks{model: "m", cost: 1}).of(p.Pool)
	if n := testing.AllocsPerRun(1000, func() { p.Pool.Pick(r, start) }); n != 0 {
		t.Errorf("a pick allocates %v times", n)
	}
}

func TestARequestThatCanBeSentOnceIsNoProbeWhileAnotherMemberIsReady(t *testing.T) {
	p, members, _ := poolOf(t, "a:1:1", "b:2:1", "c:3:1")
	wantOnce := func(now time.Time, want string) {
		t.Helper()
		got := "nobody"
		if m := p.Pick(&asks{model: "m", cost: 1, once: true}, now); m != nil {
			got = m.Name
		}
		if got != want {
			t.Errorf("after %v it got %s, want %s", now.Sub(start), got, want)
		}
	}
	members["a"].CoolDown(failure(5), start)
	wantOnce(at(1), "b")
	wantOnce(at(6), "b")          // the probe is due
	wantPick(t, p, 1, at(6), "a") // it is another request
	wantOnce(at(6), "b")
	wantOnce(at(6.6), "a") // which was not refused by then
	// a probe that is due is better than a suspect
	members["a"].Reset(Order{})
	members["a"].CoolDown(failure(5), start)
	members["b"].CoolDown(failure(60), start)
	members["c"].CoolDown(throttle(60, 1), start)
	wantOnce(at(6), "a")
	// a member to which only such requests go comes back
	members["a"].Reset(Order{})
	members["b"].Reset(Order{})
	members["a"].CoolDown(failure(5), start)
	wantOnce(at(64), "b")
	wantOnce(at(66), "a")
}

// A request that was refused was not executed.
func TestARequestThatCanBeSentOnceIsTheProbeAfterARefusal(t *testing.T) {
	p, members, _ := poolOf(t, "a:1:1", "b:2:1")
	a := members["a"]
	once := &asks{model: "m", cost: 1, once: true}
	overloaded := failure(0.3)
	overloaded.Class, overloaded.Status = "overloaded", 503
	wholeBackend := throttle(0.3, 1)
	wholeBackend.Whole = true
	for _, r := range []Refusal{throttle(0.3, 1), wholeBackend, overloaded} {
		a.CoolDown(r, start)
		if m := p.Pick(once, at(0.2)); m == nil || m.Name != "b" {
			t.Errorf("before the end of %+v it got %v", r, m)
		}
		if m := p.Pick(once, at(0.31)); m != a {
			t.Errorf("after the end of %+v it got %v", r, m)
		}
		if m := p.Pick(once, at(0.32)); m == a {
			t.Errorf("after %+v a second request is a probe", r)
		}
		a.Reset(Order{})
	}
	// a body that can be sent only once waits for another probe, but not for
	// long
	a.CoolDown(throttle(5, 1), start)
	streamed := once.of(p.Pool)
	streamed.Streamed = true
	for now, want := range map[float64]string{5.1: "b", 14.9: "b", 15.1: "a"} {
		if m := p.Pool.Pick(streamed, at(now)); m == nil || m.Name != want {
			t.Errorf("after %v s, a long body gets %v, want %s", now, m, want)
		}
		a.Reset(Order{})
		a.CoolDown(throttle(5, 1), start)
	}
	a.Reset(Order{})
	// a failure in between, which may have been executed
	a.CoolDown(overloaded, start)
	failed := failure(0.3)
	failed.Class, failed.Status = "failed", 500
	a.CoolDown(failed, start)
	if m := p.Pick(once, at(0.31)); m == a {
		t.Error("after a failure it is a probe")
	}
	// a check of a cooldown in doubt is a probe, too
	a.Reset(Order{})
	a.CoolDown(throttle(600, 100), start)
	a.Doubt(false, Scope{Model: "m"}, start)
	if m := p.Pick(once, at(1)); m != a {
		t.Errorf("a check goes to %v", m)
	}
}
