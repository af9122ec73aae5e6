package streams

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// departure is a moment at which a client leaves.
type departure struct {
	name    string
	a, b    http.HandlerFunc
	uploads bool // the client is at its upload still
	content bool // the client has content
	options string
	calls   [2]int // of a and b
	// next is who serves the next client
	next string
}

// departures are all of them. The backends call arrived when the moment has
// come, and felt when they know that the client left.
func departures(arrived, felt func()) []departure {
	waits := func(_ http.ResponseWriter, r *http.Request) {
		arrived()
		<-r.Context().Done()
		felt()
	}
	after := func(reply, then http.HandlerFunc) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			reply(w, r)
			w.(http.Flusher).Flush()
			then(w, r)
		}
	}
	takesIn := func(_ http.ResponseWriter, r *http.Request) {
		if _, err := io.ReadFull(r.Body, make([]byte, 3000)); err != nil {
			return
		}
		arrived()
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			felt() // not at a clean end
		}
	}
	busy := lbtest.Says(503, "{}", "Retry-After", "300")
	return []departure{
		{"while it uploads what is kept", nil, nil, true, false, "", [2]int{0, 0}, "a"},
		{"while it uploads what is streamed on", takesIn, nil, true, false, "request_buffers 1KB", [2]int{1, 0}, "a"},
		{"before the headers", waits, nil, false, false, "", [2]int{1, 0}, "a"},
		{"while an error arrives", after(lbtest.Says(500, "{"), waits), nil, false, false, "", [2]int{1, 0}, "a"},
		{"while a stream's opening is held back", after(lbtest.Streams(lbtest.StreamPreamble), waits), nil, false, false, "", [2]int{1, 0}, "a"},
		{"while a whole reply is held back", after(lbtest.Says(200, "{"), waits), nil, false, false, "", [2]int{1, 0}, "a"},
		{"in mid-stream", after(lbtest.Streams(lbtest.StreamContent), waits), nil, false, true, "", [2]int{1, 0}, "a"},
		{"in the midst of a failover", busy, waits, false, false, "", [2]int{1, 1}, "b"},
		{"while the second stream's opening is held back", busy, after(lbtest.Streams(lbtest.StreamPreamble), waits), false, false, "", [2]int{1, 1}, "b"},
		{"in the midst of the second stream", busy, after(lbtest.Streams(lbtest.StreamContent), waits), false, true, "", [2]int{1, 1}, "b"},
	}
}

func TestAClientThatLeavesIsFeltByItsBackendAndBlamesNobody(t *testing.T) {
	s := lbtest.NewSites(t, "https")
	var rows []lbtest.Row
	for _, wire := range lbtest.Wires {
		for n := range departures(nil, nil) {
			arrived, felt := make(chan struct{}), make(chan struct{})
			arrive := sync.OnceFunc(func() { close(arrived) })
			d := departures(arrive, sync.OnceFunc(func() { close(felt) }))[n]
			a, backendA, options := listenBy(t, wire.Backend, "a")
			b, backendB, _ := listenBy(t, wire.Backend, "b")
			a.Replies(d.a)
			b.Replies(d.b)
			nameA, nameB := fmt.Sprintf("a%d", len(rows)), fmt.Sprintf("b%d", len(rows))
			// the access log counts what is read of a body, and has a data race
			// of its own with the transport that may still read it
			skip := ""
			if d.uploads {
				skip = "log_skip"
			}
			url := s.Add(fmt.Sprintf(`%s
			openai_lb {
				backend %s {
					name %s
				}
				backend %s {
					name %s
					priority 2
				}
				%s
				%s
			}`, skip, backendA, nameA, backendB, nameB, d.options, options))
			rows = append(rows, lbtest.Row{Name: fmt.Sprintf("%s, HTTP/%d to HTTP/%d", d.name, wire.Client, wire.Backend), Test: func(t *testing.T) {
				ctx, leave := context.WithCancel(t.Context())
				defer leave()
				var body io.Reader = strings.NewReader(`{"stream":true}`)
				if d.uploads {
					read, upload := io.Pipe()
					body = read
					go func() {
						for _, err := io.WriteString(upload, lbtest.Noise(1000)); err == nil; _, err = io.WriteString(upload, lbtest.Noise(1000)) {
							if d.a == nil {
								arrive()
							}
						}
					}()
				}
				r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, body)
				if err != nil {
					t.Fatal(err)
				}
				if d.uploads {
					r.Header.Set("X-Early", "1") // the body is the reply's to read
				}
				hasContent, gone := make(chan struct{}), make(chan struct{})
				go func() {
					defer close(gone)
					res, err := s.NewClient(t, wire.Client).Do(r)
					if err != nil {
						return
					}
					defer res.Body.Close()
					if _, err := io.ReadFull(res.Body, make([]byte, len(lbtest.StreamContent))); err == nil {
						close(hasContent)
					}
					if _, err := io.Copy(io.Discard, res.Body); err == nil {
						t.Error("the client's reply ended")
					}
				}()
				lbtest.Within(t, "the moment to leave", arrived)
				if d.content {
					lbtest.Within(t, "the client's content", hasContent)
				}
				leave()
				lbtest.Within(t, "the client is gone", gone)
				if d.calls != [2]int{} {
					lbtest.Within(t, "the backend feels it", felt)
				}
				if !d.uploads {
					lbtest.WaitFor(t, func() bool { return s.Handled(t, url) == 1 })
				}
				if got := [2]int{len(a.Received()), len(b.Received())}; got != d.calls {
					t.Errorf("a and b were called %v times, want %v", got, d.calls)
				}
				a.Recovers()
				b.Recovers()
				lbtest.Post(s.NewClient(t, wire.Client), url, `{"stream":true}`).WantServed(t, d.next)
				_, cooldownA := s.LoggedOf(t, nameA)
				_, cooldownB := s.LoggedOf(t, nameB)
				if (cooldownA != nil) != (d.next == "b") || cooldownB != nil {
					t.Errorf("a got the cooldown %+v, and b %+v", cooldownA, cooldownB)
				}
			}})
		}
	}
	s.Serve(t)
	lbtest.SideBySide(t, rows)
}

func TestAClientThatLeavesEndsTheAttemptAndBlamesNobody(t *testing.T) {
	lbtest.InBubble(t, limitedBuffers, func(t *testing.T, w *lbtest.World) {
		felt := make(chan struct{})
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			<-r.Context().Done()
			close(felt)
		})
		ctx, leave := context.WithCancel(t.Context())
		done := make(chan lbtest.Reply)
		go func() {
			done <- w.Send(w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{}`)).WithContext(ctx))
		}()
		synctest.Wait()
		leave()
		if reply := <-done; reply.Err == nil {
			t.Error("a client that left got a reply")
		}
		<-felt
		synctest.Wait()
		w.WantCalls(map[string]int{"a": 1, "b": 0})
		w.Backends["a"].Recovers()
		w.Post(`{}`).WantServed(t, "a")
	})
}

func TestAClientThatLeavesWhileItUploadsCallsNobody(t *testing.T) {
	lbtest.InBubble(t, limitedBuffers, func(t *testing.T, w *lbtest.World) {
		ctx, leave := context.WithCancel(t.Context())
		reader, writer := io.Pipe()
		done := make(chan lbtest.Reply)
		go func() { done <- w.Send(w.Request(http.MethodPost, "/v1/chat/completions", reader).WithContext(ctx)) }()
		writer.Write([]byte(`{"model":`))
		synctest.Wait()
		leave()
		writer.CloseWithError(context.Canceled) // net/http waits for the body
		<-done
		synctest.Wait()
		w.WantCalls(map[string]int{"a": 0, "b": 0})
	})
}

func TestAClientThatLeavesAStreamBlamesNobody(t *testing.T) {
	for name, pieces := range map[string][]any{
		"before content": {lbtest.StreamPreamble, time.Hour},
		"after content":  {lbtest.StreamContent, time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
				felt := make(chan struct{})
				w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
					lbtest.Streams(pieces...)(rw, r)
					close(felt)
				})
				ctx, leave := context.WithCancel(t.Context())
				done := make(chan struct{})
				go func() {
					defer close(done)
					w.Send(w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{"stream":true}`)).WithContext(ctx))
				}()
				synctest.Wait()
				leave()
				<-felt
				<-done
				synctest.Wait()
				if n := len(w.Logged("cooldown started")) + len(w.Logged("reply broken")); n != 0 {
					t.Errorf("%d log entries blame a backend", n)
				}
				w.WantCalls(map[string]int{"a": 1, "b": 0})
			})
		})
	}
}

func TestAClientThatLeavesAStreamIsFeltByTheBackend(t *testing.T) {
	a, server := lbtest.Listen(t, "a")
	left := make(chan struct{})
	a.Replies(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "data: {}\n\n")
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		close(left)
	})
	address := lbtest.ServeAt(t, "openai_lb {\nbackend "+server.URL+"\n}")
	ctx, leave := context.WithCancel(t.Context())
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+address+"/v1/chat/completions", strings.NewReader(`{"stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	res := lbtest.Do(t, lbtest.NewClient(t), r)
	if _, err := io.ReadFull(res.Body, make([]byte, len("data: {}\n\n"))); err != nil {
		t.Fatal(err)
	}
	leave()
	lbtest.Within(t, "the backend feels it", left)
}
