package attempt

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
)

// TestDeadlinesEndInTime has deadlines follow each other, some of which
// end in time, and some not.
func TestDeadlinesEndInTime(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		for i := range 100 {
			ctx, cancel := context.WithCancelCause(t.Context())
			d := deadline{cancel: cancel}
			limit := time.Duration(1+i*37%60) * time.Second
			d.start(limit, errFirst)
			begin := time.Now()
			if late := i%3 == 0; late {
				<-ctx.Done()
				if got := time.Since(begin); got != limit {
					t.Errorf("deadline %d ended after %s, want %s", i, got, limit)
				}
			} else {
				time.Sleep(limit - 1)
			}
			if d.stop() != (ctx.Err() == nil) {
				t.Errorf("deadline %d says that it is %t that it was in time", i, ctx.Err() == nil)
			}
			d.end()
			cancel(nil)
			time.Sleep(time.Duration(i%5) * 7 * time.Second)
		}
	})
}

// TestADeadlineThatHasEndedLeavesTheNextOneAlone has one extended and ended
// when another one has begun.
func TestADeadlineThatHasEndedLeavesTheNextOneAlone(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		first := deadline{cancel: func(error) { t.Error("the first ended though it was in time") }}
		first.start(time.Second, errFirst)
		first.end()
		ctx, cancel := context.WithCancelCause(t.Context())
		defer cancel(nil)
		second := deadline{cancel: cancel}
		begin := time.Now()
		second.start(3*time.Second, errLater)
		first.Extend()
		first.stop()
		first.end()
		<-ctx.Done()
		if got := time.Since(begin); got != 3*time.Second || context.Cause(ctx) != errLater {
			t.Errorf("the second ended after %s with %v, want 3s and %v", got, context.Cause(ctx), errLater)
		}
	})
}

// TestManyDeadlinesAtOnce is for the race detector, and for timers that go off
// just when a step ends.
func TestManyDeadlinesAtOnce(t *testing.T) {
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 200 {
				ctx, cancel := context.WithCancelCause(t.Context())
				d := deadline{cancel: cancel}
				d.start(time.Microsecond, errFirst)
				<-ctx.Done() // or the test hangs
				if d.stop() {
					t.Error("it counts as in time")
				}
				d.end()
				quick := deadline{cancel: cancel}
				quick.start(time.Hour, errLater)
				quick.Extend()
				quick.end()
				cancel(nil)
			}
		})
	}
	all.Wait()
}
