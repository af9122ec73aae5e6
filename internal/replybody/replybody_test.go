package replybody

import (
	"context"
	"errors"
	"io"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/deadline"
	"github.com/openai-lb/caddy-openai-lb/internal/redact"
	"github.com/openai-lb/caddy-openai-lb/internal/sse"
)

func TestAClientThatReadsSlowlyIsNotAStall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		backend, wire := io.Pipe()
		ctx, cancel := context.WithCancelCause(t.Context())
		b := &Body{Response: new(http.Response), Source: backend, Idle: 10 * time.Second, Deadline: &deadline.Deadline{Cancel: cancel, Alarms: new(deadline.Alarms)}}
		go func() {
			for range 3 {
				io.WriteString(wire, "x")
			}
			<-ctx.Done()
			wire.CloseWithError(ctx.Err())
		}()
		for range 3 {
			if n, err := b.Read(make([]byte, 1)); n != 1 || err != nil {
				t.Fatal(n, err)
			}
			time.Sleep(time.Hour) // the client's pause
		}
		start := time.Now()
		if _, err := b.Read(make([]byte, 1)); err != ErrIdle || time.Since(start) != 10*time.Second {
			t.Errorf("a backend that stalls gives %v after %s", err, time.Since(start))
		}
	})
}

// script is a reply whose reads take so long each. The last one finds the cut.
type script []time.Duration

func (s *script) Read([]byte) (int, error) {
	time.Sleep((*s)[0])
	if *s = (*s)[1:]; len(*s) == 0 {
		return 0, io.ErrUnexpectedEOF
	}
	return 1, nil
}

func (*script) Close() error { return nil }

func TestACutIsTheBackendsUnlessItsClientKeptItWaiting(t *testing.T) {
	const ms, s = time.Millisecond, time.Second
	for name, c := range map[string]struct {
		reads  script
		pauses []time.Duration // before each read
		given  bool
	}{
		"at once":                            {script{0}, []time.Duration{0}, false},
		"a prompt client":                    {script{s, s, s}, []time.Duration{ms, ms, ms}, false},
		"right after some content":           {script{s, 0}, []time.Duration{ms, ms}, false},
		"a burst to a prompt client":         {script{s, 0, 0, 0, 0}, []time.Duration{ms, ms, ms, ms, ms}, false},
		"a client that paused":               {script{s, 0}, []time.Duration{ms, 3 * s}, true},
		"a client that never read":           {script{0}, []time.Duration{3 * s}, true},
		"buffers that lasted for some reads": {script{s, 0, 0, 0, 0}, []time.Duration{ms, 3 * s, ms, ms, ms}, true},
		"a client that is slow all the time": {script{s, 0, 0, 0, 0, 0, 0, 0}, []time.Duration{ms, 100 * ms, 100 * ms, 100 * ms, 100 * ms, 100 * ms, 100 * ms, 100 * ms}, true},
		"a client that paused long ago":      {script{s, s, s, s, s, s}, []time.Duration{ms, 3 * s, ms, ms, ms, ms}, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := &Body{Response: new(http.Response), Source: &c.reads, Idle: time.Hour, Deadline: &deadline.Deadline{Alarms: new(deadline.Alarms)}}
				b.Deadline.Start(time.Hour, ErrIdle)
				time.Sleep(3 * s) // until the reply begins
				b.Deadline.Stop()
				b.Deadline.End()
				time.Sleep(3 * s) // while it is held back
				b.GoesOut()
				for _, pause := range c.pauses[:len(c.pauses)-1] {
					time.Sleep(pause)
					if _, err := b.Read(make([]byte, 1)); err != nil {
						t.Fatal(err)
					}
				}
				time.Sleep(c.pauses[len(c.pauses)-1])
				if _, err := b.Read(make([]byte, 1)); !errors.Is(err, io.ErrUnexpectedEOF) {
					t.Errorf("the client gets %v, want the cut", err)
				}
				if got := b.GivenUp(io.ErrUnexpectedEOF); got != c.given {
					t.Errorf("it is %t that the backend gave up, want %t", got, c.given)
				}
				if b.GivenUp(ErrInStream) {
					t.Error("an error that the backend tells of counts as a cut")
				}
				b.Close()
			})
		})
	}
}

// hesitant is a backend that thinks, begins to tell of an error, and breaks off.
type hesitant struct{ reads int }

func (h *hesitant) Read(p []byte) (int, error) {
	if h.reads++; h.reads > 1 {
		return 0, io.ErrUnexpectedEOF
	}
	time.Sleep(700 * time.Millisecond)
	return copy(p, "event: error\ndata: {\"error\":{\"message\":\"x"), nil
}

func (*hesitant) Close() error { return nil }

func TestTheBackendsOwnPauseIsNotItsClients(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, cancel := context.WithCancelCause(t.Context())
		b := Body{Source: new(hesitant), Response: new(http.Response), Idle: time.Minute, Secrets: redact.Secrets{"sk-1234567890abcdef"},
			Deadline: &deadline.Deadline{Alarms: new(deadline.Alarms), Cancel: cancel}, watch: new(sse.Watcher)}
		broke := false
		b.Broken = func(reason error) {
			if broke = true; b.GivenUp(reason) {
				t.Error("the cut counts as that of a client that read at once")
			}
		}
		b.GoesOut()
		if _, err := io.Copy(io.Discard, &b); err == nil || !broke {
			t.Errorf("the reply ended with %v", err)
		}
	})
}
