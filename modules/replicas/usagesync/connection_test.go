package usagesync

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/state"
)

// TestManyReplicasReportAtTheSameMoments by the store's clock, whatever their
// own show: then the store delivers their reports together. Only the first
// report after a pause is sent at once. Few replicas report what is urgent as
// soon as they may.
func TestManyReplicasReportAtTheSameMoments(t *testing.T) {
	for n, want := range map[int]struct {
		moment      time.Duration
		least, most int64 // reports of four replicas in a minute
	}{3: {0, 300, 4800}, 26: {150 * time.Millisecond, 1000, 1604}, 100: {400 * time.Millisecond, 300, 604}} {
		bubble.Test(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(1, uint64(n)))
			ctx, cancel := context.WithCancel(t.Context())
			var all []*limiter.Limiters
			var reports, alone atomic.Int64
			for range 4 {
				cs, ahead := tokenLimiters(t, "1M/minute"), time.Duration(random.Int64N(int64(time.Hour)))
				var syncer Syncer
				syncer.Share(digest, cs)
				time.Sleep(time.Duration(random.Int64N(int64(3 * time.Second))))
				syncer.Follow(time.Now(), ahead)
				syncer.Groups(time.Now())
				syncer.Loaded(nil, time.Now())
				put := func(_ context.Context, records []state.Record) error {
					now := time.Now()
					if ctx.Err() == nil {
						reports.Add(1)
						if at := now.Add(ahead); want.moment > 0 && at.Sub(at.Truncate(want.moment)) > time.Millisecond {
							alone.Add(1)
						}
					}
					for _, r := range heard(records) {
						if err := syncer.Hear(r.Message, now); err != nil { // it comes back
							t.Error(err)
						}
					}
					return nil
				}
				go syncer.Run(ctx, put, func() Contact { return Contact{Whole: true, Replicas: n} })
				all = append(all, cs)
			}
			began := time.Now()
			for time.Since(began) < time.Minute {
				time.Sleep(time.Duration(random.Int64N(int64(20 * time.Millisecond))))
				spend(all[random.IntN(len(all))], time.Now(), fmt.Sprint(random.IntN(5)), 2500)
			}
			cancel()
			synctest.Wait()
			if reports, alone := reports.Load(), alone.Load(); alone > reports/20 || reports < want.least || reports > want.most {
				t.Errorf("with %d replicas, four of them send %d reports in a minute, want %d to %d; %d are sent alone", n, reports, want.least, want.most, alone)
			}
		})
	}
}
