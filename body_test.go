package openailb

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
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
		{"100 MiB", 100 << 20, false},
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

func TestASlowUploadOfALongBodyIsNotATimeout(t *testing.T) {
	inBubble(t, `openai_lb {
		backend http://a
		request_buffers 1KiB
		response_header_timeout 10s
	}`, func(t *testing.T, w *world) {
		reader, writer := io.Pipe()
		go func() {
			for range 10 {
				writer.Write(bytes.Repeat([]byte("x"), 100<<10))
				time.Sleep(9 * time.Second)
			}
			writer.Close()
		}()
		w.send(w.request(http.MethodPost, "/v1/files", reader)).wantServed(t, "a")
		if got := w.backends["a"].received()[0].bodyBytes; got != 1000<<10 {
			t.Errorf("a got %d bytes, want all 1000 KiB", got)
		}
	})
}

func TestACommittedReplyHoldsNoPrompt(t *testing.T) {
	var b body
	request := func() *http.Request {
		r, err := http.NewRequest(http.MethodPost, "http://x", strings.NewReader(strings.Repeat("x", 1000)))
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	if err := b.read(request(), 2000); err != nil {
		t.Fatal(err)
	}
	out, late := request(), request()
	b.attach(out, new(openaiapi.Request), "", func() {})
	b.attach(late, new(openaiapi.Request), "", func() {})
	again, err := out.GetBody()
	if err != nil {
		t.Fatal(err)
	}
	b.release()
	if text, err := io.ReadAll(again); len(text) != 1000 || err != nil {
		t.Errorf("a reader that had begun got %d bytes, %v, want all 1000", len(text), err)
	}
	if again.(*bodyReader).segments != nil || b.prefix != nil {
		t.Error("the bytes are still held")
	}
	if _, err := late.GetBody(); err != errBodyGone {
		t.Errorf("a body that was let go could be sent again: %v", err)
	}
}
