package callers

import (
	"testing"
	"time"

	limits "github.com/openai-lb/caddy-openai-lb/internal/callers"
	"github.com/openai-lb/caddy-openai-lb/internal/meter"
)

// TestATierOfAnotherConfigHasNoCeiling has what a reload brings for a moment: requests of one config, and limits of
// another one, which has more tiers.
func TestATierOfAnotherConfigHasNoCeiling(t *testing.T) {
	for _, options := range []string{"caller alice {\ntokens 1k/day\n}", "caller alice {\ntier batch\n}\ntier batch 80%"} {
		inBubble(t, options, func(t *testing.T, w *world) {
			w.chat(`{"model":"gpt-4o"}`).WantServed(t, "a")
			limits.MetersOf(w.Handler.Pool).Configure(time.Now(), func(string) meter.Settings {
				return meter.Settings{Tier: "nightly", Tiers: []string{"interactive", "batch", "nightly"}}
			})
			w.chat(`{"model":"gpt-4o"}`).WantServed(t, "a")
		})
	}
}

// TestAClientThatRetriesWhenItIsToldIsServed has waits that are not whole milliseconds.
func TestAClientThatRetriesWhenItIsToldIsServed(t *testing.T) {
	inBubble(t, "caller alice {\nrequests 7/second\n}", func(t *testing.T, w *world) {
		for range 50 {
			got := w.chat(`{}`)
			for got.Status == 200 {
				got = w.chat(`{}`)
			}
			wait, err := time.ParseDuration(got.Header.Get("Retry-After-Ms") + "ms")
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(wait)
			w.chat(`{}`).WantServed(t, "a")
			time.Sleep(1234567 * time.Nanosecond)
		}
	})
}
