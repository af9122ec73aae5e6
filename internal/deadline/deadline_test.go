package deadline

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

var (
	errFirst = errors.New("the first step was too slow")
	errLater = errors.New("a later step was too slow")
)

func TestADeadlineEndsWhatIsTooSlow(t *testing.T) {
	const s = time.Second
	for name, c := range map[string]struct {
		steps func(*Deadline)
		after time.Duration // 0: never
		cause error
	}{
		"one step":                {func(d *Deadline) { d.Start(5*s, errFirst) }, 5 * s, errFirst},
		"a step that was stopped": {func(d *Deadline) { d.Start(5*s, errFirst); d.Stop() }, 0, nil},
		"a step that has ended":   {func(d *Deadline) { d.Start(5*s, errFirst); d.End() }, 0, nil},
		"a longer step after a shorter one": {func(d *Deadline) {
			d.Start(5*s, errFirst)
			time.Sleep(4 * s)
			d.Stop()
			d.Start(10*s, errLater)
		}, 14 * s, errLater},
		"a shorter step after a longer one": {func(d *Deadline) {
			d.Start(10*s, errFirst)
			time.Sleep(4 * s)
			d.Stop()
			d.Start(3*s, errLater)
		}, 7 * s, errLater},
		"a step long after another": {func(d *Deadline) {
			d.Start(5*s, errFirst)
			d.Stop()
			time.Sleep(60 * s)
			d.Start(2*s, errLater)
		}, 62 * s, errLater},
		"a step after the end": {func(d *Deadline) {
			d.Start(5*s, errFirst)
			d.End()
			d.Start(6*s, errLater)
		}, 6 * s, errLater},
		"a step that is extended": {func(d *Deadline) {
			d.Start(5*s, errFirst)
			time.Sleep(4 * s)
			d.Extend()
			time.Sleep(4 * s)
			d.Extend()
		}, 13 * s, errFirst},
		"extending what was stopped": {func(d *Deadline) {
			d.Start(5*s, errFirst)
			d.Stop()
			d.Extend()
		}, 0, nil},
		"many steps in time": {func(d *Deadline) {
			for range 100 {
				d.Start(5*s, errFirst)
				time.Sleep(4 * s)
				if !d.Stop() {
					t.Error("a step in time was too slow")
				}
			}
			d.End()
		}, 0, nil},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancelCause(t.Context())
				defer cancel(nil)
				begin := time.Now()
				d := Deadline{Cancel: cancel, Alarms: new(Alarms)}
				c.steps(&d)
				select {
				case <-ctx.Done():
				case <-time.After(time.Hour):
				}
				if c.after == 0 {
					if err := context.Cause(ctx); err != nil || !d.Stop() {
						t.Fatalf("it ended with %v", err)
					}
					return
				}
				if got, cause := time.Since(begin), context.Cause(ctx); got != c.after || cause != c.cause {
					t.Fatalf("it ended after %s with %v, want %s and %v", got, cause, c.after, c.cause)
				}
				if d.Stop() {
					t.Error("the step counts as in time")
				}
			})
		})
	}
}

// BenchmarkStep measures what each event of a stream costs.
func BenchmarkStep(b *testing.B) {
	d := Deadline{Cancel: func(error) {}, Alarms: new(Alarms)}
	defer d.End()
	b.ReportAllocs()
	for b.Loop() {
		d.Start(time.Minute, errFirst)
		d.Stop()
	}
}

// BenchmarkRequest measures what the only step of a request costs.
func BenchmarkRequest(b *testing.B) {
	var alarms Alarms
	defer alarms.Close()
	b.ReportAllocs()
	for b.Loop() {
		d := Deadline{Cancel: func(error) {}, Alarms: &alarms}
		d.Start(time.Minute, errFirst)
		d.Stop()
		d.End()
	}
}
