package limiter

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// withModels returns the limits of a caller, such as "tokens 100/minute luna",
// of which each may have a model.
func withModels(t testing.TB, texts ...string) (all []ratelimit.Limit) {
	t.Helper()
	for _, text := range texts {
		words := strings.Fields(text)
		l := limits(t, words[0]+" "+words[1])[0]
		if len(words) > 2 {
			l.Model = words[2]
		}
		all = append(all, l)
	}
	return all
}

// modelCallers returns callers with these limits.
func modelCallers(t testing.TB, texts ...string) *Limiters {
	t.Helper()
	cs := NewLimiters(nil)
	configure(t, cs, noon, texts...)
	return cs
}

func configure(t testing.TB, cs *Limiters, now time.Time, texts ...string) {
	t.Helper()
	all := withModels(t, texts...)
	cs.Configure(now, func(string) Settings { return Settings{Limits: all} })
}

// of estimates a request of so many tokens for a model.
func of(model string, tokens int64) ratelimit.Estimate {
	return ratelimit.Estimate{Prompt: tokens, Model: model}
}

// uses lists what is used of each limit of alice.
func uses(cs *Limiters, now time.Time) (text string) {
	for i, u := range cs.Get(now, "alice").Snapshot(now).Limits {
		if i > 0 {
			text += ", "
		}
		text += fmt.Sprintf("%s %d of %s", u.Limit.Kind, u.Used, u.Limit)
	}
	return text
}

func wantUses(t *testing.T, cs *Limiters, now time.Time, want string) {
	t.Helper()
	if got := uses(cs, now); got != want {
		t.Errorf("used are %s\nwant     %s", got, want)
	}
}

func TestALimitOfAModelRefusesOnlyRequestsForThatModel(t *testing.T) {
	cs := modelCallers(t, "tokens 1k/minute", "tokens 100/minute luna", "requests 3/day luna", "tokens 300/minute terra")
	c := cs.Get(noon, "alice")
	admitted(t, c, noon, of("luna", 90)).settle(noon)
	got := refused(t, c, noon, of("luna", 20))
	if got.Limit.String() != "100/minute luna" || got.Reason != ratelimit.OverRate || got.Used != 90 || got.Allowed != 100 || got.Wait <= 0 {
		t.Errorf("got %+v", got)
	}
	if again := c.Check(noon, of("luna", 20)); again == nil || *again != got {
		t.Errorf("a check gives %+v", again)
	}
	if c.Check(noon, of("luna", 10)) != nil {
		t.Error("what is left of the model's limit is refused")
	}
	for _, model := range []string{"terra", "sol", ""} {
		admitted(t, c, noon, of(model, 110)).settle(noon)
	}
	// what is refused is charged to neither
	wantUses(t, cs, noon, "tokens 420 of 1k/minute, requests 1 of 3/day luna, tokens 90 of 100/minute luna, tokens 110 of 300/minute terra")
	if got := refused(t, c, noon, of("terra", 200)); got.Limit.Model != "terra" {
		t.Errorf("got %+v", got)
	}
	admitted(t, c, noon, of("sol", 500)).settle(noon)
	if got := refused(t, c, noon, of("terra", 100)); got.Limit.Model != "" || got.Limit.Amount != 1000 {
		t.Errorf("got %+v", got)
	}
	wantUses(t, cs, noon, "tokens 920 of 1k/minute, requests 1 of 3/day luna, tokens 90 of 100/minute luna, tokens 110 of 300/minute terra")
	s := c.Snapshot(noon)
	var refusals []uint64
	for _, u := range s.Limits {
		refusals = append(refusals, u.Refused)
	}
	if !slices.Equal(refusals, []uint64{1, 0, 1, 1}) || s.Hour.Refused["tokens/minute"] != 3 {
		t.Errorf("refused are %v, in the last hour %v", refusals, s.Hour)
	}
	if s.Hour.Requests != 5 || s.Hour.Tokens != 920 || s.Today != 920 || s.InFlight != 0 || s.Reserved != 0 {
		t.Errorf("got %+v", s)
	}
	if all := cs.All(); len(all) != 1 || all[0] != c {
		t.Errorf("there are %d callers", len(all))
	}
}

func TestALimitOfAModelMovesRequestsToAnotherTier(t *testing.T) {
	l := withModels(t, "tokens 100/minute luna", "tokens 1k/minute")
	l[0].Then = "nightly"
	var marks []string
	cs := NewLimiters(func(x ratelimit.Crossing) { marks = append(marks, fmt.Sprint(x.Caller, " ", x.Limit, " ", x.Percent)) })
	cs.Configure(noon, func(string) Settings { return Settings{Limits: l, Tier: "batch", Tiers: []string{"batch", "nightly"}} })
	c := cs.Get(noon, "alice")
	for i, want := range []int{1, 2, 2} {
		r := admitted(t, c, noon, of("luna", 60))
		var by []ratelimit.Limit
		for l := range r.Demoted {
			by = append(by, l)
		}
		if r.Tier() != want || (len(by) == 1) != (want == 2) || want == 2 && by[0] != (ratelimit.Limit{Kind: ratelimit.Tokens, Unit: ratelimit.Minute, Model: "luna"}) {
			t.Errorf("request %d is of the tier %d, by %v", i, r.Tier(), by)
		}
		r.settle(noon)
	}
	if r := admitted(t, c, noon, of("sol", 60)); r.Tier() != 1 {
		t.Error("another model is moved, too")
	}
	if u := c.Snapshot(noon).Limits[1]; u.Demoted != 2 || u.Used != 180 {
		t.Errorf("got %+v", u)
	}
	if want := []string{"alice 100/minute luna then nightly 100"}; !slices.Equal(marks, want) {
		t.Errorf("reported are %v, want %v", marks, want)
	}
}

// TestWhatAStreamGrowsIsChargedToBothLimits while it grows. So is the cost of a
// response in the background, and of one that a session begins by itself.
func TestWhatAStreamGrowsIsChargedToBothLimits(t *testing.T) {
	cs := modelCallers(t, "tokens 1M/day", "tokens 1M/day luna")
	c := cs.Get(noon, "alice")
	want := func(all, luna int64) {
		t.Helper()
		wantUses(t, cs, noon, fmt.Sprintf("tokens %d of 1M/day, tokens %d of 1M/day luna", all, luna))
	}
	r := admitted(t, c, noon, ratelimit.Estimate{Prompt: 100, Output: 50, Model: "luna"})
	want(150, 150)
	r.Spend(noon, 500)
	want(600, 600)
	r.Settle(noon, ratelimit.Cost{Requests: 1, Prompt: 100, Output: 700})
	r.Settle(noon, ratelimit.Cost{Requests: 1, Prompt: 100, Output: 700})
	want(800, 800)

	r = admitted(t, c, noon, ratelimit.Estimate{Prompt: 100, Output: 5000, Model: "luna"})
	later := r.Leave(noon)
	if r.Open() {
		t.Error("the request is not over")
	}
	want(5900, 5900)
	other := later // as it is remembered
	other.Settle(noon, ratelimit.Cost{Requests: 1, Prompt: 100, Output: 20})
	want(920, 920)

	r = c.Unasked(noon, "luna")
	r.Settle(noon, ratelimit.Cost{Requests: 1, Prompt: 30, Output: 50})
	r = c.Unasked(noon, "sol")
	r.Settle(noon, ratelimit.Cost{Requests: 1, Prompt: 1})
	want(1001, 1000)
	if s := c.Snapshot(noon); s.InFlight != 0 || s.Reserved != 0 {
		t.Errorf("got %+v", s)
	}
	if m := c.models["luna"]; m.inFlight != 0 || m.reserved != 0 || m.unspent != [ratelimit.Units]int64{} {
		t.Errorf("of the model, %d requests are in flight, %d tokens reserved, and %v left", m.inFlight, m.reserved, m.unspent)
	}
}

func TestAResetGivesBackTheUseOfModelsToo(t *testing.T) {
	cs := modelCallers(t, "tokens 1k/day", "tokens 100/day luna")
	c := cs.Get(noon, "alice")
	open := admitted(t, c, noon, of("luna", 60))
	cs.Reset(noon, "alice")
	wantUses(t, cs, noon, "tokens 0 of 1k/day, tokens 0 of 100/day luna")
	open.settle(noon)
	wantUses(t, cs, noon, "tokens 0 of 1k/day, tokens 0 of 100/day luna")
	admitted(t, c, noon, of("luna", 100)).settle(noon)
	refused(t, c, noon, of("luna", 1))
}

func TestTheUseOfAModelIsSaved(t *testing.T) {
	cs := modelCallers(t, "tokens 1k/day", "tokens 100/hour luna", "requests 10/month luna")
	admitted(t, cs.Get(noon, "alice"), noon, of("luna", 60)).settle(noon)
	text, err := json.Marshal(cs.Save(noon))
	if err != nil {
		t.Fatal(err)
	}
	var saved SavedUse
	if err := json.Unmarshal(text, &saved); err != nil {
		t.Fatal(err)
	}
	again := modelCallers(t, "tokens 1k/day", "tokens 100/hour luna", "requests 10/month luna")
	again.Restore(noon, saved)
	wantUses(t, again, noon, "tokens 60 of 1k/day, requests 1 of 10/month luna, tokens 60 of 100/hour luna")
	if all := again.All(); len(all) != 1 {
		t.Errorf("there are %d callers", len(all))
	}
	again = NewLimiters(nil) // whose limits are configured later
	again.Restore(noon, saved)
	configure(t, again, noon, "tokens 100/hour luna")
	wantUses(t, again, noon, "tokens 60 of 100/hour luna")
}

func TestAReloadKeepsTheUseOfAModel(t *testing.T) {
	marks := 0
	cs := NewLimiters(func(ratelimit.Crossing) { marks++ })
	configure(t, cs, noon, "tokens 1k/hour")
	c := cs.Get(noon, "alice")
	admitted(t, c, noon, of("luna", 10)).settle(noon)
	configure(t, cs, noon, "tokens 1k/hour", "tokens 100/hour luna")
	r := admitted(t, c, noon, of("luna", 60))
	wantUses(t, cs, noon, "tokens 70 of 1k/hour, tokens 60 of 100/hour luna")
	configure(t, cs, noon, "tokens 1k/hour", "tokens 200/hour luna", "tokens 50/hour terra")
	admitted(t, c, noon, of("luna", 100)).settle(noon)
	refused(t, c, noon, of("luna", 50))
	other := admitted(t, c, noon, of("terra", 10))
	configure(t, cs, noon, "tokens 1k/hour")
	admitted(t, c, noon, of("luna", 500)).settle(noon)
	before := marks
	r.Settle(noon, spent(20)) // it was charged to the limit that is gone
	other.Settle(noon, spent(60))
	if marks != before {
		t.Error("a limit that is gone is said to be reached")
	}
	wantUses(t, cs, noon, "tokens 690 of 1k/hour")
	configure(t, cs, noon, "tokens 1k/hour", "tokens 200/hour luna")
	wantUses(t, cs, noon, "tokens 690 of 1k/hour, tokens 120 of 200/hour luna")
	if n := len(cs.byID); n != 3 || len(cs.inOrder) != n { // with terra's
		t.Errorf("there are %d limiters, %d in order", n, len(cs.inOrder))
	}
	moved := withModels(t, "tokens 130/hour luna")
	cs.mu.Lock()
	cs.settings = func(string) Settings { return Settings{Limits: moved} } // as of a caller in another tier
	cs.mu.Unlock()
	cs.Apply(noon, "alice")
	refused(t, c, noon, of("luna", 20))
}

func TestOnlyModelsWithLimitsNeedMemory(t *testing.T) {
	cs := modelCallers(t, "requests 1M/day", "requests 5/day luna")
	c := cs.Get(noon, "alice")
	for i := range 1000 {
		admitted(t, c, noon, of(fmt.Sprint("luna", i), 1)).settle(noon)
		c.Unasked(noon, fmt.Sprint("sol", i))
	}
	if n := len(cs.byID); n != 2 || len(c.models) != 1 {
		t.Errorf("there are %d limiters", n)
	}
	allocations := testing.AllocsPerRun(100, func() {
		r, _ := c.Try(noon, of("sol", 1))
		r.Settle(noon, spent(1))
	})
	if allocations > 0 {
		t.Errorf("a request for a model without a limit allocates %v times", allocations)
	}
}

// TestModelsAreForgottenWithTheirCaller and not before, however long none of
// its requests was for the model.
func TestModelsAreForgottenWithTheirCaller(t *testing.T) {
	cs := modelCallers(t, "requests 10/month luna")
	admitted(t, cs.Get(noon, "alice"), noon, of("luna", 0)).settle(noon)
	now := noon
	for range 14 { // until the end of the month, the request counts
		now = now.Add(24 * time.Hour)
		cs.Get(now, fmt.Sprint("new", now))
		if cs.byName["alice"] == nil {
			t.Fatalf("alice is forgotten at %s", now)
		}
	}
	wantUses(t, cs, now, "requests 1 of 10/month luna")
	for range 40 { // its requests are for other models
		now = now.Add(24 * time.Hour)
		cs.Get(now, "alice")
		cs.Get(now, fmt.Sprint("new", now))
	}
	if m := cs.byName["alice"].models["luna"]; m.Forgotten() || cs.byID[m.id] != m {
		t.Error("the limiter of a caller's model is forgotten before the caller")
	}
	for range 5 {
		now = now.Add(25 * time.Hour)
		cs.Get(now, "bob")
		cs.Get(now, fmt.Sprint("new", now))
	}
	if n := len(cs.byID); cs.byName["alice"] != nil || n > 6 || len(cs.inOrder) != n {
		t.Errorf("there are %d limiters, %d in order, of %s", n, len(cs.inOrder), names(cs))
	}
	configure(t, cs, now)
	now = now.Add(25 * time.Hour)
	cs.Get(now, "bob")
	if cs.Get(now.Add(2*time.Hour), "new"); len(cs.byID) != len(cs.byName) {
		t.Errorf("limiters without limits are not forgotten: %d of %d callers", len(cs.byID), len(cs.byName))
	}
	cs = modelCallers(t, "requests 10/month luna", "requests 10/month terra")
	cs.most = 96
	often := cs.Get(now, "often")
	for i := range 1000 {
		now = now.Add(time.Minute + time.Second)
		cs.Get(now, "often")
		admitted(t, cs.Get(now, fmt.Sprint(i)), now, of("luna", 1)).settle(now)
		if n := len(cs.byID); n > cs.most+2 || n != 3*len(cs.byName) || n != len(cs.inOrder) {
			t.Fatalf("there are %d limiters of %d callers, %d in order", n, len(cs.byName), len(cs.inOrder))
		}
	}
	if often.Forgotten() || often.models["luna"].Forgotten() {
		t.Error("a caller that was seen often is forgotten, or its model")
	}
}

func TestTheTightestLimitIsThatOfTheModel(t *testing.T) {
	cs := modelCallers(t, "tokens 1k/minute", "requests 10/minute luna", "tokens 500/minute luna")
	c := cs.Get(noon, "alice")
	admitted(t, c, noon, of("luna", 300)).settle(noon)
	for model, want := range map[string]string{"luna": "9 of 10/minute luna, 200 of 500/minute luna", "sol": "0 of 0/second, 700 of 1k/minute", "": "0 of 0/second, 700 of 1k/minute"} {
		u := c.Tightest(noon, model)
		if got := fmt.Sprintf("%d of %s, %d of %s", u[ratelimit.Requests].Left(), u[ratelimit.Requests].Limit, u[ratelimit.Tokens].Left(), u[ratelimit.Tokens].Limit); got != want {
			t.Errorf("%q: left are %s, want %s", model, got, want)
		}
	}
	admitted(t, c, noon, of("sol", 600)).settle(noon)
	if u := c.Tightest(noon, "luna")[ratelimit.Tokens]; u.Limit.Model != "" || u.Left() != 100 {
		t.Errorf("got %+v", u)
	}
}

// TestOtherReplicasCountTheUseOfAModel also from before they know the caller.
func TestOtherReplicasCountTheUseOfAModel(t *testing.T) {
	a, b := modelCallers(t, "tokens 1k/day", "tokens 100/day luna"), modelCallers(t, "tokens 1k/day", "tokens 100/day luna")
	admitted(t, a.Get(noon, "alice"), noon, of("luna", 70)).settle(noon)
	for i, c := range a.From(0) {
		b.Heard(noon, c.ID(), "a", 1, c.Report(noon, 1, nil))
		if parts := c.Hour(noon); len(parts) != 1-i {
			t.Errorf("the last hour has %+v", parts) // of the model, too, it is that of the caller
		}
	}
	refused(t, b.Get(noon, "alice"), noon, of("luna", 31))
	wantUses(t, b, noon, "tokens 70 of 1k/day, tokens 70 of 100/day luna")
	if id := idOfModel("alice", "luna"); id == ratelimit.IDOf("alice") || id == idOfModel("aliceluna", "") || id == idOfModel("alice", "terra") {
		t.Error("two have one id")
	}
}

// TestAClaimIsDecidedWhenTheOthersKnowBothCharges and lets another request make
// a claim to the limits that are decided.
func TestAClaimIsDecidedWhenTheOthersKnowBothCharges(t *testing.T) {
	cs := modelCallers(t, "tokens 90/minute", "tokens 90/minute luna")
	cs.Share(noon, Sharing{Replicas: 3})
	c := cs.Get(noon, "alice")
	m := c.models["luna"]
	claim, refusal := c.Claim(noon, of("luna", 60))
	if refusal != nil || !c.claims || !m.claims {
		t.Fatalf("there is no claim: %+v", refusal)
	}
	c.Report(noon, 1, nil)
	cs.Confirm(1)
	if decided, _ := claim.Decide(noon); decided || c.claims || !m.claims {
		t.Error("it is decided before the others know the charge to the model")
	}
	other, refusal := c.Claim(noon, of("sol", 20))
	if refusal != nil {
		t.Fatal(refusal)
	}
	if refusal := claim.Withdraw(noon); refusal == nil || refusal.Limit.Model != "luna" || !c.claims || m.claims {
		t.Errorf("the other claim is ended, too: %+v", refusal)
	}
	wantUses(t, cs, noon, "tokens 20 of 90/minute, tokens 0 of 90/minute luna")
	other.Withdraw(noon)
	claim, _ = c.Claim(noon, of("luna", 60))
	for _, of := range []*Limiter{c, m} {
		of.Report(noon, 2, nil)
	}
	cs.Confirm(2)
	if decided, refusal := claim.Decide(noon); !decided || refusal != nil || c.claims || m.claims {
		t.Errorf("it is not admitted: %+v", refusal)
	}
	wantUses(t, cs, noon, "tokens 60 of 90/minute, tokens 60 of 90/minute luna")
}
