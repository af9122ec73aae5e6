package silence

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// TestACriticalAlertFiresWithinTwoMinutesIfAllBackendsHang records the series
// of a run, and has promtool evaluate the alerts with them.
func TestACriticalAlertFiresWithinTwoMinutesIfAllBackendsHang(t *testing.T) {
	const healthy, hanging = 5 * time.Minute, 3 * time.Minute
	name := lbtest.Unique("all-hang")
	var rec lbtest.Recording
	lbtest.InBubble(t, lbtest.PoolOf("a b", "pool "+name), func(t *testing.T, w *lbtest.World) {
		warm(w)
		ctx, leave := context.WithCancel(t.Context())
		var all sync.WaitGroup
		run := func(d time.Duration) {
			for range d / lbtest.ScrapeInterval {
				rec.Add(t, name)
				for range 3 {
					all.Go(func() {
						w.Send(w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(chat)).WithContext(ctx))
					})
					time.Sleep(lbtest.ScrapeInterval / 3)
				}
			}
		}
		run(healthy)
		for _, b := range w.Backends {
			b.Replies(lbtest.Hangs)
		}
		run(hanging)
		if n := lbtest.SumOf(t, "first_byte_waiting", map[string]string{"pool": name}); n < 30 {
			t.Errorf("%g requests wait", n)
		}
		for _, b := range w.Backends {
			b.Recovers()
		}
		leave() // of those that wait
		all.Wait()
		ctx, leave = context.WithCancel(t.Context())
		defer leave()
		run(6 * time.Minute)
		all.Wait()
	})
	rec.WantAlerts(t, "critical",
		lbtest.Firing{At: healthy},
		lbtest.Firing{At: healthy + 2*time.Minute, Alerts: []string{"OpenAILBModelNotServed", "OpenAILBNoFirstByte"}},
		lbtest.Firing{At: healthy + hanging + 6*time.Minute - lbtest.ScrapeInterval})
}
