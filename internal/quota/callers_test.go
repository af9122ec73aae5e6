package quota

import (
	"math"
	"sync"
	"testing"
	"time"
)

// short returns Callers while a backend throttles, with a caller for each part:
// what it asked for, and what it got.
func short(parts ...[2]int64) (c *Callers, uses []*CallerUse) {
	c = new(Callers)
	c.SeeThrottle(10*time.Second, start, start)
	for i, p := range parts {
		u := c.Ask(caller(i), 1, p[0], start)
		u.Get(p[1], start)
		uses = append(uses, u)
	}
	return c, uses
}

// leaves is the part of the first member that the caller leaves to the others.
func (u *CallerUse) leaves(now time.Time) (part float64) {
	for members, its := range u.Dues(At(now)) {
		part += its * float64(members&1)
	}
	return part
}

func caller(number int) CallerID { return CallerID{Caller: uint64(number), Tier: 1} }

func TestACallerAboveTheLevelLeavesTheOthersTheirDue(t *testing.T) {
	for name, tc := range map[string]struct {
		parts [][2]int64 // of the callers, of which the first one is looked at
		kept  float64
	}{
		"alone":                            {[][2]int64{{100, 60}}, 0},
		"all got what they asked for":      {[][2]int64{{80, 80}, {20, 20}}, 0},
		"another got less":                 {[][2]int64{{900, 90}, {100, 10}}, .5},
		"it got less":                      {[][2]int64{{100, 10}, {900, 90}}, 0},
		"others got what they asked for":   {[][2]int64{{900, 80}, {20, 20}}, 0},
		"others asked for little":          {[][2]int64{{900, 90}, {20, 10}}, .2},
		"three, and two got less":          {[][2]int64{{900, 80}, {20, 10}, {100, 10}}, .6},
		"three, and one got its due":       {[][2]int64{{900, 60}, {30, 30}, {100, 10}}, .35},
		"a caller at the level is not due": {[][2]int64{{900, 51}, {100, 49}}, 0},
		"nobody got anything":              {[][2]int64{{900, 0}, {100, 0}}, 0},
	} {
		_, uses := short(tc.parts...)
		if got := uses[0].leaves(start); math.Abs(got-tc.kept) > .001 {
			t.Errorf("%s: %.3f is kept, want %.3f", name, got, tc.kept)
		}
	}
}

func TestACallerIsDueNothing(t *testing.T) {
	for name, tc := range map[string]struct {
		other   CallerID
		members uint64
		after   time.Duration
		kept    bool
	}{
		"":                                {caller(1), 1, 0, true},
		"at a member that it may not use": {caller(1), 2, 0, false},
		"in another tier":                 {CallerID{Caller: 1, Tier: 2}, 1, 0, false},
		"of another model":                {CallerID{Caller: 1, Model: 1, Tier: 1}, 1, 0, false},
		"soon after its last request":     {caller(1), 1, 9 * time.Second, true},
		"long after its last request":     {caller(1), 1, 11 * time.Second, false},
	} {
		c, _ := short()
		c.Ask(tc.other, tc.members, 100, start).Get(10, start)
		now := start.Add(tc.after)
		u := c.Ask(caller(0), 3, 900, now)
		u.Get(90, now)
		if kept := u.leaves(now) > 0; kept != tc.kept {
			t.Errorf("%s: it is %v that a part is kept for the caller", name, kept)
		}
	}
}

func TestWhatACallerGotFadesInTwoWindows(t *testing.T) {
	for window, half := range map[time.Duration]time.Duration{0: 10 * time.Second, 10 * time.Second: 20 * time.Second, time.Minute: 2 * time.Minute, time.Hour: 2 * time.Minute} {
		c := new(Callers)
		c.SeeThrottle(window, start, start)
		u := c.Ask(caller(0), 1, 1000, start)
		u.Get(800, start)
		u.Get(-400, start) // a request that was not executed
		if got := u.got.sum(instant(start.Add(half)), c.halves.Load()); math.Abs(got-200) > 1 {
			t.Errorf("with windows of %s, half a life leaves %.1f of 400", window, got)
		}
	}
}

func TestBackendsAreShortForAMinuteAfterAThrottle(t *testing.T) {
	c := new(Callers)
	if c.AreShort(start) {
		t.Error("they are short without a throttle")
	}
	c.SeeThrottle(time.Minute, at(30), start)
	if !c.AreShort(at(89)) || c.AreShort(at(91)) {
		t.Error("they are not short for a minute after it")
	}
	c.Ask(caller(1), 1, 100, at(80))
	u := c.Ask(caller(0), 1, 900, at(80))
	u.Get(90, at(80))
	if u.leaves(at(80)) == 0 || !c.AreShort(at(139)) {
		t.Error("they are not short although a caller is kept away")
	}
	c.SeeThrottle(0, at(1000), at(1000))
	if got := c.halves.Load(); got != shortestHalf.Milliseconds() {
		t.Errorf("in a new shortage, sums fade to a half in %d ms", got)
	}
}

func TestTheNumberOfCallersIsBounded(t *testing.T) {
	c, _ := short()
	uses := make(map[*CallerUse]bool)
	for i := range 3 * maxCallers {
		uses[c.Ask(caller(i*7), 1, 1, start)] = true
	}
	if len(uses) != maxCallers {
		t.Errorf("%d callers are counted", len(uses))
	}
	first := c.Ask(caller(1<<40), 1, 1, at(11)) // the others are idle
	if *first.id.Load() != caller(1<<40) || c.Ask(caller(1<<40), 1, 1, at(11)) != first || first.got.sum(instant(at(11)), 1000) != 0 {
		t.Error("a caller does not get the counts of one that is idle")
	}
}

func TestCallersAllocateNothing(t *testing.T) {
	c, uses := short([2]int64{900, 90}, [2]int64{100, 10})
	if n := testing.AllocsPerRun(100, func() {
		c.AreShort(start)
		c.Ask(caller(1), 1, 1, start)
		uses[0].Get(1, start)
		uses[0].leaves(start)
	}); n > 0 {
		t.Errorf("got %v allocations", n)
	}
}

func TestCallersInParallel(t *testing.T) {
	c, _ := short()
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			for n := range 500 {
				u := c.Ask(caller(i%4), 1, 1, at(1))
				u.Get(1, at(1))
				u.leaves(at(1))
				c.Ask(caller(100+n%200), 1, 1, at(1))
			}
		})
	}
	all.Wait()
	if got := c.Ask(caller(0), 1, 0, at(1)).got.sum(instant(at(1)), c.halves.Load()); got != 1000 {
		t.Errorf("a caller got %.0f, want 1000", got)
	}
}

func TestCallersWithAClockThatIsFarOff(t *testing.T) {
	for _, now := range []time.Time{{}, time.Unix(-1<<40, 0), time.Unix(1<<40, 0)} {
		c, uses := short([2]int64{900, 90}, [2]int64{100, 10})
		c.Ask(caller(0), 1, 1, now).Get(1, now)
		if part := uses[0].leaves(now); part < 0 || part > 1 || math.IsNaN(part) {
			t.Errorf("%v is kept", part)
		}
	}
}

func BenchmarkCallers(b *testing.B) {
	parts := [][2]int64{{900, 90}}
	for range 40 {
		parts = append(parts, [2]int64{100, 1})
	}
	c, uses := short(parts...)
	for b.Loop() {
		c.Ask(caller(0), 1, 0, start)
		uses[0].leaves(start)
	}
}
