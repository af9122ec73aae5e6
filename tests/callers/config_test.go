package callers

import (
	"testing"
	"time"
)

func TestEntriesWithoutEffectAreWarnings(t *testing.T) {
	inBubble(t, "caller alice {\ntier batch\n}\ncaller carol {\ntier interactive\ntokens 1/day then nightly\n}\ncaller * {\ntier batch\ntokens 1/hour then batch\ntokens 1/day then nightly\ntokens 1/month then interactive\n}\ntier interactive\ntier batch\ntier nightly\ntier unused", func(t *testing.T, w *world) {
		for message, want := range map[string]int{
			"caller 'carol' has no client key, so its limits have no effect":                                                                     1,
			"tier 'unused' has no caller, so it has no effect":                                                                                   1,
			"tier 'batch' has no caller, so it has no effect":                                                                                    0,
			"tier 'nightly' has no caller, so it has no effect":                                                                                  0,
			"caller '*': '1/hour then batch' changes no tier, because 'batch' is not less important than the caller's tier 'batch'":              1,
			"caller '*': '1/day then nightly' changes no tier, because 'nightly' is not less important than the caller's tier 'batch'":           0,
			"caller '*': '1/month then interactive' changes no tier, because 'interactive' is not less important than the caller's tier 'batch'": 1,
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

func TestATierThatIsAloneIsAWarning(t *testing.T) {
	inBubble(t, "caller alice {\ntier batch\n}\ntier batch", func(t *testing.T, w *world) {
		if got := len(w.Logged("tier 'batch' is the only one, so it has no effect: all callers are in it")); got != 1 {
			t.Errorf("it was logged %d times", got)
		}
	})
}
