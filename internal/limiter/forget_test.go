package limiter

import (
	"fmt"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

func names(cs *Limiters) (names string) {
	for _, c := range cs.All() {
		names += c.Name()
	}
	return names
}

func TestACallerIsForgottenWhenNothingOfItCounts(t *testing.T) {
	month := ratelimit.Limit{Kind: ratelimit.Tokens, Unit: ratelimit.Month}.ID()
	december := time.Date(2026, 12, 1, 0, 0, 0, 0, time.UTC)
	for name, tc := range map[string]struct {
		use   func(cs *Limiters, c *Limiter)
		until time.Time
	}{
		"it was only seen":      {func(*Limiters, *Limiter) {}, noon.Add(24 * time.Hour)},
		"it has used something": {func(_ *Limiters, c *Limiter) { admitted(t, c, noon, exactly(1)).settle(noon) }, december},
		"it was reset":          {func(_ *Limiters, c *Limiter) { c.Reset(noon) }, december},
		"it has used something elsewhere": {func(cs *Limiters, c *Limiter) {
			cs.Heard(noon, c.ID(), "x", 1, []Entry{{month, windowAt(ratelimit.Month, noon.UnixNano(), time.UTC).index, 5, 0}})
		}, december},
		"a request is in flight": {func(_ *Limiters, c *Limiter) { admitted(t, c, noon, exactly(1)) }, december.AddDate(1, 0, 0)},
	} {
		cs := NewLimiters(nil)
		tc.use(cs, cs.Get(noon, "a"))
		for day := 0.5; day < 60; day++ {
			now := noon.Add(time.Duration(day * 24 * float64(time.Hour)))
			cs.Get(now, "b") // which stays
			cs.Get(now, fmt.Sprint("new", day))
			if _, known := cs.byName["a"]; known != now.Before(tc.until) {
				t.Errorf("%s: after %v days it is known: %v", name, day, known)
				break
			}
		}
		if cs.byName["b"] == nil || len(cs.byName) > 5 || len(cs.byID) != len(cs.byName) || len(cs.inOrder) != len(cs.byName) {
			t.Errorf("%s: left are %s", name, names(cs))
		}
	}
}

func TestACallerThatIsSeenAgainIsNotForgotten(t *testing.T) {
	cs := NewLimiters(nil)
	c := cs.Get(noon, "a")
	cs.Get(noon.Add(23*time.Hour), "a")
	if cs.Get(noon.Add(25*time.Hour), "b"); cs.Get(noon.Add(25*time.Hour), "a") != c || c.Forgotten() {
		t.Error("it is another one")
	}
}

// TestForgottenCallersLeaveTheOrder because replicas ask for those that came
// after a number.
func TestForgottenCallersLeaveTheOrder(t *testing.T) {
	cs := NewLimiters(nil)
	cs.Get(noon, "a")
	last := cs.Get(noon, "b").Number()
	now := noon.Add(25 * time.Hour)
	cs.Get(now, "c")
	if c := cs.Get(now, "a"); c.Forgotten() {
		t.Error("the new one is forgotten, too")
	}
	got := ""
	for _, c := range cs.From(last) {
		got += c.Name()
	}
	if got != "ca" {
		t.Errorf("after b came %q", got)
	}
}

// Callers by tokens may be any number, and what they have used counts for a
// month.
func TestOfTooManyCallersThoseThatWereSeenLeastAreForgotten(t *testing.T) {
	cs := NewLimiters(nil)
	cs.most = 320
	busy, now := admitted(t, cs.Get(noon, "busy"), noon, exactly(1)), noon
	for i := range 10 * cs.most {
		if now = now.Add(time.Second); i%8 == 0 {
			now = now.Add(2 * time.Minute)
			cs.Get(now, "often")
		}
		admitted(t, cs.Get(now, fmt.Sprint("once-", i)), now, exactly(1)).settle(now)
		if n := len(cs.byID); n > cs.most || len(cs.byName) > n || len(cs.inOrder) > n {
			t.Fatalf("there are %d callers, %d by name", n, len(cs.byName))
		}
	}
	if n := cs.Evicted(); n < int64(9*cs.most) || n > int64(10*cs.most) {
		t.Errorf("%d are said to be forgotten", n)
	}
	if cs.byName["busy"] == nil || cs.byName["often"] == nil || cs.byName["once-0"] != nil {
		t.Error("others were forgotten than those that were not seen for the longest time")
	}
	busy.settle(now)
}
