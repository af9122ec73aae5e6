package replicas

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// bucket is a provisioned deployment, which works off what it has taken and
// says how full it is.
type bucket struct {
	level, drain, capacity float64
	at                     time.Time
}

// take takes a request, unless the bucket is full.
func (b *bucket) take(cost float64, now time.Time) (taken bool, used float64) {
	b.level, b.at = max(0, b.level-b.drain*now.Sub(b.at).Seconds()), now
	if taken = b.level < b.capacity; taken {
		b.level += cost
	}
	return taken, 100 * b.level / b.capacity
}

// keepsAway reports whether requests of the tier may not go to a backend, which
// is the only one.
func keepsAway(q *quota.Meter, t quota.Tier, now time.Time) bool {
	of, kept := q.Kept(t, quota.At(now))
	got := quota.Got{Group: of}
	got.Add(q, t, quota.At(now))
	return !q.Leaves(kept, 1, quota.At(now)) && (!t.KeepsShare() || !got.IsWithinShare(t))
}

var shares = quota.Shares{0, .5, .3, .2}

// exhaust has requests of three tiers for four times what a bucket works off
// come to replicas for so long, each to the replica that to chooses. It returns
// the shares that the tiers get.
func (w *world) exhaust(long time.Duration, to func(tier int) int) (got quota.Shares) {
	const cost, drain = 10, 100.
	b, random := bucket{drain: drain, capacity: 2 * drain, at: time.Now()}, rand.New(rand.NewPCG(1, 2))
	for begin := time.Now(); time.Since(begin) < long; time.Sleep(time.Duration(random.ExpFloat64() * cost / (4 * drain) * float64(time.Second))) {
		tier, now := 1+random.IntN(3), time.Now()
		q := w.at(to(tier), "a").Quota("m")
		if q.Ask(tier, now); keepsAway(q, quota.Tier{Number: tier, Shares: &shares}, now) {
			continue
		}
		mark := q.DeductFor(tier, cost, now)
		taken, used := b.take(cost, now)
		header := make(http.Header)
		if taken {
			header.Set("Azure-Openai-Deployment-Utilization", fmt.Sprint(used, "%"))
			got[tier] += cost / drain / long.Seconds()
		}
		q.See(quota.Reply{Rates: verdict.ReadRates(header), Throttles: !taken, Served: taken, Cost: cost, Mark: mark, Sent: now}, "m", now)
		if !taken {
			mark.Return()
		}
	}
	return got
}

func (w *world) wantShares(got quota.Shares) {
	w.Helper()
	for tier, share := range shares {
		if math.Abs(got[tier]-share) > .05 {
			w.Errorf("tier %d gets %.3f, want %.2f", tier, got[tier], share)
		}
	}
}

// Each tier asks another replica, so none of them knows that another tier asks
// at all, unless they tell each other.
func TestSharesAreThoseOfAllReplicas(t *testing.T) {
	share(t, 3, func(w *world) {
		got := w.exhaust(2*time.Minute, func(tier int) int { return tier - 1 })
		w.Logf("in touch: %.3f", got)
		w.wantShares(got)
		w.hub.Fail(errors.New("down"))
		time.Sleep(10 * time.Second)
		apart := w.exhaust(2*time.Minute, func(tier int) int { return tier - 1 })
		w.Logf("apart: %.3f", apart)
		if apart[3] < .25 {
			w.Errorf("apart, tier 3 gets %.3f: it still hears of others", apart[3])
		}
	})
}

func TestEachReplicaKeepsSharesAloneWithoutAStore(t *testing.T) {
	share(t, 3, func(w *world) {
		w.hub.Fail(errors.New("down"))
		time.Sleep(10 * time.Second)
		got := w.exhaust(2*time.Minute, func(int) int { return rand.IntN(3) })
		w.Logf("%.3f", got)
		w.wantShares(got)
	})
}

func TestWhatTiersHaveGotIsForgottenWithTheReplicaThatSaidIt(t *testing.T) {
	share(t, 2, func(w *world) {
		tier := quota.Tier{Number: 3, Shares: &shares}
		here, there := w.at(0, "a").Quota("m"), w.at(1, "a").Quota("m")
		there.DeductFor(1, 100, time.Now())
		here.DeductFor(3, 100, time.Now())
		above := func(want bool) {
			t.Helper()
			here.See(quota.Reply{Rates: verdict.ReadRates(make(http.Header)), Throttles: true, Sent: time.Now()}, "m", time.Now())
			if got := keepsAway(here, tier, time.Now()); got != want {
				t.Errorf("the tier is passed over: %v, want %v", got, want)
			}
		}
		above(false)
		time.Sleep(time.Second + interval/2)
		above(true)
		w.replicas[1].stop()
		time.Sleep(5 * time.Second)
		above(false)
	})
}

// A message has at most 4096 bytes: others are taken for another program's.
func TestSharesOfManyModelsAreSentInSeveralMessages(t *testing.T) {
	share(t, 2, func(w *world) {
		const n = 30
		var names []string
		for i := range n {
			names = append(names, strings.Repeat("\"", 250)+fmt.Sprint(100+i))
		}
		for i := range w.replicas {
			w.at(i, "a").Models = names
		}
		for _, name := range names {
			for tier := range shares {
				w.at(0, "a").Quota(name).DeductFor(tier, 1<<40, time.Now())
			}
		}
		time.Sleep(time.Second + interval/2)
		for _, name := range names {
			w.at(1, "a").Quota(name).DeductFor(3, 100, time.Now())
			q := w.at(1, "a").Quota(name)
			q.See(quota.Reply{Rates: verdict.ReadRates(make(http.Header)), Throttles: true, Sent: time.Now()}, name, time.Now())
			if !keepsAway(q, quota.Tier{Number: 3, Shares: &quota.Shares{0, .9, 0, .1}}, time.Now()) {
				t.Fatalf("nothing is known of %s", name)
			}
		}
	})
}

// FuzzTierCosts passes any shares to a replica, and asks the quotas about them.
func FuzzTierCosts(f *testing.F) {
	f.Add(`[{"backend":"`+digest("a")+`","model":"m","costs":[[1,2,3],[4,5,6]]}]`, int64(5))
	f.Add(`[{"backend":"`+digest("a")+`","model":"m","costs":[[-1,9223372036854775807],[9223372036854775807,9223372036854775807]]}]`, int64(1))
	f.Fuzz(func(t *testing.T, shared string, cost int64) {
		text := `{"v":1,"kind":"tier_costs","from":"` + digest("r") + `","sent":1,"shares":` + shared + `}`
		m, err := parse([]byte(text))
		if err != nil || !json.Valid([]byte(text)) {
			return
		}
		member := pool.NewMember("a", new(pool.Health))
		member.AnyModel, member.Models = true, []string{"m"}
		now := time.Now()
		q := member.Quota("m")
		for _, s := range m.Shares {
			q.Hear(m.From, s.Costs, now)
			q.Hear(digest("s"), s.Costs, now)
		}
		q.DeductFor(3, max(0, cost), now)
		q.See(quota.Reply{Rates: verdict.ReadRates(make(http.Header)), Throttles: true, Sent: now}, "m", now)
		keepsAway(q, quota.Tier{Number: 3, Shares: &shares}, now)
	})
}
