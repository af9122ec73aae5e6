package attempt

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// TestOneAlarmServesManyDeadlines has deadlines follow each other, some of which
// end in time, and some not.
func TestOneAlarmServesManyDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var alarms alarms
		defer alarms.Close()
		for i := range 100 {
			ctx, cancel := context.WithCancelCause(t.Context())
			d := deadline{cancel: cancel, alarms: &alarms}
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
		if len(alarms.idle) != 1 {
			t.Errorf("%d alarms were needed, want 1", len(alarms.idle))
		}
	})
}

// TestADeadlineThatHasEndedLeavesTheNextOneAlone has one extended and ended
// when another one has its alarm.
func TestADeadlineThatHasEndedLeavesTheNextOneAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var alarms alarms
		defer alarms.Close()
		first := deadline{cancel: func(error) { t.Error("the first ended though it was in time") }, alarms: &alarms}
		first.start(time.Second, errFirst)
		first.end()
		ctx, cancel := context.WithCancelCause(t.Context())
		defer cancel(nil)
		second := deadline{cancel: cancel, alarms: &alarms}
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

// TestManyDeadlinesAtOnce is for the race detector, and for alarms that go off
// just when another deadline gets them.
func TestManyDeadlinesAtOnce(t *testing.T) {
	var alarms alarms
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 200 {
				ctx, cancel := context.WithCancelCause(t.Context())
				d := deadline{cancel: cancel, alarms: &alarms}
				d.start(time.Microsecond, errFirst)
				<-ctx.Done() // or the test hangs
				if d.stop() {
					t.Error("it counts as in time")
				}
				d.end()
				quick := deadline{cancel: cancel, alarms: &alarms}
				quick.start(time.Hour, errLater)
				quick.Extend()
				quick.end()
				cancel(nil)
			}
		})
	}
	all.Wait()
	alarms.Close()
}

// TestClosedAlarmsKeepNoTimer has a deadline outlive the alarms.
func TestClosedAlarmsKeepNoTimer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var alarms alarms
		ctx, cancel := context.WithCancelCause(t.Context())
		defer cancel(nil)
		d := deadline{cancel: cancel, alarms: &alarms}
		d.start(time.Second, errFirst)
		alarms.Close()
		<-ctx.Done()
		d.end()
		if len(alarms.idle) != 0 {
			t.Error("an alarm is kept")
		}
	})
}

// TestAnAlarmThatWasNeverSetNeedsNoTimer measures without any step, as for a client
// that leaves while it gets what was read ahead.
func TestAnAlarmThatWasNeverSetNeedsNoTimer(t *testing.T) {
	for name, closedBefore := range map[string]bool{"it is idle when the alarms close": false, "the alarms are closed": true} {
		t.Run(name, func(*testing.T) {
			as := new(alarms)
			if closedBefore {
				as.Close()
			}
			d := deadline{alarms: as, cancel: func(error) {}}
			d.measure()
			d.end()
			as.Close()
		})
	}
}
