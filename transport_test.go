package openailb

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

func TestBackendsAreReachedByTLSAndHTTP2(t *testing.T) {
	a, server, trust := listenTLS(t, "a", true)
	b, refusing := listen(t, "b")
	b.replies(throttled("60"))
	address := serveAt(t, fmt.Sprintf(`openai_lb {
		backend %s {
			name b
		}
		backend %s {
			name a
			priority 2
		}
		%s
	}`, refusing.URL, server.URL, trust))
	ask(newClient(t), "http://"+address+"/v1/chat/completions").wantServed(t, "a")
	got := a.received()[0].request
	if got.ProtoMajor != 2 || got.Host != server.Listener.Addr().String() {
		t.Errorf("a was reached by %s as %q", got.Proto, got.Host)
	}
}

func TestABackendThatRefusesConnectionsIsUnreachable(t *testing.T) {
	closed := fmt.Sprintf("127.0.0.1:%d", freePort(t))
	_, server := listen(t, "b")
	address := serveAt(t, "openai_lb {\nbackend http://"+closed+"\nbackend "+server.URL+" {\npriority 2\n}\n}")
	for range 3 {
		ask(newClient(t), "http://"+address+"/v1/chat/completions").wantServed(t, "b")
	}
}

func TestAStaleIdleConnectionCostsNothing(t *testing.T) {
	inBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *world) {
		w.post(`{}`).wantServed(t, "a")
		w.backends["a"].replies(nil)
		w.restart("a")
		w.post(`{"after":"restart"}`).wantServed(t, "a")
		if n := len(w.logged("backend benched")); n != 0 {
			t.Errorf("%d backends were benched", n)
		}
	})
}

// silentlyDead is a connection that fails only when it is written to.
type silentlyDead struct {
	net.Conn
	dead *atomic.Bool
}

func (c silentlyDead) Write(p []byte) (int, error) {
	if c.dead.Load() {
		return 0, syscall.ECONNRESET
	}
	return c.Conn.Write(p)
}

func TestAnyNumberOfDeadIdleConnectionsCostsNothing(t *testing.T) {
	inBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *world) {
		const connections = 8
		dead := new(atomic.Bool)
		w.handler.Transport.HTTP.Transport.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := w.dial(ctx, network, addr)
			return silentlyDead{conn, dead}, err
		}
		w.backends["a"].replies(func(http.ResponseWriter, *http.Request) { time.Sleep(time.Second) })
		var wg sync.WaitGroup
		for range connections {
			wg.Go(func() { w.post(`{}`) })
		}
		wg.Wait()
		dead.Store(true)
		dead = new(atomic.Bool) // what is dialed from now on lives
		w.backends["a"].recovers()
		w.post(`{"after":"death"}`).wantServed(t, "a")
		w.wantCalls(map[string]int{"a": connections + 1})
		if n := len(w.logged("backend benched")); n != 0 {
			t.Errorf("%d backends were benched", n)
		}
	})
}
