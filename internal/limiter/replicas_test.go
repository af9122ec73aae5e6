package limiter

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

var (
	minute = ratelimit.Limit{Kind: ratelimit.Tokens, Unit: ratelimit.Minute}.ID()
	day    = ratelimit.Limit{Kind: ratelimit.Tokens, Unit: ratelimit.Day}.ID()
)

// tell sends what each replica has used to the others.
func tell(now time.Time, version uint64, replicas ...*Limiter) {
	for i, from := range replicas {
		entries := from.Report(now, version, nil)
		for j, to := range replicas {
			if i != j {
				to.Heard(now, string(rune('a'+i)), version, entries)
			}
		}
	}
}

func TestReplicasAddUpWhatTheyUse(t *testing.T) {
	a, b, c := caller(t, "tokens 100/minute", "tokens 100/day"), caller(t, "tokens 100/minute", "tokens 100/day"), caller(t, "tokens 100/minute", "tokens 100/day")
	running := admitted(t, a, noon, exactly(50))
	admitted(t, b, noon, exactly(30)).settle(noon)
	tell(noon, 1, a, b, c)
	for _, replica := range []*Limiter{a, b, c} {
		if got := used(t, replica, noon, "tokens/minute"); got != 80 {
			t.Errorf("%d are used", got)
		}
		if got := refused(t, replica, noon, exactly(21)); got.Used != 80 {
			t.Errorf("got %+v", got)
		}
	}
	running.Settle(noon.Add(time.Second), spent(10))
	tell(noon.Add(time.Second), 2, a, b, c)
	if got := used(t, c, noon.Add(time.Second), "tokens/day"); got != 40 {
		t.Errorf("%d are used", got)
	}
	// heard within a part, it does not count longer than for a minute
	if got := used(t, c, noon.Add(61*time.Second), "tokens/minute"); got != 0 {
		t.Errorf("%d are used", got)
	}
	if s := c.Snapshot(noon.Add(time.Second)); s.Today != 40 || s.Month != 40 {
		t.Errorf("got %+v", s)
	}
}

// The ids of these two names once had 48 bits, which are the same.
func TestCallersWithSimilarHashesAreTwo(t *testing.T) {
	const one, other = "team-17989447", "team-32721767"
	if a, b := ratelimit.IDOf(one), ratelimit.IDOf(other); string(a[:6]) != string(b[:6]) {
		t.Fatalf("the ids are %x and %x", a, b)
	}
	a, b := NewLimiters(nil), NewLimiters(nil)
	for _, cs := range []*Limiters{a, b} {
		cs.Configure(noon, func(string) Settings { return Settings{Limits: limits(t, "tokens 100/day")} })
	}
	admitted(t, a.Get(noon, one), noon, exactly(100)).settle(noon)
	admitted(t, a.Get(noon, other), noon, exactly(100)).settle(noon)
	for _, c := range a.All() {
		b.Heard(noon, c.ID(), "a", 1, c.Report(noon, 1, nil))
	}
	for _, name := range []string{one, other} {
		if got := used(t, b.Get(noon, name), noon, "tokens/day"); got != 100 {
			t.Errorf("%s has used %d at another replica", name, got)
		}
	}
}

func TestWhatIsLateRepeatedOrOutOfOrderChangesNothing(t *testing.T) {
	type message struct {
		replica string
		version uint64
		entry   Entry
	}
	w := windowAt(ratelimit.Minute, noon.UnixNano(), time.UTC).index
	var messages []message
	for version := range uint64(20) {
		for _, replica := range []string{"a", "b"} {
			for ago := range int64(2) {
				messages = append(messages, message{replica, version, Entry{minute, w - ago, int64(100 - version), 0}})
			}
		}
	}
	random := rand.New(rand.NewPCG(1, 2))
	for range 50 {
		c := caller(t, "tokens 1k/minute")
		for range 3 {
			random.Shuffle(len(messages), func(i, j int) { messages[i], messages[j] = messages[j], messages[i] })
			for _, m := range messages {
				c.Heard(noon, m.replica, m.version, []Entry{m.entry})
			}
		}
		for after, want := range map[time.Duration]int64{0: 324, time.Minute - 1: 283, time.Minute: 0} {
			copied := caller(t, "tokens 1k/minute")
			for _, m := range messages {
				copied.Heard(noon, m.replica, m.version, []Entry{m.entry})
			}
			if got := used(t, copied, noon.Add(after), "tokens/minute"); got != want {
				t.Fatalf("after %s %d are used, want %d", after, got, want)
			}
		}
		if got := used(t, c, noon, "tokens/minute"); got != 324 {
			t.Fatalf("%d are used", got)
		}
	}
}

func TestAWindowOfAnotherClocksMistakeDoesNotCount(t *testing.T) {
	w := windowAt(ratelimit.Minute, noon.UnixNano(), time.UTC).index
	late := noon.Add(59 * time.Second) // the next window is about to begin
	for now, want := range map[time.Time]int{noon: 2, late: 3} {
		c := caller(t, "tokens 1k/minute")
		for ahead := int64(-3); ahead <= 3; ahead++ {
			c.Heard(now, "a", 1, []Entry{{minute, w + ahead, 100, 0}})
		}
		if n := len(c.counters[minute].figures); n != want {
			t.Errorf("%d figures are kept, want %d", n, want)
		}
	}
	c := caller(t, "tokens 1k/minute")
	for ahead := range int64(2) {
		c.Heard(late, "a", 1, []Entry{{minute, w + ahead, 100, 0}})
	}
	c.Heard(late, "a", 2, []Entry{{minute, w, -1, 0}, {ratelimit.MaxLimits, w, 100, 0}, {255, w, 1, 0}})
	for i, want := range []int64{100, 200} { // the next window begins
		if got := used(t, c, late.Add(time.Duration(i)*time.Second), "tokens/minute"); got != want {
			t.Errorf("%d are used, want %d", got, want)
		}
	}
	if used(t, c, noon.Add(2*time.Minute), "tokens/minute"); len(c.counters[minute].figures) != 1 {
		t.Errorf("figures of windows that are over are kept: %+v", c.counters[minute].figures)
	}
	for n := len(c.counters[minute].figures); n < maxFigures-1; n++ {
		c.counters[minute].figures = append(c.counters[minute].figures, figure{replica: strconv.Itoa(n), window: w + 2})
	}
	for _, replica := range []string{"b", "c", "d"} {
		c.Heard(noon.Add(2*time.Minute), replica, 1, []Entry{{minute, w + 2, 1, 0}})
	}
	if n := len(c.counters[minute].figures); n != maxFigures {
		t.Errorf("%d figures are kept", n)
	}
}

func TestARestartedReplicasUseStaysCounted(t *testing.T) {
	cs := NewLimiters(nil)
	settings := Settings{Limits: limits(t, "tokens 100/minute", "tokens 100/day")}
	cs.Configure(noon, func(string) Settings { return settings })
	old := caller(t, "tokens 100/minute", "tokens 100/day")
	admitted(t, old, noon, exactly(60)).settle(noon)
	entries := old.Report(noon, 7, nil)
	cs.Heard(noon, ratelimit.IDOf("alice"), "old", 7, entries) // before the caller sent a request here
	if n := len(cs.All()); n != 0 {
		t.Errorf("there are %d callers", n)
	}
	c := cs.Get(noon, "alice")
	if got := refused(t, c, noon, exactly(41)); got.Used != 60 || c.Name() != "alice" || c.ID() != ratelimit.IDOf("alice") {
		t.Errorf("got %+v", got)
	}
	admitted(t, c, noon, exactly(20)).settle(noon)
	if entries = c.Report(noon, 1, nil); len(entries) != 3 || entries[0] != (Entry{minute, windowAt(ratelimit.Minute, noon.UnixNano(), time.UTC).index, 20, 0}) {
		t.Errorf("its own use is %+v", entries)
	}
}

func TestUsageNamesEachWindowThatMayStillChange(t *testing.T) {
	c := caller(t, "tokens 100/minute")
	w := windowAt(ratelimit.Minute, noon.UnixNano(), time.UTC).index
	if entries := c.Report(noon, 1, nil); len(entries) != 0 {
		t.Errorf("an idle caller has %+v", entries)
	}
	r := admitted(t, c, noon, exactly(40))
	later := noon.Add(time.Minute)
	admitted(t, c, later, exactly(1)).settle(later)
	r.Settle(later, ratelimit.Cost{}) // the others have to learn that nothing was used
	entries := c.Report(later, 2, nil)
	if len(entries) < 2 || entries[0] != (Entry{minute, w, 0, 0}) || entries[1] != (Entry{minute, w + 1, 1, 0}) {
		t.Errorf("got %+v", entries)
	}
}

// apart is how n replicas share limits that do not hear each other.
func apart(n int) Sharing { return Sharing{Replicas: n, Apart: true} }

// cut is the same if they are in several regions.
func cut(n int) Sharing { return Sharing{Replicas: n, Apart: true, ByUse: true} }

func TestAReplicaThatHearsNoOthersUsesItsShareOfWhatIsLeft(t *testing.T) {
	a, b := caller(t, "tokens 100/minute", "tokens 1k/day"), caller(t, "tokens 100/minute", "tokens 1k/day")
	admitted(t, a, noon, exactly(30)).settle(noon)
	admitted(t, b, noon, exactly(30)).settle(noon)
	tell(noon, 1, a, b)
	for _, c := range []*Limiter{a, b} {
		c.reports.heard.Store(1)
		c.Share(noon, apart(2))
		// each may use 20 in a minute
		admitted(t, c, noon, exactly(10)).settle(noon)
		c.Share(noon, apart(2)) // changes nothing
		admitted(t, c, noon, exactly(10)).settle(noon)
		if got := refused(t, c, noon, exactly(1)); got.Reason != ratelimit.OverRate || got.Allowed != 80 || got.Used != 80 || got.Wait <= 0 {
			t.Errorf("got %+v", got)
		}
		// of the day, 940 were left, so each may use 470
		if got := c.Snapshot(noon); got.Replicas != 2 || got.Limits[1].Allowed != 60+470 {
			t.Errorf("got %+v", got)
		}
	}
	c := caller(t, "tokens 100/minute", "tokens 1k/day")
	c.Share(noon, apart(2))
	c.Share(noon, Sharing{Replicas: 3})
	tell(noon, 2, a, b, c)
	if s := c.Snapshot(noon); s.Limits[0].Allowed != 100 || s.Limits[0].Used != 100 || s.Limits[1].Allowed != 1000 || s.Replicas != 0 {
		t.Errorf("got %+v", s)
	}
	// and of the next day 500
	if got := a.Snapshot(noon.Add(24 * time.Hour)).Limits[1]; got.Allowed != 500 || got.Used != 0 {
		t.Errorf("got %+v", got)
	}
}

// TestARegionThatIsCutOffKeepsThePartThatItUsed has one of three replicas
// with almost all users of a caller, when none hears the others.
func TestARegionThatIsCutOffKeepsThePartThatItUsed(t *testing.T) {
	limits := []string{"tokens 1k/minute", "tokens 10k/day"}
	busy, quiet, idle := caller(t, limits...), caller(t, limits...), caller(t, limits...)
	all := []*Limiter{busy, quiet, idle}
	admitted(t, busy, noon, exactly(450)).settle(noon)
	admitted(t, quiet, noon, exactly(50)).settle(noon)
	tell(noon, 1, all...)
	// what is used after the last report, of which the others may not have
	// heard, is no part of what they know to be used
	admitted(t, quiet, noon, exactly(100)).settle(noon)
	allowed := func(c *Limiter, at time.Time) (minute, day int64) {
		limits := c.Snapshot(at).Limits
		return limits[0].Allowed, limits[1].Allowed
	}
	for _, c := range all {
		c.reports.heard.Store(1)
		c.Share(noon, cut(3))
	}
	// 500 of 1,000 and 9,500 of 10,000 are left
	for c, want := range map[*Limiter][2]int64{busy: {500 + 450, 500 + 8550}, quiet: {500 + 166, 500 + 3166}, idle: {500 + 166, 500 + 3166}} {
		if minute, day := allowed(c, noon); minute != want[0] || day != want[1] {
			t.Errorf("%d by the minute and %d by the day, want %d", minute, day, want)
		}
	}
	later := noon.Add(2 * time.Minute)
	sum := int64(0)
	for i, want := range []int64{900, 333, 333} {
		all[i].Share(later, cut(3)) // the part stays
		minute, _ := allowed(all[i], later)
		if minute != want {
			t.Errorf("replica %d may use %d, want %d", i, minute, want)
		}
		sum += minute
	}
	if sum > 1000*(2*3-1)/3 {
		t.Errorf("together %d", sum)
	}
	// a process that begins meanwhile has used nothing that the others know
	next := caller(t, limits...)
	next.Share(later, cut(3))
	if minute, _ := allowed(next, later); minute != 333 {
		t.Errorf("a new process may use %d", minute)
	}
	for _, c := range all {
		c.Share(later, Sharing{Replicas: 3})
	}
	for _, c := range all { // the next time, it is another part
		c.Share(later, cut(3))
		if minute, day := allowed(c, later); minute != 333 || day < 500+3166 {
			t.Errorf("%d by the minute and %d by the day", minute, day)
		}
	}
}

// TestOthersCannotHaveUsedMoreThanTheirPartsMeanwhile has a replica hear
// another one again that used its half for minutes.
func TestOthersCannotHaveUsedMoreThanTheirPartsMeanwhile(t *testing.T) {
	a, b := caller(t, "tokens 1k/minute"), caller(t, "tokens 1k/minute")
	for _, c := range []*Limiter{a, b} {
		c.Share(noon, apart(2))
	}
	now := noon
	for ; now.Before(noon.Add(150 * time.Second)); now = now.Add(12500 * time.Millisecond) {
		admitted(t, b, now, exactly(100)).settle(now)
	}
	tell(now, 1, a, b)
	if got := used(t, a, now, "tokens/minute"); got != 700 { // of two minutes, as if it were used now
		t.Errorf("%d are used", got)
	}
	a.Share(now, Sharing{Replicas: 2})
	if got := used(t, a, now, "tokens/minute"); got != 500 {
		t.Errorf("%d are used, want half of the limit, as in each minute", got)
	}

	// one that had nine tenths of the use before may have used as much of
	// each minute
	a, b = caller(t, "tokens 1k/minute"), caller(t, "tokens 1k/minute")
	admitted(t, a, noon, exactly(50)).settle(noon)
	admitted(t, b, noon, exactly(450)).settle(noon)
	tell(noon, 1, a, b)
	for _, c := range []*Limiter{a, b} {
		c.reports.heard.Store(1)
		c.Share(noon, cut(2))
	}
	for now = noon.Add(time.Minute); now.Before(noon.Add(4 * time.Minute)); now = now.Add(5 * time.Second) {
		if r, refusal := b.admit(now, exactly(100)); refusal == nil {
			r.settle(now)
		}
	}
	tell(now, 2, a, b)
	a.Share(now, Sharing{Replicas: 2})
	if got := used(t, a, now, "tokens/minute"); got != 900 {
		t.Errorf("%d are used, want what the other one could use in a minute", got)
	}
}

// TestARequestThatWaitsForAShareGetsIt within the time that a limit alone would
// take, and without trying often.
func TestARequestThatWaitsForAShareGetsIt(t *testing.T) {
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(seed, 1))
		a, b := caller(t, "tokens 1k/minute"), caller(t, "tokens 1k/minute")
		now := noon
		for range random.IntN(10) {
			for _, c := range []*Limiter{a, b} {
				if r, refusal := c.admit(now, exactly(random.Int64N(100))); refusal == nil {
					r.Settle(now, spent(r.length))
				}
			}
			now = now.Add(time.Duration(random.IntN(10_000)) * time.Millisecond)
		}
		tell(now, 1, a, b)
		a.reports.heard.Store(1)
		a.Report(now, 2, nil) // what it used before is known, and its part is larger than an equal one
		a.Share(now, Sharing{Replicas: 1 + random.IntN(5), Apart: true, ByUse: seed%2 == 0})
		need := exactly(1 + random.Int64N(150))
		var refusal *ratelimit.Refusal
		for range 100 {
			var r Reservation
			if r, refusal = a.admit(now, need); refusal != nil {
				break
			}
			r.Settle(now, spent(need.Prompt))
			now = now.Add(time.Duration(random.IntN(1000)) * time.Millisecond)
		}
		began, tries := now, 0
		for ; refusal != nil; tries++ {
			now = now.Add(refusal.Wait)
			_, refusal = a.admit(now, need)
		}
		if waited := now.Sub(began); tries > 20 || waited > 70*time.Second {
			t.Errorf("seed %d: a request was admitted after %d tries and %s", seed, tries, waited)
		}
	}
}

func TestAShareOfNothingIsNothing(t *testing.T) {
	a, b := caller(t, "tokens 100/day"), caller(t, "tokens 100/day")
	admitted(t, b, noon, exactly(100)).settle(noon)
	tell(noon, 1, a, b)
	a.Share(noon, apart(2))
	if got := refused(t, a, noon, exactly(1)); got.Reason != ratelimit.OverQuota || got.Used != 100 || got.Wait != 12*time.Hour {
		t.Errorf("got %+v", got)
	}
	small := caller(t, "tokens 1/minute", "tokens 1/day")
	small.Share(noon, apart(4))
	refused(t, small, noon, exactly(1)) // otherwise each replica would admit one
}

func TestAReplicaSpendsOnlyItsPartUntilTheOthersKnow(t *testing.T) {
	cs := NewLimiters(nil)
	urgent := make(chan struct{}, 1)
	cs.OnUrgent(urgent)
	isUrgent := func() bool { return len(urgent) > 0 && <-urgent == struct{}{} }
	cs.Configure(noon, func(string) Settings { return Settings{Limits: limits(t, "tokens 120/minute", "requests 1k/day")} })
	c := cs.Get(noon, "alice")
	cs.Share(noon, Sharing{Replicas: 3, Delay: 100 * time.Millisecond})
	now := noon
	spend := func(tokens int64) {
		t.Helper()
		admitted(t, c, now, exactly(tokens)).settle(now)
	}
	spend(5)
	if isUrgent() {
		t.Error("an eighth of the part is urgent")
	}
	spend(35)
	if !isUrgent() {
		t.Error("all of the part is not urgent")
	}
	over := func() {
		t.Helper()
		isUrgent()
		got := refused(t, c, now, exactly(1))
		if got.Reason != ratelimit.OverPart || got.Wait != 100*time.Millisecond || !isUrgent() {
			t.Errorf("got %+v", got)
		}
	}
	over()
	c.Report(now, 5, nil)
	now = now.Add(time.Second)
	over() // the report has not come back
	cs.Confirm(4)
	over()
	c.Unreported()
	cs.Confirm(5)
	over()
	c.Report(now, 6, nil)
	cs.Confirm(6)
	over() // the reports of the others may come later
	now = now.Add(100 * time.Millisecond)
	// of the 80 that are left
	spend(26)
	over()
	if s := c.Snapshot(now); s.Limits[1].Allowed != 120 || s.Limits[1].Refused != 6 || s.Replicas != 0 {
		t.Errorf("got %+v", s)
	}
	// alone, it may use all of it
	cs.Share(now, Sharing{Replicas: 1})
	spend(54)
	if got := refused(t, c, now, exactly(1)); got.Reason != ratelimit.OverRate {
		t.Errorf("got %+v", got)
	}
}

// TestARequestLargerThanAPartIsAdmittedWhenTheOthersKnow of it, and have used
// nothing that it would exceed the limit with.
func TestARequestLargerThanAPartIsAdmittedWhenTheOthersKnow(t *testing.T) {
	for other, want := range map[int64]bool{0: true, 40: true, 41: false} {
		c := caller(t, "tokens 100/minute", "requests 50/minute")
		c.Share(noon, Sharing{Replicas: 10, Delay: time.Second})
		if got := refused(t, c, noon, exactly(60)); got.Reason != ratelimit.Unheard {
			t.Fatalf("got %+v", got)
		}
		claim, refusal := c.Claim(noon, exactly(60))
		if refusal != nil {
			t.Fatalf("got %+v", refusal)
		}
		if _, refusal := c.Claim(noon, exactly(20)); refusal == nil {
			t.Error("there is a second claim")
		}
		c.Report(noon, 1, nil)
		c.reports.heard.Store(1)
		if decided, _ := claim.Decide(noon); decided {
			t.Error("it is decided before the others may have known it")
		}
		c.reports.writer = "y"
		c.Heard(noon, "x", 1, []Entry{{minute, windowAt(ratelimit.Minute, noon.UnixNano(), time.UTC).index, other, 0}})
		now := noon.Add(time.Second)
		decided, refusal := claim.Decide(now)
		if got := used(t, c, now, "tokens/minute"); !decided || (refusal == nil) != want || want && got != 60+other || !want && got != other {
			t.Errorf("after another one of %d: %d are used, %+v", other, got, refusal)
		}
	}
	c := caller(t, "tokens 100/minute") // nobody hears of it
	c.Share(noon, Sharing{Replicas: 2, Delay: time.Second})
	claim, _ := c.Claim(noon, exactly(60))
	if decided, _ := claim.Decide(noon.Add(time.Second)); decided || claim.Withdraw(noon) == nil || used(t, c, noon, "tokens/minute") != 0 {
		t.Error("it is decided before the others know it")
	}
	c.Share(noon, apart(2))
	if _, refusal := c.Claim(noon, exactly(60)); refusal == nil {
		t.Error("a replica that hears no others admitted more than its part")
	}
}

func TestSharesApplyToAllCallers(t *testing.T) {
	cs := NewLimiters(nil)
	cs.Configure(noon, func(name string) Settings { return Settings{Limits: limits(t, "tokens 100/minute")} })
	early := cs.Get(noon, "early")
	cs.Share(noon, apart(4))
	for _, c := range []*Limiter{early, cs.Get(noon, "late")} {
		if got := c.Snapshot(noon).Limits[0].Allowed; got != 25 {
			t.Errorf("%s: %d are allowed", c.Name(), got)
		}
	}
	cs.Configure(noon, func(name string) Settings { return Settings{Limits: limits(t, "tokens 200/minute")} })
	cs.Share(noon, Sharing{})
	if all := cs.All(); len(all) != 2 || all[0] != early || early.Snapshot(noon).Limits[0].Allowed != 200 {
		t.Errorf("got %+v", all)
	}
}

func TestLongWindowsSurviveARestart(t *testing.T) {
	settings := Settings{Limits: limits(t, "tokens 100/minute", "tokens 100/hour", "tokens 1k/day", "requests 10/month")}
	before := NewLimiters(nil)
	before.Configure(noon, func(string) Settings { return settings })
	admitted(t, before.Get(noon, "alice"), noon, exactly(60)).settle(noon)
	before.Get(noon, "idle")
	later := noon.Add(70 * time.Minute)
	admitted(t, before.Get(noon, "alice"), later, exactly(20)).settle(later)
	saved, err := json.Marshal(before.Save(later))
	if err != nil {
		t.Fatal(err)
	}
	var restored SavedUse
	if err := json.Unmarshal(saved, &restored); err != nil || len(restored) != 1 {
		t.Fatalf("%s: %v", saved, err)
	}
	after := NewLimiters(nil)
	after.Configure(later, func(string) Settings { return settings })
	admitted(t, after.Get(later, "alice"), later, exactly(5)).settle(later) // before that was read
	after.Restore(later, restored)
	for text, want := range map[string]int64{"tokens/minute": 25, "tokens/hour": 25, "tokens/day": 85, "requests/month": 3} {
		if got := used(t, after.Get(later, "alice"), later, text); got != want {
			t.Errorf("%s: %d are used, want %d", text, got, want)
		}
	}
	tomorrow := later.Add(24 * time.Hour)
	late := NewLimiters(nil)
	late.Configure(tomorrow, func(string) Settings { return settings })
	late.Restore(tomorrow, restored)
	late.Restore(tomorrow, SavedUse{"x": {Named: map[string]SavedFigures{"alice": {{Entry: Entry{255, 1, 1, 0}}, {Entry: Entry{day, windowAt(ratelimit.Day, tomorrow.UnixNano(), time.UTC).index, -4, 0}}}}}})
	if got := late.Get(tomorrow, "alice").Snapshot(tomorrow); got.Today != 0 || got.Month != 80 {
		t.Errorf("got %+v", got)
	}
}

// TestUseThatWasSavedInFewerPartsCountsFromTheirEnds has a replica restore what
// an earlier release saved, in parts of 5 minutes.
func TestUseThatWasSavedInFewerPartsCountsFromTheirEnds(t *testing.T) {
	hour, text := noon.Unix()/3600, `{"x":{"callers":{"alice":[
		{"limit":"tokens/hour","window":%d,"used":48,"parts":[0,0,0,0,0,0,0,0,0,0,0,48]},
		{"limit":"tokens/hour","window":%d,"used":30,"parts":[0,10,0,0,20,0,0,0,0,0,0,0]}]}}}`
	for _, now := range []time.Time{noon.Add(21 * time.Minute), noon.Add(24 * time.Minute), noon.Add(59 * time.Minute)} {
		var saved SavedUse
		if err := json.Unmarshal(fmt.Appendf(nil, text, hour-1, hour), &saved); err != nil {
			t.Fatal(err)
		}
		for after, want := range map[time.Duration]int64{57*time.Minute + 30*time.Second: 78, time.Hour: 30, 67*time.Minute + 30*time.Second: 30, 70 * time.Minute: 20, 80 * time.Minute: 20, 85 * time.Minute: 0} {
			copied := NewLimiters(nil)
			copied.Configure(now, func(string) Settings { return Settings{Limits: limits(t, "tokens 240/hour")} })
			copied.Restore(now, saved)
			if at := noon.Add(after); at.After(now) && used(t, copied.Get(at, "alice"), at, "tokens/hour") != want {
				t.Errorf("restored at %s, %d are used after %s, want %d", now.Format(time.TimeOnly), used(t, copied.Get(at, "alice"), at, "tokens/hour"), after, want)
			}
			addUp(t, copied.Get(now, "alice"))
		}
	}
}

// TestAnHourSurvivesARestartAsItWas has a caller use 60 % of a limit evenly,
// also after a restart.
func TestAnHourSurvivesARestartAsItWas(t *testing.T) {
	settings := Settings{Limits: limits(t, "tokens 100/hour")}
	cs := NewLimiters(nil)
	cs.Configure(noon, func(string) Settings { return settings })
	for minute := range 5 * 60 {
		now := noon.Add(time.Duration(minute) * time.Minute)
		if minute == 110 {
			saved, err := json.Marshal(cs.Save(now))
			if err != nil {
				t.Fatal(err)
			}
			var restored SavedUse
			if err := json.Unmarshal(saved, &restored); err != nil {
				t.Fatal(err)
			}
			cs = NewLimiters(nil)
			cs.Configure(now, func(string) Settings { return settings })
			cs.Restore(now, restored)
		}
		admitted(t, cs.Get(now, "alice"), now, exactly(1)).settle(now)
		if got := used(t, cs.Get(now, "alice"), now, "tokens/hour"); got > 65 {
			t.Fatalf("after %d minutes, %d are used", minute, got)
		}
	}
}

func TestAnEntryIsOverWhereverDaysBegin(t *testing.T) {
	for _, zone := range []int{-12, 0, 14} {
		location := time.FixedZone("", zone*3600)
		for u := range ratelimit.Unit(ratelimit.Units) {
			w := windowAt(u, noon.UnixNano(), location)
			e := Entry{ID: ratelimit.Limit{Unit: u}.ID(), Window: w.index}
			last := time.Unix(0, w.end-1)
			if !u.Calendar() {
				last = last.Add(u.Length())
			}
			if e.Over(noon) || e.Over(last) {
				t.Errorf("UTC%+d: the window of a %s is over before its end", zone, u)
			}
			if !e.Over(last.Add(27 * time.Hour)) {
				t.Errorf("UTC%+d: the window of a %s does not end", zone, u)
			}
		}
	}
}

func TestNewCallersComeLast(t *testing.T) {
	cs := NewLimiters(nil)
	for _, name := range []string{"b", "a", "b", "c"} {
		cs.Get(noon, name)
	}
	cs.Heard(noon, ratelimit.IDOf("d"), "x", 1, []Entry{{day, 1, 1, 0}})
	for n, want := range []string{"bac", "ac", "c", ""} {
		got := ""
		for _, c := range cs.From(n) {
			got += c.Name()
		}
		if got != want {
			t.Errorf("without the first %d: %q", n, got)
		}
	}
	if w := cs.Writer(); len(w) != 32 || w == NewLimiters(nil).Writer() {
		t.Errorf("the writer is %q", w)
	}
}

// A replica that starts hears at once what the others have used in two minutes.
// A caller that is well within its limit must not be refused there because all
// of that seems to be new.
func TestWhatWasUsedBeforeAReplicaStartedIsSpread(t *testing.T) {
	others := caller(t, "tokens 60/minute")
	for second := range 115 {
		now := noon.Add(time.Duration(second) * time.Second)
		if second%2 == 0 {
			admitted(t, others, now, exactly(1)).settle(now)
		}
	}
	now := noon.Add(115 * time.Second)
	entries := others.Report(now, 1, nil)
	cs := NewLimiters(nil)
	cs.Configure(now, func(string) Settings { return Settings{Limits: limits(t, "tokens 60/minute")} })
	cs.Heard(now, ratelimit.IDOf("alice"), "a", 1, entries)
	cs.Spread(now, nil)
	c := cs.Get(now, "alice")
	if got := used(t, c, now, "tokens/minute"); got < 30 || got > 34 {
		t.Errorf("%d are used, want about 30", got)
	}
	admitted(t, c, now, exactly(20)).settle(now)
	addUp(t, c)
}

// The others had used all of a limit at the end of a minute, which is over at
// the end of the next one.
func TestAReplicaThatStartsKnowsWhenTheOthersUsedALimit(t *testing.T) {
	a, b := caller(t, "tokens 60/minute"), caller(t, "tokens 60/minute")
	spend := func(c *Limiter, second int) {
		at := noon.Add(time.Duration(second) * time.Second)
		admitted(t, c, at, exactly(10)).settle(at)
	}
	for second := 50; second < 56; second += 2 {
		spend(a, second)
		spend(b, second+1)
	}
	timelines := map[string][]Timeline{"a": a.Timelines(noon.Add(56 * time.Second)), "b": b.Timelines(noon.Add(57 * time.Second))}
	spend(b, 58) // after its timeline was written
	now := noon.Add(80 * time.Second)
	for _, its := range []struct {
		timelines []Timeline
		want      int64
	}{
		{timelines["b"], 70},
		{nil, 30 + 40*11/30},
		{[]Timeline{{ID: minute, Last: timelines["b"][0].Last, Used: make([]int64, parts+2)}}, 30 + 40*11/30},
		{[]Timeline{{ID: minute, Last: math.MaxInt64, Used: timelines["b"][0].Used}}, 30 + 40*11/30},
		{[]Timeline{{ID: minute, Last: timelines["b"][0].Last, Used: slices.Repeat([]int64{math.MaxInt64}, parts+1)}}, 30},
	} {
		c := caller(t, "tokens 60/minute")
		c.Heard(now, "a", 1, a.Report(now, 1, nil))
		c.Heard(now, "b", 1, b.Report(now, 1, nil))
		timelines["b"] = its.timelines
		c.Spread(now, timelines)
		if got := used(t, c, noon.Add(109*time.Second), "tokens/minute"); got < its.want || got > its.want+5 { // rounded up
			t.Errorf("with %v, 59 s after the first use %d are used, want %d", its.timelines, got, its.want)
		}
		if got := used(t, c, noon.Add(121*time.Second), "tokens/minute"); got != 0 {
			t.Errorf("%d are used, want 0", got)
		}
		addUp(t, c)
	}
}

// A caller may use another replica for a while before it sends a request here.
func TestWhatIsHeardBeforeACallersFirstRequestHereIsAsNew(t *testing.T) {
	others := caller(t, "tokens 60/minute")
	now := noon.Add(50 * time.Second)
	admitted(t, others, now, exactly(60)).settle(now)
	cs := NewLimiters(nil)
	cs.Configure(noon, func(string) Settings { return Settings{Limits: limits(t, "tokens 60/minute")} })
	cs.Spread(noon, nil)
	cs.Heard(now, ratelimit.IDOf("alice"), "a", 1, others.Report(now, 1, nil))
	c := cs.Get(now.Add(5*time.Second), "alice")
	if got := used(t, c, now.Add(59*time.Second), "tokens/minute"); got != 60 {
		t.Errorf("after 59 s, %d are used, want 60", got)
	}
	if got := used(t, c, now.Add(65*time.Second), "tokens/minute"); got != 0 {
		t.Errorf("after 65 s, %d are used, want 0", got)
	}
	addUp(t, c)
}

// Requests go on while a report is on its way, and the next report says them.
func TestWhatALaterReportSaysBecomesKnownToo(t *testing.T) {
	cs := NewLimiters(nil)
	cs.Configure(noon, func(string) Settings { return Settings{Limits: limits(t, "tokens 120/minute")} })
	cs.Share(noon, Sharing{Replicas: 3, Delay: 100 * time.Millisecond})
	c, now := cs.Get(noon, "alice"), noon
	// report sends what has changed, as package usagesync does
	var version, said uint64
	report := func() {
		if changes, _ := c.Changes(); changes != said {
			version, said = version+1, changes
			c.Report(now, version, nil)
			cs.Confirm(version)
		}
	}
	admitted(t, c, now, exactly(10)).settle(now)
	report()
	admitted(t, c, now, exactly(30)).settle(now)
	report()
	for range 2 {
		now = now.Add(time.Second)
		c.Check(now, exactly(26))
		report()
	}
	now = now.Add(time.Second)
	admitted(t, c, now, exactly(26)).settle(now) // a third of the 80 that are left
}
