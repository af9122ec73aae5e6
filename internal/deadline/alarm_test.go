package deadline

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
		var alarms Alarms
		defer alarms.Close()
		for i := range 100 {
			ctx, cancel := context.WithCancelCause(t.Context())
			d := Deadline{Cancel: cancel, Alarms: &alarms}
			limit := time.Duration(1+i*37%60) * time.Second
			d.Start(limit, errFirst)
			begin := time.Now()
			if late := i%3 == 0; late {
				<-ctx.Done()
				if got := time.Since(begin); got != limit {
					t.Errorf("deadline %d ended after %s, want %s", i, got, limit)
				}
			} else {
				time.Sleep(limit - 1)
			}
			if d.Stop() != (ctx.Err() == nil) {
				t.Errorf("deadline %d says that it is %t that it was in time", i, ctx.Err() == nil)
			}
			d.End()
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
		var alarms Alarms
		defer alarms.Close()
		first := Deadline{Cancel: func(error) { t.Error("the first ended though it was in time") }, Alarms: &alarms}
		first.Start(time.Second, errFirst)
		first.End()
		ctx, cancel := context.WithCancelCause(t.Context())
		defer cancel(nil)
		second := Deadline{Cancel: cancel, Alarms: &alarms}
		begin := time.Now()
		second.Start(3*time.Second, errLater)
		first.Extend()
		first.Stop()
		first.End()
		<-ctx.Done()
		if got := time.Since(begin); got != 3*time.Second || context.Cause(ctx) != errLater {
			t.Errorf("the second ended after %s with %v, want 3s and %v", got, context.Cause(ctx), errLater)
		}
	})
}

// TestManyDeadlinesAtOnce is for the race detector, and for alarms that go off
// just when another deadline gets them.
func TestManyDeadlinesAtOnce(t *testing.T) {
	var alarms Alarms
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 200 {
				ctx, cancel := context.WithCancelCause(t.Context())
				d := Deadline{Cancel: cancel, Alarms: &alarms}
				d.Start(time.Microsecond, errFirst)
				<-ctx.Done() // or the test hangs
				if d.Stop() {
					t.Error("it counts as in time")
				}
				d.End()
				quick := Deadline{Cancel: cancel, Alarms: &alarms}
				quick.Start(time.Hour, errLater)
				quick.Extend()
				quick.End()
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
		var alarms Alarms
		ctx, cancel := context.WithCancelCause(t.Context())
		defer cancel(nil)
		d := Deadline{Cancel: cancel, Alarms: &alarms}
		d.Start(time.Second, errFirst)
		alarms.Close()
		<-ctx.Done()
		d.End()
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
			as := new(Alarms)
			if closedBefore {
				as.Close()
			}
			d := Deadline{Alarms: as, Cancel: func(error) {}}
			d.Measure()
			d.End()
			as.Close()
		})
	}
}
