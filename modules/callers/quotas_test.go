package callers

import (
	"testing"
	"time"

	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

// TestTheUseOfAQuotaOutlivesARestart and is not that of a caller with the same
// name in a pool with the same name.
func TestTheUseOfAQuotaOutlivesARestart(t *testing.T) {
	storage := &certmagic.FileStorage{Path: t.TempDir()}
	bubble.Test(t, func(t *testing.T) {
		limits := []ratelimit.Limit{{Kind: ratelimit.Requests, Amount: 3, Unit: ratelimit.Month}}
		process := func(uses, want int) {
			t.Helper()
			q := openQuotas(seam.QuotaConfig{Pool: t.Name(), Quotas: map[string][]ratelimit.Limit{"a": limits}, Location: time.UTC, Logger: zap.NewNop()}, storage)
			got := 0
			for range uses {
				if r, refusal := q.Caller(time.Now(), "a").Admit(time.Now(), ratelimit.Estimate{}); refusal == nil {
					q.Settle(time.Now(), r, ratelimit.Cost{Requests: 1})
					got++
				}
			}
			if got != want {
				t.Errorf("%d requests are admitted, want %d", got, want)
			}
			if _, refusal := q.Caller(time.Now(), "b").Admit(time.Now(), ratelimit.Estimate{}); refusal != nil {
				t.Error("a backend without a quota is limited")
			}
			if err := q.Close(); err != nil {
				t.Error(err)
			}
		}
		process(2, 2)
		process(2, 1)
		process(2, 0)
		c := New(Options{Config: config, Storage: storage, AdmissionConfig: seam.AdmissionConfig{Pool: t.Name(), Logger: zap.NewNop()}})
		defer c.Close()
		if use := c.Caller(time.Now(), "a").Snapshot(time.Now()).Month; use != 0 {
			t.Errorf("a caller has the use of a backend: %d", use)
		}
	})
}
