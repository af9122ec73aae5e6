package pool

import (
	"cmp"
	"fmt"
	"hash/maphash"
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/quota"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// server is a simulated backend, which serves so much cost in a second: in
// fixed windows, or by a bucket that drains all the time.
type server struct {
	rate   float64
	window time.Duration // 0: a bucket
	bucket float64       // how many seconds of work it holds
	// headers reports whether its replies say what is left.
	headers bool
	// names is the multiple of its limit that it names, if not 0.
	names float64
	// rounds reports whether it names whole seconds.
	rounds bool

	ends time.Time
	used float64
	at   time.Time
	// served is the cost that it has served, and calls the number of requests
	// that it got.
	served, calls float64
}

// serve returns what the backend replies, and when it asks to be called again.
func (s *server) serve(cost int64, now time.Time) (ok bool, header http.Header, wait time.Duration) {
	s.calls++
	header = make(http.Header)
	if s.window == 0 {
		s.used = max(0, s.used-s.rate*now.Sub(s.at).Seconds())
		s.at = now
		most := s.rate * s.bucket
		if ok = s.used < most; ok {
			s.used += float64(cost)
			s.served += float64(cost)
		}
		if s.headers {
			header.Set("Azure-Openai-Deployment-Utilization", fmt.Sprintf("%.0f%%", 100*s.used/most))
		}
		wait = time.Duration(math.Ceil(1000*(s.used-most)/s.rate)+1) * time.Millisecond
	} else {
		if !now.Before(s.ends) {
			s.ends, s.used = now.Add(s.window), 0
		}
		most := s.rate * s.window.Seconds()
		if ok = s.used+float64(cost) <= most; ok {
			s.used += float64(cost)
			s.served += float64(cost)
		}
		wait = s.ends.Sub(now)
		if s.headers {
			header.Set("X-Ratelimit-Limit-Tokens", fmt.Sprint(s.rate*60*max(1, s.names)))
			header.Set("X-Ratelimit-Renewalperiod-Tokens", fmt.Sprint(s.window.Seconds()))
			header.Set("X-Ratelimit-Remaining-Tokens", fmt.Sprint(most*max(1, s.names)-s.used))
			header.Set("X-Ratelimit-Reset-Tokens", fmt.Sprint(math.Ceil(wait.Seconds())))
		}
	}
	if s.rounds {
		wait = time.Duration(math.Ceil(wait.Seconds())) * time.Second
	}
	return ok, header, wait
}

// stream is a number of requests a second of one tier, of costs around 100.
type stream struct {
	tier   int
	caller string
	model  string // "": m
	// at are the indexes of the servers that it may use. nil: all
	at   []int
	rate float64
	cost int64 // 0: 100

	sent, served, refused float64
}

var hashes = maphash.MakeSeed()

// shortage is a pool, at some replicas, before which streams of requests come.
type shortage struct {
	servers  []*server
	priority []int // of each server; nil: 1
	replicas int
	shares   *quota.Shares
	streams  []*stream
	uneven   bool // costs differ
	steers   bool
	sticky   bool // each request belongs to one of some sessions
	seed     uint64
	// sharedLimits reports whether all models draw on the limits of a server,
	// and the pool knows it.
	sharedLimits bool
	callers      []asking // for wantShares

	calls, refusals float64
}

// run sends requests for so long, and counts from a time on.
func (s *shortage) run(t *testing.T, long, from time.Duration) {
	t.Helper()
	random := rand.New(rand.NewPCG(5+s.seed, 6))
	pools := make([]testPool, s.replicas)
	names := make([]string, len(s.servers))
	for i := range names {
		names[i] = fmt.Sprintf("b%d:%d:1", i, 1)
		if s.priority != nil {
			names[i] = fmt.Sprintf("b%d:%d:1", i, s.priority[i])
		}
	}
	for i := range pools {
		var members map[string]*Member
		pools[i], members, _ = poolOf(t, names...)
		pools[i].Close() // its timer is real
		pools[i].Callers = new(quota.Callers)
		if pools[i].Steers = s.steers; s.sticky {
			pools[i].Relocations = new(Relocations)
		}
		for _, m := range members {
			m.health.rememberServed("m")
			m.health.rememberServed("n")
			m.SharedLimits = s.sharedLimits
		}
	}
	type event struct {
		at time.Time
		do func(now time.Time)
	}
	var events []event
	add := func(at time.Time, do func(time.Time)) {
		i, _ := slices.BinarySearchFunc(events, at, func(e event, at time.Time) int { return cmp.Or(e.at.Compare(at), -1) })
		events = slices.Insert(events, i, event{at, do})
	}
	end, counts := start.Add(long), start.Add(from)
	for _, of := range s.streams {
		var come func(now time.Time)
		come = func(now time.Time) {
			add(now.Add(time.Duration(random.ExpFloat64()/of.rate*float64(time.Second))), come)
			cost := cmp.Or(of.cost, 100)
			if s.uneven {
				cost = 20 + random.Int64N(161)
			}
			s.send(pools, pools[random.IntN(s.replicas)], of, cost, now, !now.Before(counts), add)
		}
		add(start.Add(time.Duration(random.ExpFloat64()/of.rate*float64(time.Second))), come)
	}
	if s.replicas > 1 {
		var tell func(now time.Time)
		tell = func(now time.Time) {
			for i, p := range pools {
				for j, m := range p.Members {
					for model, costs := range m.TierCosts(now) {
						for k, other := range pools {
							if k != i {
								other.Members[j].Quota(model).Hear(fmt.Sprint(i), costs, now)
							}
						}
					}
				}
			}
			add(now.Add(3*time.Second), tell)
		}
		add(start.Add(3*time.Second), tell)
	}
	var started bool
	for len(events) > 0 && events[0].at.Before(end) {
		e := events[0]
		events = events[1:]
		if !started && !e.at.Before(counts) {
			started = true
			for _, b := range s.servers {
				b.served, b.calls = 0, 0
			}
		}
		e.do(e.at)
	}
}

func (s *shortage) send(pools []testPool, p testPool, of *stream, cost int64, now time.Time, counted bool, add func(time.Time, func(time.Time))) {
	model := cmp.Or(of.model, "m")
	r := &asks{model: model, cost: cost, tier: quota.Tier{Number: of.tier, Shares: s.shares}}
	if s.sticky {
		r.affinity.Key = 1 + uint64(s.calls)%50
	}
	ask := r.of(p.Pool)
	for i := range ask.At {
		ask.At[i].Takes = of.at == nil || slices.Contains(of.at, i)
	}
	p.Demand(ask, now)
	if of.caller != "" && p.Callers.AreShort(now) {
		p.DemandShare(ask, quota.CallerID{Caller: maphash.String(hashes, of.caller), Tier: of.tier}, now)
	}
	if counted {
		of.sent++
	}
	for {
		m := p.Pool.Pick(ask, now)
		if m == nil {
			if counted {
				of.refused++
			}
			return
		}
		ask.At[m.Index].Bar = Spent
		began := now
		mark := m.DeductFor(model, cost, of.tier, now)
		ask.Demand.Get(cost, now)
		ok, header, wait := s.servers[m.Index].serve(cost, now)
		seen := quota.Reply{Mark: mark, Sent: began, Rates: verdict.ReadRates(header), Throttles: !ok, Served: ok, Cost: cost}
		if ok {
			if counted {
				of.served += float64(cost)
				s.calls++
			}
			add(now.Add(300*time.Millisecond), func(now time.Time) {
				m.Answered(Scope{Model: model}, began)
				m.Quota(model).See(seen, model, now)
				m.Release()
			})
			return
		}
		if counted {
			s.calls++
			s.refusals++
		}
		m.Quota(model).See(seen, model, now)
		mark.Return()
		ask.Demand.Get(-cost, now)
		m.CoolDown(Refusal{Reason: Reason{Class: "throttled", Status: 429}, Throttle: true, Model: model, Cost: cost, Wait: max(wait, 50*time.Millisecond), Started: began}, now)
		m.Release()
		for _, other := range pools {
			if other.Pool != p.Pool {
				b := *m.health.last.Load()
				other.Members[m.Index].Hear(b, b.Until.Sub(now), now)
			}
		}
	}
}

// used is the part of what could be served that was.
func (s *shortage) used(seconds float64) (part float64) {
	var served, could float64
	for i, b := range s.servers {
		if s.priority == nil || s.priority[i] == 1 {
			served += b.served
			could += b.rate * seconds
		}
	}
	return served / could
}

// windows and buckets return so many servers, which serve 24 requests a second
// together.
func windows(n int, length time.Duration, headers bool) (all []*server) {
	for range n {
		all = append(all, &server{rate: 2400 / float64(n), window: length, headers: headers})
	}
	return all
}

func buckets(n int, seconds float64, headers bool) (all []*server) {
	for range n {
		all = append(all, &server{rate: 2400 / float64(n), bucket: seconds, headers: headers})
	}
	return all
}

// TestATierWithinItsShareIsServed has the first tier ask for 40 % of what there
// is, of which it keeps 50 %, and the second one for three times all.
func TestATierWithinItsShareIsServed(t *testing.T) {
	for _, headers := range []bool{false, true} {
		for name, tc := range map[string]struct {
			servers func() []*server
			used    float64
		}{
			"two windows of 10 s": {func() []*server { return windows(2, 10*time.Second, headers) }, .92},
			"two of a minute":     {func() []*server { return windows(2, time.Minute, headers) }, .98},
			"one bucket of 2 s":   {func() []*server { return buckets(1, 2, headers) }, .98},
			"two buckets of 10 s": {func() []*server { return buckets(2, 10, headers) }, .97},
		} {
			for _, replicas := range []int{1, 3} {
				first, second := &stream{tier: 1, rate: .4 * 24}, &stream{tier: 2, rate: 3 * 24}
				s := &shortage{servers: tc.servers(), replicas: replicas, shares: &quota.Shares{1: .5, 2: .2}, steers: true, streams: []*stream{first, second}}
				s.run(t, 9*time.Minute, 4*time.Minute)
				refused, used := first.refused/first.sent, s.used(300)
				if refused > .01 || used < tc.used {
					t.Errorf("%s, headers %t, %d replicas: %.2f%% refused, want 1%% at most; %.3f used, want %.2f", name, headers, replicas, 100*refused, used, tc.used)
				}
			}
		}
	}
}

// TestATierWithinItsShareIsServedByABackendThatNamesAHigherLimit, such as one
// that other users of the deployment use up.
func TestATierWithinItsShareIsServedByABackendThatNamesAHigherLimit(t *testing.T) {
	for _, length := range []time.Duration{10 * time.Second, time.Minute} {
		servers := windows(2, length, true)
		for _, b := range servers {
			b.names = 5
		}
		first, second := &stream{tier: 1, rate: .4 * 24}, &stream{tier: 2, rate: 3 * 24}
		s := &shortage{servers: servers, replicas: 1, shares: &quota.Shares{1: .5, 2: .2}, steers: true, streams: []*stream{first, second}}
		s.run(t, 9*time.Minute, 4*time.Minute)
		if refused, used := first.refused/first.sent, s.used(300); refused > .02 || used < .92 {
			t.Errorf("windows of %s: %.2f%% refused, want 2%% at most; %.3f used, want .92", length, 100*refused, used)
		}
	}
}

// TestInAShortageEachTierGetsItsShare has both tiers ask for more than there
// is. What no tier keeps goes to the first one.
func TestInAShortageEachTierGetsItsShare(t *testing.T) {
	for _, replicas := range []int{1, 3} {
		first, second := &stream{tier: 1, rate: 1.5 * 24}, &stream{tier: 2, rate: 3 * 24}
		s := &shortage{servers: buckets(1, 2, false), replicas: replicas, shares: &quota.Shares{1: .5, 2: .2}, steers: true, streams: []*stream{first, second}}
		s.run(t, 3*time.Minute, time.Minute)
		if part := first.served / (first.served + second.served); math.Abs(part-.8) > .07 || s.used(120) < .98 {
			t.Errorf("%d replicas: the first tier gets %.3f of %.3f, want .8", replicas, part, s.used(120))
		}
	}
}

// TestAFullPTUIsSeldomCalledInVain has twice as many requests as it serves, and
// another member behind it.
func TestAFullPTUIsSeldomCalledInVain(t *testing.T) {
	for _, bucket := range []float64{.5, 2, 10} {
		for replicas, most := range map[int]float64{1: 1.04, 3: 1.06} {
			for _, sticky := range []bool{false, true} {
				s := &shortage{
					servers: []*server{{rate: 2000, bucket: bucket}, {rate: 1e9, bucket: 10}}, priority: []int{1, 2}, replicas: replicas, steers: true, sticky: sticky,
					streams: []*stream{{rate: 40}},
				}
				s.run(t, 2*time.Minute, 20*time.Second)
				if calls, used := s.calls/(s.calls-s.refusals), s.used(100); calls > most || used < .99 || s.streams[0].refused > 0 {
					t.Errorf("a bucket of %v s, %d replicas, sticky %t: %.3f calls for each one served, want %v at most; %.3f used, want .99; %v refused",
						bucket, replicas, sticky, calls, most, used, s.streams[0].refused)
				}
			}
		}
	}
}
