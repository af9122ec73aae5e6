package streams

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

var limitedBuffers = lbtest.InOrder("a b", "request_buffers 1MiB")

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
						return lbtest.Chunked(data)
					}
					return bytes.NewReader(data)
				}
				want := lbtest.Hash(data)
				lbtest.InBubble(t, limitedBuffers, func(t *testing.T, w *lbtest.World) {
					send := func() lbtest.Reply {
						return w.Send(w.Request(http.MethodPost, "/v1/chat/completions", body()))
					}
					arrived := func(name string) {
						t.Helper()
						calls := w.Backends[name].Received()
						if len(calls) == 0 {
							t.Fatalf("nothing arrived at %s", name)
						}
						if last := calls[len(calls)-1]; last.BodyHash != want || last.ReadErr != nil {
							t.Errorf("%s got %d bytes (%v) with another hash, want %d", name, last.BodyBytes, last.ReadErr, c.size)
						}
					}
					send().WantServed(t, "a")
					arrived("a")

					// a refuses after it has read everything
					w.Backends["a"].Replies(lbtest.Throttled("10"))
					reply := send()
					arrived("a")
					if c.replayed {
						reply.WantServed(t, "b")
					} else {
						reply.WantError(t, 429, "rate_limit_exceeded")
						w.WantCalls(map[string]int{"b": 0})
						send().WantServed(t, "b") // a cools down now
					}
					arrived("b")
				})
			})
		}
	}
}

func TestALongBodyGoesOnWhereNothingOfItWasRead(t *testing.T) {
	lbtest.InBubble(t, limitedBuffers, func(t *testing.T, w *lbtest.World) {
		w.Stop("a")
		data := bytes.Repeat([]byte("x"), 5<<20)
		w.Send(w.Request(http.MethodPost, "/v1/files", bytes.NewReader(data))).WantServed(t, "b")
		if got := w.Backends["b"].Received()[0]; got.BodyHash != lbtest.Hash(data) {
			t.Errorf("b got %d bytes, want all %d", got.BodyBytes, len(data))
		}
	})
}

func TestAReplyBeforeTheUploadEndedIsHeard(t *testing.T) {
	lbtest.InBubble(t, lbtest.InOrder("a b", ""), func(t *testing.T, w *lbtest.World) {
		data := bytes.Repeat([]byte("x"), 20<<20)
		w.Backends["a"].Replies(lbtest.Throttled("9"))
		r := w.Request(http.MethodPost, "/v1/chat/completions", bytes.NewReader(data))
		r.Header.Set("X-Early", "1") // a answers without reading the body
		w.Send(r).WantServed(t, "b")
		cooldowns := w.Logged("cooldown started")
		if len(cooldowns) != 1 || cooldowns[0].ContextMap()["seconds"] != 9.0 {
			t.Errorf("logged %v, want a cooldown of the 9s that a said", cooldowns)
		}
	})
}

// A backend that answers early, with an error too long to be read ahead, still
// reads the upload while the next backend is asked.
func TestNoTwoAttemptsReadOneUpload(t *testing.T) {
	for _, errorSize := range []int{30, 100 << 10} {
		for _, framing := range []string{"with a length", "chunked"} {
			t.Run(fmt.Sprint(errorSize, " ", framing), func(t *testing.T) {
				lbtest.InBubble(t, lbtest.InOrder("a b", "request_buffers 64KiB"), func(t *testing.T, w *lbtest.World) {
					w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
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
					r := w.Request(http.MethodPost, "/v1/files", lbtest.Chunked(data))
					if framing == "with a length" {
						r.ContentLength = int64(len(data))
					}
					r.Header.Set("X-Early", "a")
					reply := w.Send(r)
					for _, call := range w.Backends["b"].Received() {
						if call.BodyHash != lbtest.Hash(data) {
							t.Errorf("b got %d bytes, and the client %d: want all %d or no call", call.BodyBytes, reply.Status, len(data))
						}
					}
					if reply.Status != 503 && reply.Backend != "b" {
						t.Errorf("client got %d of %q (%v)", reply.Status, reply.Backend, reply.Err)
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
	const config = "openai_lb {\nrequest_buffers 100k\nbackend http://a {\nauth passthrough\n}\n}"
	lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
		w.UseHTTP2()
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
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
		r := w.Request(http.MethodPost, "/v1/files", io.MultiReader(strings.NewReader(strings.Repeat("y", 200_000))))
		r.Header.Set("X-Early", "a")
		r.Header.Set("Authorization", "Bearer callers")
		reply := w.Send(r)
		if got := strings.TrimLeft(reply.Body, "x"); reply.Err != nil || reply.Status != 401 || got != "got 200000 <nil>" {
			t.Errorf("client got %d with %d bytes that end with %q (%v)", reply.Status, len(reply.Body), got, reply.Err)
		}
	})
}

func TestAnUploadThatBreaksALimitBlamesNobody(t *testing.T) {
	_, serverA := lbtest.Listen(t, "a")
	for _, proxy := range []string{
		"openai_lb {\nbackend " + serverA.URL + "\nrequest_buffers 4KiB\n}",
		"reverse_proxy " + serverA.Listener.Addr().String() + " {\nlb_policy openai_lb\ntransport openai_lb {\nrequest_buffers 4KiB\n}\n}",
	} {
		address := lbtest.ServeAt(t, "request_body {\nmax_size 200KB\n}\n"+proxy)
		r := lbtest.NewRequest(t, http.MethodPost, "http://"+address+"/v1/files", lbtest.Chunked(make([]byte, 1<<20)))
		client := lbtest.NewClient(t)
		res := lbtest.Do(t, client, r)
		body, err := io.ReadAll(res.Body)
		res.Body.Close()
		lbtest.Reply{Status: res.StatusCode, Header: res.Header, Body: string(body), Err: err}.WantError(t, 413, "request_too_large")
		lbtest.Ask(client, "http://"+address+"/v1/x").WantServed(t, "a")
	}
}

// TestARefusalComesBeforeABodyThatIsWaitingForIt has clients that send their
// body only after a 100.
func TestARefusalComesBeforeABodyThatIsWaitingForIt(t *testing.T) {
	a, serverA := lbtest.Listen(t, "a")
	address := lbtest.ServeAt(t, "openai_lb {\nbackend "+serverA.URL+"\nclient_key alice client-key-of-alice\n}")
	for name, c := range map[string]struct {
		path, key string
		status    int
	}{
		"a wrong key":     {"/v1/chat/completions", "wrong", 401},
		"an unknown path": {"/unknown", "client-key-of-alice", 404},
		"no refusal":      {"/v1/chat/completions", "client-key-of-alice", 200},
	} {
		t.Run(name, func(t *testing.T) {
			conn := lbtest.Dial(t, address)
			fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: lb\r\nApi-Key: %s\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n", c.path, c.key)
			r := bufio.NewReader(conn)
			res, err := http.ReadResponse(r, nil)
			if err == nil && res.StatusCode == http.StatusContinue {
				io.WriteString(conn, "{}")
				res, err = http.ReadResponse(r, nil)
			}
			if err != nil {
				t.Fatal(err)
			}
			if res.StatusCode != c.status || res.Close != (c.status != 200) {
				t.Errorf("got %d, and the connection closes: %v", res.StatusCode, res.Close)
			}
		})
	}
	if n := len(a.Received()); n != 1 {
		t.Errorf("a was called %d times, want once", n)
	}
}
