package pool

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/quota"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// says has a member reply with what is left of 1000 tokens and 60 requests a
// minute, to a request that was just sent.
func says(m *Member, remainingRequests, remainingTokens int, now time.Time) {
	m.health.rememberServed("m")
	m.Quota("m").See(quota.Reply{Mark: m.Deduct("m", 0), Sent: now, Rates: verdict.ReadRates(http.Header{
		"X-Ratelimit-Limit-Requests": {"60"}, "X-Ratelimit-Remaining-Requests": {strconv.Itoa(remainingRequests)}, "X-Ratelimit-Reset-Requests": {"10"},
		"X-Ratelimit-Limit-Tokens": {"1000"}, "X-Ratelimit-Remaining-Tokens": {strconv.Itoa(remainingTokens)}, "X-Ratelimit-Reset-Tokens": {"60"},
	})}, "m", now)
}

// wantShares checks which members get requests of this cost.
func wantShares(t *testing.T, p testPool, cost int64, now time.Time, want ...string) {
	t.Helper()
	var got []string
	for range 100 {
		m := p.Pick(&asks{model: "m", cost: cost}, now)
		m.Release()
		got = append(got, m.Name)
	}
	slices.Sort(got)
	if got = slices.Compact(got); !slices.Equal(got, want) {
		t.Errorf("requests of %d tokens go to %v, want %v", cost, got, want)
	}
}

func TestAMemberWithoutRoomIsPassedOver(t *testing.T) {
	p, m, _ := poolOf(t, "a:1:1", "b:1:1", "c:1:1", "d:2:1")
	p.Steers = true
	wantShares(t, p, 100, start, "a", "b", "c")
	says(m["a"], 5, 99, start)
	wantShares(t, p, 100, start, "b", "c")
	wantShares(t, p, 99, start, "a", "b", "c") // a smaller request has room
	says(m["b"], 0, 900, start)
	wantShares(t, p, 100, start, "c")
	says(m["c"], 5, 50, start)
	wantShares(t, p, 100, start, "a", "b", "c") // never the worse priority
	wantShares(t, p, 99, start, "a")
	wantShares(t, p, 100, at(10), "b") // b's window of requests is over
	wantShares(t, p, 100, at(60), "a", "b", "c")
	p.Steers = false
	wantShares(t, p, 100, start, "a", "b", "c")
}

func TestAMemberWithoutRoomIsTakenBeforeASuspectOrADrainedOne(t *testing.T) {
	p, m, _ := poolOf(t, "a:1:1", "suspect:1:1", "drained:1:0")
	p.Steers = true
	m["suspect"].CoolDown(failure(60), start)
	says(m["a"], 0, 0, start)
	wantShares(t, p, 100, start, "a")
	m["a"].CoolDown(throttle(60, 1), start)
	wantShares(t, p, 100, start, "drained")

	p, m, _ = poolOf(t, "a:1:0", "worse:2:0") // both are drained
	p.Steers = true
	says(m["a"], 0, 0, start)
	wantShares(t, p, 100, start, "a")
}

func TestARequestRecordsWhomItPassedOver(t *testing.T) {
	p, m, _ := poolOf(t, "a:1:1", "b:1:1", "c:1:1", "d:2:1", "cooling:1:1")
	p.Steers = true
	for _, name := range []string{"a", "c", "d", "cooling"} {
		says(m[name], 0, 0, start)
	}
	m["cooling"].CoolDown(throttle(60, 1), start)
	Random = func() float64 { return 0 } // each request is first for a
	r := &asks{model: "m", cost: 1}
	if got := p.Pick(r, start); got != m["b"] || !slices.Equal(r.steered, []string{"a", "c"}) {
		t.Errorf("it went to %s, past %v", got.Name, r.steered)
	}
	m["c"].CoolDown(throttle(60, 1), start)
	r = &asks{model: "m", cost: 1}
	if p.Pick(r, start); !slices.Equal(r.steered, []string{"a"}) {
		t.Errorf("it passed %v over, want a", r.steered)
	}
	says(m["b"], 0, 0, start)
	r = &asks{model: "m", cost: 1}
	if p.Pick(r, start); r.steered != nil {
		t.Errorf("it passed %v over, but no member has room", r.steered)
	}
	says(m["b"], 5, 900, start)
	Random = func() float64 { return .3 } // for b
	r = &asks{model: "m", cost: 1}
	if got := p.Pick(r, start); got != m["b"] || r.steered != nil {
		t.Errorf("it went to %s, past %v", got.Name, r.steered)
	}
}

func TestAPolicyChoosesAmongMembersWithRoom(t *testing.T) {
	p, m, _ := poolOf(t, "a:1:1", "b:1:1", "c:1:1")
	p.Steers = true
	var offered []string
	*p.policy = func(members []*Member) *Member {
		offered = nil
		for _, m := range members {
			offered = append(offered, m.Name)
		}
		return members[0]
	}
	says(m["a"], 0, 0, start)
	p.Pick(&asks{model: "m", cost: 1}, start)
	if !slices.Equal(offered, []string{"b", "c"}) {
		t.Errorf("the policy chooses among %v", offered)
	}
}

func TestAKeyLeavesAMemberWithoutRoomAsItLeavesOneThatThrottles(t *testing.T) {
	p, m, _ := poolOf(t, "a:1:1", "b:1:1", "c:1:1")
	p.Steers, p.Relocations = true, new(Relocations)
	pick := func(now time.Time) (*Member, Result) {
		r := &asks{model: "m", cost: 100, affinity: Affinity{Key: 7}}
		got := p.Pick(r, now)
		got.Release()
		return got, r.affinity.Result
	}
	home, _ := pick(start)
	if again, result := pick(start); again != home || result != Hit {
		t.Fatalf("it moves without a reason: %s", result)
	}
	says(home, 5, 50, start)
	away, result := pick(start)
	if away == home || result != Move {
		t.Fatalf("got %s at %s", result, away.Name)
	}
	if again, result := pick(at(1)); again != away || result != Hit {
		t.Errorf("got %s at %s, and it lives at %s", result, again.Name, away.Name)
	}
	if relocation := p.Relocations.get(7, at(1)); !relocation.fled {
		t.Error("it would not return while the others are above their share")
	}
	for _, other := range m { // if no member has room, all are alike, and its own one had more than its share
		says(other, 5, 50, at(2))
	}
	if again, result := pick(at(2)); again != home || result != Move {
		t.Errorf("got %s at %s, want its home %s", result, again.Name, home.Name)
	}
}

func TestAModelHasItsOwnRoom(t *testing.T) {
	p, m, _ := poolOf(t, "a:1:1", "b:1:1")
	p.Steers = true
	says(m["a"], 0, 0, start)
	for range 20 {
		r := &asks{model: "another", cost: 1}
		if p.Pick(r, start).Release(); r.steered != nil {
			t.Fatal("another model has no room")
		}
	}
	wantShares(t, p, 1, start, "b")
}

func TestANewKeyForgetsWhatIsLeft(t *testing.T) {
	p, m, _ := poolOf(t, "a:1:1", "b:1:1")
	p.Steers = true
	m["a"].StartFresh("one")
	says(m["a"], 0, 0, start)
	m["a"].StartFresh("one") // a reload
	wantShares(t, p, 1, start, "b")
	m["a"].StartFresh("two")
	wantShares(t, p, 1, start, "a", "b")
}

// deployment is one of Azure's, which counts tokens by the minute.
type deployment struct {
	limit, used int64
	ends        time.Time
}

// serve returns what the deployment replies.
func (d *deployment) serve(cost int64, now time.Time) (ok bool, h http.Header) {
	if !now.Before(d.ends) {
		d.used, d.ends = 0, now.Add(time.Minute)
	}
	if ok = d.used+cost <= d.limit; ok {
		d.used += cost
	}
	return ok, http.Header{
		"X-Ratelimit-Limit-Tokens": {fmt.Sprint(d.limit)}, "X-Ratelimit-Remaining-Tokens": {fmt.Sprint(d.limit - d.used)},
		"X-Ratelimit-Reset-Tokens": {fmt.Sprint(math.Ceil(d.ends.Sub(now).Seconds()))},
	}
}

// sent are requests to some deployments, and the attempts that were refused.
type sent struct{ offered, served, refused int }

func (s sent) refusals() float64 { return 1000 * float64(s.refused) / float64(s.served) }

// overMinutes sends requests of 80 to 720 tokens for twenty minutes to replicas
// that share nothing, before deployments of 30k, 30k and 60k tokens a minute.
// Replies come after 0.2 to 2 s.
func overMinutes(t *testing.T, replicas int, load float64, steers bool) (got sent) {
	t.Helper()
	arrivals, picks := rand.New(rand.NewPCG(1, 2)), rand.New(rand.NewPCG(3, 4))
	old := Random
	Random = picks.Float64
	defer func() { Random = old }()
	deployments := map[string]*deployment{"a": {limit: 30_000}, "b": {limit: 30_000}, "c": {limit: 60_000}}
	pools := make([]testPool, replicas)
	for i := range pools {
		var members map[string]*Member
		pools[i], members, _ = poolOf(t, "a:1:1", "b:1:1", "c:1:1")
		pools[i].Steers = steers
		for _, m := range members {
			m.health.rememberServed("m")
			m.FollowsLimits = true
		}
		pools[i].follows = pools[i].compares()
	}
	type reply struct {
		at   time.Time
		to   *Member
		seen quota.Reply
	}
	var replies []reply
	const mean = 400
	for now := start; now.Before(start.Add(20 * time.Minute)); now = now.Add(time.Duration(arrivals.ExpFloat64() * mean / (load * 120_000) * float64(time.Minute))) {
		slices.SortFunc(replies, func(a, b reply) int { return a.at.Compare(b.at) })
		for len(replies) > 0 && !replies[0].at.After(now) {
			r := replies[0]
			replies = replies[1:]
			r.to.Quota("m").See(r.seen, "m", r.at)
			r.to.Release()
		}
		got.offered++
		r := &asks{model: "m", cost: 80 + arrivals.Int64N(641)}
		takes := 200*time.Millisecond + time.Duration(arrivals.Int64N(1800))*time.Millisecond
		for p := pools[arrivals.IntN(replicas)]; ; {
			m := p.Pick(r, now)
			if m == nil {
				break
			}
			seen := quota.Reply{Mark: m.Deduct("m", r.cost), Sent: now}
			var ok bool
			ok, header := deployments[m.Name].serve(r.cost, now)
			if seen.Rates = verdict.ReadRates(header); ok {
				got.served++
				replies = append(replies, reply{now.Add(takes), m, seen})
				break
			}
			got.refused++
			seen.Throttles = true
			m.Quota("m").See(seen, "m", now)
			m.CoolDown(Refusal{Reason: Reason{Class: "throttled"}, Throttle: true, Model: "m", Cost: r.cost, Wait: deployments[m.Name].ends.Sub(now)}, now)
			m.Release()
			r.tried = append(r.tried, m)
		}
	}
	return got
}

func TestSteeringAvoidsRefusals(t *testing.T) {
	for _, replicas := range []int{1, 4} {
		for _, load := range []float64{.5, .8, 1, 2} {
			off, on := overMinutes(t, replicas, load, false), overMinutes(t, replicas, load, true)
			t.Logf("%d replicas, load %v: %.2f%% and %.2f%% served, %.2f and %.2f refusals by 1000 served", replicas, load,
				100*float64(off.served)/float64(off.offered), 100*float64(on.served)/float64(on.offered), off.refusals(), on.refusals())
			if on.refusals() > off.refusals() {
				t.Errorf("%d replicas at a load of %v: %.2f refusals by 1000 served, and %.2f without", replicas, load, on.refusals(), off.refusals())
			}
			if float64(on.served) < float64(off.served)-.003*float64(off.offered) {
				t.Errorf("%d replicas at a load of %v: %d served, and %d without", replicas, load, on.served, off.served)
			}
			if load == .8 && on.refusals() > 2 {
				t.Errorf("%.2f refusals by 1000 served", on.refusals())
			}
		}
	}
}

// BenchmarkPickWithRoom is what it costs to know what is left, for three
// members.
func BenchmarkPickWithRoom(b *testing.B) {
	for _, steers := range []bool{false, true} {
		b.Run(fmt.Sprintf("steers=%v", steers), func(b *testing.B) {
			p, members, _ := poolOf(b, "a:1:1", "b:1:1", "c:1:1")
			p.Steers = steers
			for _, m := range members {
				says(m, 50, 900, start)
			}
			r, now := (&asks{model: "m", cost: 1}).of(p.Pool), at(1)
			b.ReportAllocs()
			for b.Loop() {
				p.Pool.Pick(r, now)
			}
		})
	}
}

// sharesOf are those of two tiers.
var sharesOf = &quota.Shares{1: .5, 2: .5}

// deductFor has a member that is full give tiers such costs.
func deductFor(m *Member, costs map[int]int64) {
	m.health.rememberServed("m")
	q := m.Quota("m")
	for tier, cost := range costs {
		q.DeductFor(tier, cost, start)
	}
	q.See(quota.Reply{Rates: verdict.ReadRates(http.Header{"Azure-Openai-Deployment-Utilization": {"100%"}}), Sent: start}, "m", start)
}

func TestAShareIsOneOfAllMembersForWhichTheSameTiersAsk(t *testing.T) {
	for name, tc := range map[string]struct {
		elsewhere map[int]int64 // what tiers get at b
		want      string
	}{
		"the same tiers":     {map[int]int64{1: 11, 2: 10}, "a"},
		"only the first one": {map[int]int64{1: 11}, ""},
	} {
		p, m, _ := poolOf(t, "a:1:1", "b:2:1")
		deductFor(m["a"], map[int]int64{1: 10, 2: 11}) // beyond its share of a
		deductFor(m["b"], tc.elsewhere)
		ask := (&asks{model: "m", tier: quota.Tier{Number: 2, Shares: sharesOf}}).of(p.Pool)
		ask.At[m["b"].Index].Bar = Spent
		got := ""
		if member := p.Pool.Pick(ask, start); member != nil {
			got = member.Name
		}
		if got != tc.want {
			t.Errorf("%s ask for both: it gets %q, want %q", name, got, tc.want)
		}
	}
}

func TestAMemberCountsOnceThatAPoolHasTwice(t *testing.T) {
	a := NewMember("a", new(Health))
	again, b := NewMember("again", a.health), NewMember("b", new(Health))
	b.Priority = 2
	p := New([]*Member{a, again, b})
	deductFor(a, map[int]int64{1: 10, 2: 20})
	deductFor(b, map[int]int64{1: 22, 2: 10})
	ask := (&asks{model: "m", tier: quota.Tier{Number: 2, Shares: sharesOf}}).of(p)
	if got := p.Pick(ask, start); got == nil {
		t.Error("a counts twice")
	}
	deductFor(b, map[int]int64{2: 3})
	if got := p.Pick(ask, start.Add(time.Millisecond)); got != nil {
		t.Errorf("beyond its share it gets %s", got.Name)
	}
}

func TestOnlyMembersCountThatTheTierMayUse(t *testing.T) {
	p, m, _ := poolOf(t, "a:1:1", "b:2:1")
	deductFor(m["a"], map[int]int64{1: 10, 2: 11})
	deductFor(m["b"], map[int]int64{1: 11, 2: 10})
	ask := (&asks{model: "m", tier: quota.Tier{Number: 2, Shares: sharesOf}}).of(p.Pool)
	ask.At[m["b"].Index].Takes = false
	if got := p.Pool.Pick(ask, start); got != nil {
		t.Errorf("it gets %s, of which it has got more than its share", got.Name)
	}
}

// TestAnAnswerAboutSharesHoldsForAnInstant picks a member and then counts those
// that it passed over, for which nothing is found out anew.
func TestAnAnswerAboutSharesHoldsForAnInstant(t *testing.T) {
	p, m, _ := poolOf(t, "a:1:1", "b:2:1")
	deductFor(m["a"], map[int]int64{1: 10, 2: 11})
	ask := (&asks{model: "m", tier: quota.Tier{Number: 2, Shares: sharesOf}}).of(p.Pool)
	if got := p.Pool.Pick(ask, start); got != m["b"] {
		t.Errorf("it gets %s", got.Name)
	}
	m["a"].Quota("m").See(quota.Reply{Rates: verdict.ReadRates(http.Header{"Azure-Openai-Deployment-Utilization": {"1%"}}), Sent: start.Add(1)}, "m", start.Add(1))
	if !m["a"].PassedOver(ask, start) {
		t.Error("the answer changes within an instant")
	}
	if m["a"].PassedOver(ask, start.Add(time.Millisecond)) {
		t.Error("the answer does not change later")
	}
}

// BenchmarkShares is what it costs at each of many members that most of them
// have only shares of other tiers left.
func BenchmarkShares(b *testing.B) {
	for _, n := range []int{30, 300} {
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			names := make([]string, n)
			for i := range names {
				names[i] = fmt.Sprint("m", i, ":1:1")
			}
			p, members, _ := poolOf(b, names...)
			for _, m := range members {
				deductFor(m, map[int]int64{1: 10, 2: 11})
			}
			for b.Loop() {
				r := (&asks{model: "m", tier: quota.Tier{Number: 2, Shares: sharesOf}}).of(p.Pool)
				p.Pool.Pick(r, start)
				for _, m := range p.Members {
					m.PassedOver(r, start)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/member")
		})
	}
}

// unhealthy are health checks that fail.
type unhealthy struct{}

func (unhealthy) Healthy() bool { return false }
func (unhealthy) Full() bool    { return false }

func TestItIsNotKnownWhenAnUnhealthyMemberReturns(t *testing.T) {
	p, m, _ := poolOf(t, "a:1:1", "b:1:1")
	says(m["a"], 5, 500, start)
	says(m["b"], 0, 0, start)
	m["a"].Checks = unhealthy{}
	r := &asks{model: "m", cost: 1}
	if got := p.Limits(r.of(p.Pool), start)[0]; !got.Known || got.Remaining != 0 || got.Reset != 10*time.Second {
		t.Errorf("the limit of requests is %+v, want one that resets with b's", got)
	}
	m["b"].Checks = unhealthy{}
	if got := p.Limits(r.of(p.Pool), start)[0]; got.Known {
		t.Errorf("the limit of requests is %+v, although no member is known to return", got)
	}
}
