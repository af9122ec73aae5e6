package callers

import (
	"testing"
	"time"
)

func TestEntriesWithoutEffectAreWarnings(t *testing.T) {
	inBubble(t, "caller alice {\ntier batch\n}\ncaller carol {\ntokens 1/day then nightly\n}\ntier interactive\ntier batch 80%\ntier nightly 50%", func(t *testing.T, w *world) {
		for message, want := range map[string]int{
			"caller 'carol' has no client key, so its limits have no effect": 1,
			"tier 'interactive' has no caller, so it has no effect":          1,
			"tier 'batch' has no caller, so it has no effect":                0,
			"tier 'nightly' has no caller, so it has no effect":              0,
		} {
			if got := len(w.Logged(message)); got != want {
				t.Errorf("%q was logged %d times, want %d", message, got, want)
			}
		}
	})
}

func TestMarksOfALimitAreLoggedOncePerWindow(t *testing.T) {
	inBubble(t, "caller alice {\nrequests 10/minute\nrequests 1/second\n}", func(t *testing.T, w *world) {
		for range 12 {
			w.chat(`{}`)
			time.Sleep(2 * time.Second)
		}
		for _, message := range []string{"caller nears its limit", "caller reached its limit"} {
			if got := w.Logged(message); len(got) != 1 || got[0].ContextMap()["limit"] != "10/minute" || got[0].ContextMap()["caller"] != "alice" {
				t.Errorf("%s: got %v", message, got)
			}
		}
	})
}
