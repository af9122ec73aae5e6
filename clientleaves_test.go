package openailb

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
	busy := says(503, "{}", "Retry-After", "300")
	return []departure{
		{"while it uploads what is kept", nil, nil, true, false, "", [2]int{0, 0}, "a"},
		{"while it uploads what is streamed on", takesIn, nil, true, false, "request_buffers 1KB", [2]int{1, 0}, "a"},
		{"before the headers", waits, nil, false, false, "", [2]int{1, 0}, "a"},
		{"while an error arrives", after(says(500, "{"), waits), nil, false, false, "", [2]int{1, 0}, "a"},
		{"while a stream's opening is held back", after(streams(streamPreamble), waits), nil, false, false, "", [2]int{1, 0}, "a"},
		{"while a whole reply is held back", after(says(200, "{"), waits), nil, false, false, "", [2]int{1, 0}, "a"},
		{"in mid-stream", after(streams(streamContent), waits), nil, false, true, "", [2]int{1, 0}, "a"},
		{"in the midst of a failover", busy, waits, false, false, "", [2]int{1, 1}, "b"},
		{"while the second stream's opening is held back", busy, after(streams(streamPreamble), waits), false, false, "", [2]int{1, 1}, "b"},
		{"in the midst of the second stream", busy, after(streams(streamContent), waits), false, true, "", [2]int{1, 1}, "b"},
	}
}

func TestAClientThatLeavesIsFeltByItsBackendAndBlamesNobody(t *testing.T) {
	s := newSites(t, "https")
	var rows []subtest
	for _, wire := range wires {
		for n := range departures(nil, nil) {
			arrived, felt := make(chan struct{}), make(chan struct{})
			arrive := sync.OnceFunc(func() { close(arrived) })
			d := departures(arrive, sync.OnceFunc(func() { close(felt) }))[n]
			a, backendA, options := listenBy(t, wire.backend, "a")
			b, backendB, _ := listenBy(t, wire.backend, "b")
			a.replies(d.a)
			b.replies(d.b)
			nameA, nameB := fmt.Sprintf("a%d", len(rows)), fmt.Sprintf("b%d", len(rows))
			// the access log counts what is read of a body, and has a data race of
			// its own with the transport that may still read it
			skip := ""
			if d.uploads {
				skip = "log_skip"
			}
			url := s.add(fmt.Sprintf(`%s
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
			rows = append(rows, subtest{name: fmt.Sprintf("%s, HTTP/%d to HTTP/%d", d.name, wire.client, wire.backend), test: func(t *testing.T) {
				ctx, leave := context.WithCancel(t.Context())
				defer leave()
				var body io.Reader = strings.NewReader(`{"stream":true}`)
				if d.uploads {
					read, upload := io.Pipe()
					body = read
					go func() {
						for _, err := io.WriteString(upload, noise(1000)); err == nil; _, err = io.WriteString(upload, noise(1000)) {
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
					res, err := s.newClient(t, wire.client).Do(r)
					if err != nil {
						return
					}
					defer res.Body.Close()
					if _, err := io.ReadFull(res.Body, make([]byte, len(streamContent))); err == nil {
						close(hasContent)
					}
					if _, err := io.Copy(io.Discard, res.Body); err == nil {
						t.Error("the client's reply ended")
					}
				}()
				within(t, "the moment to leave", arrived)
				if d.content {
					within(t, "the client's content", hasContent)
				}
				leave()
				within(t, "the client is gone", gone)
				if d.calls != [2]int{} {
					within(t, "the backend feels it", felt)
				}
				if !d.uploads {
					waitFor(t, func() bool { return s.handled(t, url) == 1 })
				}
				if got := [2]int{len(a.received()), len(b.received())}; got != d.calls {
					t.Errorf("a and b were called %v times, want %v", got, d.calls)
				}
				a.recovers()
				b.recovers()
				post(s.newClient(t, wire.client), url, `{"stream":true}`).wantServed(t, d.next)
				_, benchedA := s.loggedOf(t, nameA)
				_, benchedB := s.loggedOf(t, nameB)
				if (benchedA != nil) != (d.next == "b") || benchedB != nil {
					t.Errorf("benched %+v and %+v", benchedA, benchedB)
				}
			}})
		}
	}
	s.serve(t)
	sideBySide(t, rows)
}

func TestAClientThatLeavesEndsTheAttemptAndBlamesNobody(t *testing.T) {
	inBubble(t, limitedBuffers, func(t *testing.T, w *world) {
		felt := make(chan struct{})
		w.backends["a"].replies(func(rw http.ResponseWriter, r *http.Request) {
			<-r.Context().Done()
			close(felt)
		})
		ctx, leave := context.WithCancel(t.Context())
		done := make(chan clientReply)
		go func() {
			done <- w.send(w.request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{}`)).WithContext(ctx))
		}()
		synctest.Wait()
		leave()
		if reply := <-done; reply.err == nil {
			t.Error("a client that left got a reply")
		}
		<-felt
		synctest.Wait()
		w.wantCalls(map[string]int{"a": 1, "b": 0})
		w.backends["a"].recovers()
		w.post(`{}`).wantServed(t, "a")
	})
}

func TestAClientThatLeavesWhileItUploadsCallsNobody(t *testing.T) {
	inBubble(t, limitedBuffers, func(t *testing.T, w *world) {
		ctx, leave := context.WithCancel(t.Context())
		reader, writer := io.Pipe()
		done := make(chan clientReply)
		go func() { done <- w.send(w.request(http.MethodPost, "/v1/chat/completions", reader).WithContext(ctx)) }()
		writer.Write([]byte(`{"model":`))
		synctest.Wait()
		leave()
		writer.CloseWithError(context.Canceled) // net/http waits for the body
		<-done
		synctest.Wait()
		w.wantCalls(map[string]int{"a": 0, "b": 0})
	})
}

func TestAClientThatLeavesAStreamBlamesNobody(t *testing.T) {
	for name, pieces := range map[string][]any{
		"before content": {streamPreamble, time.Hour},
		"after content":  {streamContent, time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, threeInOrder, func(t *testing.T, w *world) {
				felt := make(chan struct{})
				w.backends["a"].replies(func(rw http.ResponseWriter, r *http.Request) {
					streams(pieces...)(rw, r)
					close(felt)
				})
				ctx, leave := context.WithCancel(t.Context())
				done := make(chan struct{})
				go func() {
					defer close(done)
					w.send(w.request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{"stream":true}`)).WithContext(ctx))
				}()
				synctest.Wait()
				leave()
				<-felt
				<-done
				synctest.Wait()
				if n := len(w.logged("backend benched")) + len(w.logged("reply broken")); n != 0 {
					t.Errorf("%d log entries blame a backend", n)
				}
				w.wantCalls(map[string]int{"a": 1, "b": 0})
			})
		})
	}
}

func TestAClientThatLeavesAStreamIsFeltByTheBackend(t *testing.T) {
	a, server := listen(t, "a")
	left := make(chan struct{})
	a.replies(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "data: {}\n\n")
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		close(left)
	})
	address := serveAt(t, "openai_lb {\nbackend "+server.URL+"\n}")
	ctx, leave := context.WithCancel(t.Context())
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+address+"/v1/chat/completions", strings.NewReader(`{"stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	res, err := newClient(t).Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if _, err := io.ReadFull(res.Body, make([]byte, len("data: {}\n\n"))); err != nil {
		t.Fatal(err)
	}
	leave()
	within(t, "the backend feels it", left)
}
