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
			got := w.Logged(message)
			if len(got) != 1 {
				t.Fatalf("%s: got %v", message, got)
			}
			for field, want := range map[string]any{"pool": w.Handler.Pool, "caller": "alice", "kind": "requests", "limit": "10/minute", "allowed": int64(10)} {
				if is := got[0].ContextMap()[field]; is != want {
					t.Errorf("%s: %s is %v, want %v", message, field, is, want)
				}
			}
		}
	})
}
