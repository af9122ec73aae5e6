package openailb_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	openailb "github.com/openai-lb/caddy-openai-lb"
	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestMostPromptsAreWrittenInOnePiece(t *testing.T) {
	for config, want := range map[string]int{`{}`: attempt.WriteBuffer, `{"http":{"write_buffer_size":5000}}`: 5000} {
		transport, err := lbtest.Context(t).LoadModuleByID("http.reverse_proxy.transport.openai_lb", []byte(config))
		if err != nil {
			t.Fatal(err)
		}
		if got := transport.(*openailb.Transport).HTTP.Transport.WriteBufferSize; got != want {
			t.Errorf("%s: requests are written in pieces of %d bytes, want %d", config, got, want)
		}
	}
}

func TestBackendsAreReachedByTLSAndHTTP2(t *testing.T) {
	a, server, trust := lbtest.ListenTLS(t, "a", true)
	b, refusing := lbtest.Listen(t, "b")
	b.Replies(lbtest.Throttled("60"))
	address := lbtest.ServeAt(t, fmt.Sprintf(`openai_lb {
		backend %s {
			name b
		}
		backend %s {
			name a
			priority 2
		}
		%s
	}`, refusing.URL, server.URL, trust))
	lbtest.Ask(lbtest.NewClient(t), "http://"+address+"/v1/chat/completions").WantServed(t, "a")
	got := a.Received()[0].Request
	if got.ProtoMajor != 2 || got.Host != server.Listener.Addr().String() {
		t.Errorf("a was reached by %s as %q", got.Proto, got.Host)
	}
}

func TestABackendThatRefusesConnectionsIsUnreachable(t *testing.T) {
	closed := fmt.Sprintf("127.0.0.1:%d", lbtest.FreePort(t))
	_, server := lbtest.Listen(t, "b")
	address := lbtest.ServeAt(t, "openai_lb {\nbackend http://"+closed+"\nbackend "+server.URL+" {\npriority 2\n}\n}")
	for range 3 {
		lbtest.Ask(lbtest.NewClient(t), "http://"+address+"/v1/chat/completions").WantServed(t, "b")
	}
}

func TestAStaleIdleConnectionCostsNothing(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
		w.Post(`{}`).WantServed(t, "a")
		w.Backends["a"].Replies(nil)
		w.Restart("a")
		w.Post(`{"after":"restart"}`).WantServed(t, "a")
		if n := len(w.Logged("cooldown started")); n != 0 {
			t.Errorf("%d cooldowns started", n)
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
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
		const connections = 8
		dead := new(atomic.Bool)
		w.Handler.Sender.HTTP.Transport.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := w.Dial(ctx, network, addr)
			return silentlyDead{conn, dead}, err
		}
		w.Backends["a"].Replies(func(http.ResponseWriter, *http.Request) { time.Sleep(time.Second) })
		var wg sync.WaitGroup
		for range connections {
			wg.Go(func() { w.Post(`{}`) })
		}
		wg.Wait()
		dead.Store(true)
		dead = new(atomic.Bool) // what is dialed from now on lives
		w.Backends["a"].Recovers()
		w.Post(`{"after":"death"}`).WantServed(t, "a")
		w.WantCalls(map[string]int{"a": connections + 1})
		if n := len(w.Logged("cooldown started")); n != 0 {
			t.Errorf("%d cooldowns started", n)
		}
	})
}

func TestACommittedStreamHoldsNeitherPromptNorEarlierReply(t *testing.T) {
	lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
		recorder := new(recordingTransport)
		recorder.next, w.Handler.Sender.RoundTripper = w.Handler.Sender.RoundTripper, recorder
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			rw.WriteHeader(500)
			io.WriteString(rw, strings.Repeat("x", 1<<20)) // does not end within what is read ahead
		})
		more := make(chan struct{})
		w.Backends["b"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			rw.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(rw, "data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n")
			rw.(http.Flusher).Flush()
			<-more
		})
		done := make(chan lbtest.Reply)
		go func() { done <- w.Post(`{"stream":true,"messages":[]}`) }()
		synctest.Wait()
		// what io.NopCloser wraps
		upload := reflect.ValueOf(recorder.requests[1].Body).Field(0).Interface().(*bytes.Reader)
		if upload.Size() != 0 {
			t.Error("the prompt is still held")
		}
		if _, err := recorder.requests[1].GetBody(); err == nil {
			t.Error("the prompt could be sent again")
		}
		if _, err := io.Copy(io.Discard, recorder.responses[0].Body); err == nil {
			t.Error("a's reply is still open")
		}
		close(more)
		if reply := <-done; reply.Status != 200 || reply.Err != nil {
			t.Errorf("client got %d: %v", reply.Status, reply.Err)
		}
	})
}

type recordingTransport struct {
	next      http.RoundTripper
	requests  []*http.Request
	responses []*http.Response
}

func (r *recordingTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	res, err := r.next.RoundTrip(req)
	r.requests, r.responses = append(r.requests, req), append(r.responses, res)
	return res, err
}
