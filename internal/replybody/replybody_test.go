package replybody

import (
	"context"
	"io"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/deadline"
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
