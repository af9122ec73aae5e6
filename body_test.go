package openailb

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

const limitedBuffers = `openai_lb {
	backend http://a
	backend http://b {
		priority 2
	}
	request_buffers 1MiB
}`

func TestBodiesArriveWholeAtWhicheverBackendAnswers(t *testing.T) {
	const limit = 1 << 20
	for _, c := range []struct {
		name string
		size int
		// replayed tells that the body survives a backend that reads it all
		replayed bool
	}{
		{"empty", 0, true},
		{"one byte", 1, true},
		{"64 KiB", 64 << 10, true},
		{"just the limit", limit, true},
		{"one byte over the limit", limit + 1, false},
		{"8 MiB", 8 << 20, false},
	} {
		for _, framing := range []string{"with a length", "chunked"} {
			t.Run(c.name+" "+framing, func(t *testing.T) {
				data := bytes.Repeat([]byte("0123456789abcde\n"), c.size/16+1)[:c.size]
				body := func() io.Reader {
					if framing == "chunked" {
						return chunked(data)
					}
					return bytes.NewReader(data)
				}
				want := sha(data)
				inBubble(t, limitedBuffers, func(t *testing.T, w *world) {
					send := func() clientReply {
						return w.send(w.request(http.MethodPost, "/v1/chat/completions", body()))
					}
					arrived := func(name string) {
						t.Helper()
						calls := w.backends[name].received()
						if len(calls) == 0 {
							t.Fatalf("nothing arrived at %s", name)
						}
						if last := calls[len(calls)-1]; last.bodyHash != want || last.readErr != nil {
							t.Errorf("%s got %d bytes (%v) with another hash, want %d", name, last.bodyBytes, last.readErr, c.size)
						}
					}
					send().wantServed(t, "a")
					arrived("a")

					// a refuses after it has read everything
					w.backends["a"].replies(throttled("10"))
					reply := send()
					arrived("a")
					if c.replayed {
						reply.wantServed(t, "b")
					} else {
						reply.wantError(t, 429, "rate_limit_exceeded")
						w.wantCalls(map[string]int{"b": 0})
						send().wantServed(t, "b") // a is benched now
					}
					arrived("b")
				})
			})
		}
	}
}

func TestALongBodyGoesOnWhereNothingOfItWasRead(t *testing.T) {
	inBubble(t, limitedBuffers, func(t *testing.T, w *world) {
		w.stop("a")
		data := bytes.Repeat([]byte("x"), 5<<20)
		w.send(w.request(http.MethodPost, "/v1/files", bytes.NewReader(data))).wantServed(t, "b")
		if got := w.backends["b"].received()[0]; got.bodyHash != sha(data) {
			t.Errorf("b got %d bytes, want all %d", got.bodyBytes, len(data))
		}
	})
}

func TestAReplyBeforeTheUploadEndedIsHeard(t *testing.T) {
	inBubble(t, `openai_lb {
		backend http://a
		backend http://b {
			priority 2
		}
	}`, func(t *testing.T, w *world) {
		data := bytes.Repeat([]byte("x"), 20<<20)
		w.backends["a"].replies(throttled("9"))
		r := w.request(http.MethodPost, "/v1/chat/completions", bytes.NewReader(data))
		r.Header.Set("X-Early", "1") // a answers without reading the body
		w.send(r).wantServed(t, "b")
		benched := w.logged("backend benched")
		if len(benched) != 1 || benched[0].ContextMap()["seconds"] != 9.0 {
			t.Errorf("logged %v, want a bench of the 9s that a said", benched)
		}
	})
}

// A backend that answers early, with an error too long to be read ahead, still
// reads the upload while the next backend is asked.
func TestNoTwoAttemptsReadOneUpload(t *testing.T) {
	for _, errorSize := range []int{30, 100 << 10} {
		for _, framing := range []string{"with a length", "chunked"} {
			t.Run(fmt.Sprint(errorSize, " ", framing), func(t *testing.T) {
				inBubble(t, `openai_lb {
					backend http://a
					backend http://b {
						priority 2
					}
					request_buffers 64KiB
				}`, func(t *testing.T, w *world) {
					w.backends["a"].replies(func(rw http.ResponseWriter, r *http.Request) {
						http.NewResponseController(rw).EnableFullDuplex()
						rw.Header().Set("Content-Length", fmt.Sprint(errorSize))
						rw.WriteHeader(503)
						var writing sync.WaitGroup
						writing.Go(func() { io.WriteString(rw, strings.Repeat("x", errorSize)) })
						time.Sleep(time.Millisecond)
						io.Copy(io.Discard, r.Body)
						writing.Wait()
					})
					data := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
					r := w.request(http.MethodPost, "/v1/files", chunked(data))
					if framing == "with a length" {
						r.ContentLength = int64(len(data))
					}
					r.Header.Set("X-Early", "a")
					reply := w.send(r)
					for _, call := range w.backends["b"].received() {
						if call.bodyHash != sha(data) {
							t.Errorf("b got %d bytes, and the client %d: want all %d or no call", call.bodyBytes, reply.status, len(data))
						}
					}
					if reply.status != 503 && reply.backend != "b" {
						t.Errorf("client got %d of %q (%v)", reply.status, reply.backend, reply.err)
					}
				})
			})
		}
	}
}

// TestAnEarlyRefusalThatIsTheCallersComesWhole has a backend refuse a body that
// it goes on to read. Over HTTP/1.1, the server would take no more of it. It
// waits until the client has sent all of the body: Go's HTTP/2 client stops its
// upload at any status over 299, and tells nobody, so that the backend would
// wait for the rest until stream_idle_timeout cuts the reply.
func TestAnEarlyRefusalThatIsTheCallersComesWhole(t *testing.T) {
	for _, config := range []string{
		"openai_lb {\nrequest_buffers 100k\nbackend http://a {\nauth passthrough\n}\n}",
		"openai_lb {\nrequest_buffers 100k\nunhealthy_status 429\nbackend http://a {\napi_key " + backendKey + "\n}\n}",
	} {
		inBubble(t, config, func(t *testing.T, w *world) {
			w.useHTTP2()
			w.backends["a"].replies(func(rw http.ResponseWriter, r *http.Request) {
				control := http.NewResponseController(rw)
				if err := control.EnableFullDuplex(); err != nil {
					t.Error(err)
				}
				time.Sleep(time.Second)
				rw.WriteHeader(401)
				io.WriteString(rw, strings.Repeat("x", 70_000))
				control.Flush()
				n, err := io.Copy(io.Discard, r.Body)
				fmt.Fprintf(rw, "got %d %v", n, err)
			})
			r := w.request(http.MethodPost, "/v1/files", io.MultiReader(strings.NewReader(strings.Repeat("y", 200_000))))
			r.Header.Set("X-Early", "a")
			r.Header.Set("Authorization", "Bearer callers")
			reply := w.send(r)
			if got := strings.TrimLeft(reply.body, "x"); reply.err != nil || reply.status != 401 || got != "got 200000 <nil>" {
				t.Errorf("client got %d with %d bytes that end with %q (%v)", reply.status, len(reply.body), got, reply.err)
			}
		})
	}
}

func TestACommittedStreamHoldsNeitherPromptNorEarlierReply(t *testing.T) {
	inBubble(t, threeInOrder, func(t *testing.T, w *world) {
		recorder := &recordingTransport{next: w.handler.Transport.roundTripper}
		w.handler.Transport.roundTripper = recorder
		w.backends["a"].replies(func(rw http.ResponseWriter, r *http.Request) {
			rw.WriteHeader(500)
			io.WriteString(rw, strings.Repeat("x", 1<<20)) // does not end within what is read ahead
		})
		more := make(chan struct{})
		w.backends["b"].replies(func(rw http.ResponseWriter, r *http.Request) {
			rw.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(rw, "data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n")
			rw.(http.Flusher).Flush()
			<-more
		})
		done := make(chan clientReply)
		go func() { done <- w.post(`{"stream":true,"messages":[]}`) }()
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
		if reply := <-done; reply.status != 200 || reply.err != nil {
			t.Errorf("client got %d: %v", reply.status, reply.err)
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

func TestAnUploadThatBreaksALimitBlamesNobody(t *testing.T) {
	_, serverA := listen(t, "a")
	for _, proxy := range []string{
		"openai_lb {\nbackend " + serverA.URL + "\nrequest_buffers 4KiB\n}",
		"reverse_proxy " + serverA.Listener.Addr().String() + " {\nlb_policy openai_lb\ntransport openai_lb {\nrequest_buffers 4KiB\n}\n}",
	} {
		address := serveAt(t, "request_body {\nmax_size 200KB\n}\n"+proxy)
		r, err := http.NewRequest(http.MethodPost, "http://"+address+"/v1/files", chunked(make([]byte, 1<<20)))
		if err != nil {
			t.Fatal(err)
		}
		client := newClient(t)
		res, err := client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(res.Body)
		res.Body.Close()
		clientReply{status: res.StatusCode, header: res.Header, body: string(body), err: err}.wantError(t, 413, "request_too_large")
		ask(client, "http://"+address+"/v1/x").wantServed(t, "a")
	}
}
