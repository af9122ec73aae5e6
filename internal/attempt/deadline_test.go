package attempt

import (
	"cmp"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
)

var (
	errFirst = errors.New("the first step was too slow")
	errLater = errors.New("a later step was too slow")
)

func TestADeadlineEndsWhatIsTooSlow(t *testing.T) {
	const s = time.Second
	for name, c := range map[string]struct {
		steps func(*deadline)
		after time.Duration // 0: never
		cause error
	}{
		"one step":                {func(d *deadline) { d.start(5*s, errFirst) }, 5 * s, errFirst},
		"a step that was stopped": {func(d *deadline) { d.start(5*s, errFirst); d.stop() }, 0, nil},
		"a step that has ended":   {func(d *deadline) { d.start(5*s, errFirst); d.end() }, 0, nil},
		"a longer step after a shorter one": {func(d *deadline) {
			d.start(5*s, errFirst)
			time.Sleep(4 * s)
			d.stop()
			d.start(10*s, errLater)
		}, 14 * s, errLater},
		"a shorter step after a longer one": {func(d *deadline) {
			d.start(10*s, errFirst)
			time.Sleep(4 * s)
			d.stop()
			d.start(3*s, errLater)
		}, 7 * s, errLater},
		"a step long after another": {func(d *deadline) {
			d.start(5*s, errFirst)
			d.stop()
			time.Sleep(60 * s)
			d.start(2*s, errLater)
		}, 62 * s, errLater},
		"a step after the end": {func(d *deadline) {
			d.start(5*s, errFirst)
			d.end()
			d.start(6*s, errLater)
		}, 6 * s, errLater},
		"a step that is extended": {func(d *deadline) {
			d.start(5*s, errFirst)
			time.Sleep(4 * s)
			d.Extend()
			time.Sleep(4 * s)
			d.Extend()
		}, 13 * s, errFirst},
		"a step of a request that the backend has refused": {func(d *deadline) {
			d.watched(&impatience{asks: 3}, 2*s)
			d.start(10*s, errFirst)
			time.Sleep(s)
			d.refused()
			d.sent() // once more
		}, 10 * s, errFirst},
		"a step that is watched": {func(d *deadline) {
			d.watched(&impatience{asks: 3}, 2*s)
			d.start(10*s, errFirst)
		}, 4 * s, ErrSilent},
		"a step that is watched for longer than it may take": {func(d *deadline) {
			d.watched(&impatience{asks: 30}, 2*s)
			d.start(10*s, errFirst)
		}, 10 * s, errFirst},
		"a later step that is watched": {func(d *deadline) {
			d.watched(&impatience{asks: 1}, 2*s)
			d.start(10*s, errFirst)
			time.Sleep(s)
			d.stop()
			time.Sleep(5 * s)
			d.start(3*s, errLater)
		}, 6 * s, ErrSilent},
		"a step in which the upload stalls": {func(d *deadline) {
			d.watched(&impatience{asks: 1}, 0)
			d.start(10*s, errFirst)
			for range 20 {
				d.Extend()
				time.Sleep(s)
			}
			d.Extend()
		}, 24 * s, ErrSilent},
		"a step in which the upload stalls and goes on": {func(d *deadline) {
			d.watched(&impatience{asks: 1}, 0)
			d.start(10*s, errFirst)
			for range 5 {
				time.Sleep(3 * s)
				d.Extend()
			}
			time.Sleep(s)
			d.sent()
		}, 18 * s, ErrSilent},
		"a step in which the upload stalls again": {func(d *deadline) {
			d.watched(&impatience{asks: 1, after: 20 * s}, 0)
			d.start(60*s, errFirst)
			time.Sleep(3 * s)
			d.Extend() // it counts as over two seconds later
		}, 25 * s, ErrSilent},
		"a step in which the request is sent late": {func(d *deadline) {
			d.watched(&impatience{asks: 1}, 0)
			d.start(10*s, errFirst)
			time.Sleep(s)
			d.sent()
			time.Sleep(s)
			d.sent()
		}, 3 * s, ErrSilent},
		"a step that is not watched any more": {func(d *deadline) {
			d.watched(&impatience{asks: 1}, 2*s)
			d.start(10*s, errFirst)
			d.unwatched()
		}, 10 * s, errFirst},
		"a step that is watched by a process that was suspended": {func(d *deadline) {
			d.watched(&impatience{asks: 1}, 2*s)
			d.start(10*s, errFirst)
			d.timer.Stop()
			time.Sleep(5 * s)
			d.wake()
		}, 5*s + asleep, ErrSilent},
		"extending what was stopped": {func(d *deadline) {
			d.start(5*s, errFirst)
			d.stop()
			d.Extend()
		}, 0, nil},
		"many steps in time": {func(d *deadline) {
			for range 100 {
				d.start(5*s, errFirst)
				time.Sleep(4 * s)
				if !d.stop() {
					t.Error("a step in time was too slow")
				}
			}
			d.end()
		}, 0, nil},
	} {
		t.Run(name, func(t *testing.T) {
			bubble.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancelCause(t.Context())
				defer cancel(nil)
				begin := time.Now()
				d := deadline{cancel: cancel}
				c.steps(&d)
				select {
				case <-ctx.Done():
				case <-time.After(time.Hour):
				}
				if c.after == 0 {
					if err := context.Cause(ctx); err != nil || !d.stop() {
						t.Fatalf("it ended with %v", err)
					}
					return
				}
				if got, cause := time.Since(begin), context.Cause(ctx); got != c.after || cause != c.cause {
					t.Fatalf("it ended after %s with %v, want %s and %v", got, cause, c.after, c.cause)
				}
				if d.stop() {
					t.Error("the step counts as in time")
				}
			})
		})
	}
}

// BenchmarkStep measures what each event of a stream costs.
func BenchmarkStep(b *testing.B) {
	d := deadline{cancel: func(error) {}}
	defer d.end()
	b.ReportAllocs()
	for b.Loop() {
		d.start(time.Minute, errFirst)
		d.stop()
	}
}

// BenchmarkRequest measures what the only step of a request costs.
func BenchmarkRequest(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		d := deadline{cancel: func(error) {}}
		d.start(time.Minute, errFirst)
		d.stop()
		d.end()
	}
}

// impatience is a Watch that gives up when it is asked so many times, for the
// first time after so long, or after 2 s.
type impatience struct {
	asks  int
	after time.Duration
}

func (p *impatience) Sent(time.Time) time.Duration { return cmp.Or(p.after, 2*time.Second) }
func (p *impatience) Unsent()                      {}
func (p *impatience) Heard(time.Time)              {}
func (p *impatience) Left(time.Time)               {}
func (p *impatience) Served()                      {}

func (p *impatience) Late(time.Time) time.Duration {
	if p.asks--; p.asks == 0 {
		return 0
	}
	return time.Second
}
