package openailb

import (
	"bytes"
	"compress/gzip"
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

const (
	streamPreamble = "data: {\"choices\":[],\"id\":\"\",\"model\":\"\",\"prompt_filter_results\":[{}]}\n\n" +
		"data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n"
	streamContent = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"Hello\"}}]}\n\n"
	streamError   = "data: {\"error\":{\"message\":\"busy\",\"type\":\"server_error\",\"param\":null,\"code\":\"server_is_overloaded\"}}\n\n"
	streamEnd     = "data: [DONE]\n\n"
)

// streams answers with pieces of a stream, each flushed on its own. A piece may
// also be a time.Duration to wait, or a func to call.
func streams(pieces ...any) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		w.WriteHeader(200)
		w.(http.Flusher).Flush()
		for _, piece := range pieces {
			switch p := piece.(type) {
			case string:
				io.WriteString(w, p)
				w.(http.Flusher).Flush()
			case time.Duration:
				select {
				case <-time.After(p):
				case <-r.Context().Done():
					return
				}
			case func():
				p()
			}
		}
	}
}

func abort() { panic(http.ErrAbortHandler) }

// stream asks for a streamed chat completion.
func (w *world) stream() clientReply { return w.post(`{"model":"gpt-4o","stream":true,"messages":[]}`) }

func TestAStreamThatFailsBeforeItsContentGoesOn(t *testing.T) {
	const preambleOfResponses = "event: response.created\ndata: {\"type\":\"response.created\"}\n\nevent: response.in_progress\ndata: {\"type\":\"response.in_progress\"}\n\n"
	for _, c := range []struct {
		name    string
		reply   http.HandlerFunc
		class   string
		seconds float64
	}{
		{"an error at once", streams(streamError), "overloaded", 10},
		{"an error after the preamble", streams(streamPreamble, time.Second, streamError), "overloaded", 10},
		{"an error with a hint", streams(`data: {"error":{"code":"rate_limit_exceeded","message":"Please try again in 7s."}}` + "\n\n"), "throttled", 7},
		{"Azure's error event", streams("event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"too_many_requests\",\"code\":\"no_capacity\"}}\n\n"), "overloaded", 10},
		{"a failed response", streams(preambleOfResponses, "event: response.failed\ndata: {\"type\":\"response.failed\",\"response\":{\"error\":{\"code\":\"server_error\"}}}\n\n"), "failed", 10},
		{"an error split over packets", streams(streamError[:9], streamError[9:30], streamError[30:]), "overloaded", 10},
		{"an error with CRLF", streams(strings.ReplaceAll(streamPreamble+streamError, "\n", "\r\n")), "overloaded", 10},
		{"an end at once", streams(), "failed", 10},
		{"an end after the preamble", streams(streamPreamble), "failed", 10},
		{"[DONE] at once", streams(streamEnd), "failed", 10},
		{"no body at all", says(200, "", "Content-Type", "text/event-stream", "Content-Length", "0"), "failed", 10},
		{"a whole reply that is cut", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.Header().Set("Content-Length", "100")
			io.WriteString(w, `{"id":`)
		}, "failed", 10},
		{"a model that is not there", streams(`data: {"error":{"type":"invalid_request_error","code":"model_not_found"}}` + "\n\n"), "no_model", 60},
		{"a cut at once", streams(abort), "failed", 10},
		{"a cut after the preamble", streams(streamPreamble, abort), "failed", 10},
		{"a whole reply that is an error", says(200, `{"error":{"code":429,"message":"try again in 3s"}}`), "throttled", 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			inBubble(t, threeInOrder, func(t *testing.T, w *world) {
				good := streamPreamble + streamContent + streamEnd
				w.backends["a"].replies(c.reply)
				w.backends["b"].replies(streams(good))
				reply := w.stream()
				reply.wantServed(t, "b")
				if reply.body != good {
					t.Errorf("client got %q, want b's bytes alone", reply.body)
				}
				benched := w.logged("backend benched")
				if len(benched) != 1 || benched[0].ContextMap()["class"] != c.class || benched[0].ContextMap()["seconds"] != c.seconds {
					t.Errorf("logged %v, want %s for %v s", benched, c.class, c.seconds)
				}
				w.wantCalls(map[string]int{"a": 1, "b": 1, "c": 0})

				// with nobody left, the client gets an HTTP error, not a 200
				for _, name := range []string{"b", "c"} {
					w.backends[name].replies(c.reply)
				}
				if reply := w.stream(); reply.status < 400 || !strings.Contains(reply.body, `"error"`) || reply.header.Get("Content-Type") != "application/json" {
					t.Errorf("with nobody left the client got %d %s", reply.status, reply.body)
				}
			})
		})
	}
}

func TestAStreamsOwnErrorIsTheClients(t *testing.T) {
	inBubble(t, threeInOrder, func(t *testing.T, w *world) {
		stream := streamPreamble + "data: {\"error\":{\"code\":\"content_filter\",\"type\":\"invalid_request_error\"}}\n\n"
		w.backends["a"].replies(streams(stream))
		if reply := w.stream(); reply.status != 200 || reply.body != stream {
			t.Errorf("client got %d %q, want the stream as it was", reply.status, reply.body)
		}
		w.wantCalls(map[string]int{"b": 0})
		if n := len(w.logged("backend benched")) + len(w.logged("reply broken")); n != 0 {
			t.Errorf("%d log entries blame the backend", n)
		}
	})
}

func TestContentIsNotHeldBack(t *testing.T) {
	inBubble(t, threeInOrder, func(t *testing.T, w *world) {
		w.backends["a"].replies(streams(streamPreamble, time.Second, streamContent, 10*time.Second, streamContent, time.Second, streamEnd))
		start := time.Now()
		events := w.open(t)
		if got := events.next(t, len(streamPreamble+streamContent)); got != streamPreamble+streamContent {
			t.Errorf("first the client got %q", got)
		}
		if at := time.Since(start); at != time.Second {
			t.Errorf("the first content came after %s, want 1s", at)
		}
		if got := events.next(t, len(streamContent)); got != streamContent || time.Since(start) != 11*time.Second {
			t.Errorf("after %s the client got %q", time.Since(start), got)
		}
		if rest, err := io.ReadAll(events.res.Body); string(rest) != streamEnd || err != nil {
			t.Errorf("at the end the client got %q, %v", rest, err)
		}
	})
}

// openStream is a stream that a client reads as it comes.
type openStream struct {
	res   *http.Response
	leave context.CancelFunc
}

func (w *world) open(t *testing.T) openStream {
	t.Helper()
	ctx, leave := context.WithCancel(t.Context())
	res, err := w.client.Do(w.request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{"stream":true}`)).WithContext(ctx))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { res.Body.Close(); leave() })
	return openStream{res, leave}
}

func (s openStream) next(t testing.TB, n int) string {
	t.Helper()
	buf := make([]byte, n)
	if _, err := io.ReadFull(s.res.Body, buf); err != nil {
		t.Fatal(err)
	}
	return string(buf)
}

func TestAPreambleIsHeldBackForTwoSecondsOr64KiB(t *testing.T) {
	inBubble(t, threeInOrder, func(t *testing.T, w *world) {
		w.backends["a"].replies(streams(streamPreamble, 30*time.Second, streamError))
		start := time.Now()
		events := w.open(t)
		if at := time.Since(start); at != 2*time.Second {
			t.Errorf("the headers came after %s, want 2s", at)
		}
		if got := events.next(t, len(streamPreamble)); got != streamPreamble || time.Since(start) != 2*time.Second {
			t.Errorf("after %s the client got %q, want the preamble after 2s", time.Since(start), got)
		}
		rest, err := io.ReadAll(events.res.Body)
		if string(rest) != streamError || err != nil || time.Since(start) != 30*time.Second {
			t.Errorf("after %s the client got %q, %v", time.Since(start), rest, err)
		}
		w.wantCalls(map[string]int{"b": 0})
	})
	inBubble(t, threeInOrder, func(t *testing.T, w *world) {
		comments := strings.Repeat(": nothing yet\n\n", 5000)
		w.backends["a"].replies(streams(comments, time.Second, streamContent, streamEnd))
		start := time.Now()
		events := w.open(t)
		if at := time.Since(start); at != 0 {
			t.Errorf("the headers came after %s, want at once", at)
		}
		if rest, err := io.ReadAll(events.res.Body); string(rest) != comments+streamContent+streamEnd || err != nil {
			t.Errorf("client got %d bytes, %v", len(rest), err)
		}
	})
}

func TestAStreamThatBreaksAfterContentIsCutForTheClient(t *testing.T) {
	for _, c := range []struct {
		name   string
		reply  http.HandlerFunc
		config string
		want   string
		clean  bool
	}{
		{"a cut", streams(streamContent, abort), "", streamContent, false},
		{"an error event", streams(streamContent, streamError, streamEnd), "", streamContent + streamError + streamEnd, true},
		{"an end without [DONE]", streams(streamContent), "stream_require_end", streamContent, false},
		{"a stall", streams(streamContent, time.Hour), "stream_idle_timeout 30s", streamContent, false},
		{"a stall after the preamble", streams(streamPreamble, time.Hour), "stream_idle_timeout 30s", streamPreamble, false},
		{"a short Content-Length", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			w.Header().Set("Content-Length", "1000")
			io.WriteString(w, streamContent)
		}, "", streamContent, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			inBubble(t, "openai_lb {\nbackend http://a\nbackend http://b {\npriority 2\n}\n"+c.config+"\n}", func(t *testing.T, w *world) {
				w.backends["a"].replies(c.reply)
				reply := w.stream()
				if reply.status != 200 || reply.body != c.want || (reply.err == nil) != c.clean {
					t.Errorf("client got %d %q, %v", reply.status, reply.body, reply.err)
				}
				w.wantCalls(map[string]int{"a": 1, "b": 0})
				broken, benched := w.logged("reply broken"), w.logged("backend benched")
				if len(broken) != 1 || len(benched) != 1 || benched[0].ContextMap()["class"] != "broken_stream" {
					t.Errorf("logged %v and %v, want one broken reply and its bench", broken, benched)
				}
				w.backends["b"].replies(streams(streamContent, streamEnd))
				w.stream().wantServed(t, "b")
			})
		})
	}
}

func TestAStreamThatEndsProperlyIsNotBroken(t *testing.T) {
	inBubble(t, "openai_lb {\nbackend http://a\nstream_require_end\n}", func(t *testing.T, w *world) {
		for _, stream := range []string{
			streamContent + streamEnd,
			strings.ReplaceAll(streamContent+streamEnd, "\n", "\r\n"),
			"event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\"}\n\nevent: response.completed\ndata: {}\n\n",
			"data: {\"choices\":[{\"delta\":{\"content\":\"" + strings.Repeat("x", 1<<20) + "\"}}]}\n\n" + streamEnd,
		} {
			w.backends["a"].replies(streams(stream))
			if reply := w.stream(); reply.err != nil || reply.body != stream {
				t.Errorf("client got %d bytes of %d: %v", len(reply.body), len(stream), reply.err)
			}
		}
		if n := len(w.logged("reply broken")); n != 0 {
			t.Errorf("%d replies were taken for broken", n)
		}
	})
}

func TestASilentBackendIsLeftInTime(t *testing.T) {
	silent := func(rw http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
	for body, want := range map[string]time.Duration{`{"stream":true}`: 5 * time.Second, `{"stream":false}`: 20 * time.Second} {
		inBubble(t, `openai_lb {
			backend http://a
			backend http://b {
				priority 2
			}
			response_header_timeout 20s
			stream_first_event_timeout 5s
		}`, func(t *testing.T, w *world) {
			w.backends["a"].replies(silent)
			start := time.Now()
			w.post(body).wantServed(t, "b")
			if waited := time.Since(start); waited != want {
				t.Errorf("%s waited %s for a, want %s", body, waited, want)
			}
		})
	}
}

func TestNoAttemptBeginsThatItsCallerCannotWaitFor(t *testing.T) {
	inBubble(t, threeInOrder, func(t *testing.T, w *world) {
		slow := func(rw http.ResponseWriter, r *http.Request) {
			time.Sleep(40 * time.Second)
			status(500)(rw, r)
		}
		w.backends["a"].replies(slow)
		w.backends["b"].replies(slow)
		r := w.request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{}`))
		r.Header.Set("X-Stainless-Read-Timeout", "60")
		if reply := w.send(r); reply.status != 500 || reply.backend != "b" {
			t.Errorf("client got %d of %q, want b's 500", reply.status, reply.backend)
		}
		w.wantCalls(map[string]int{"a": 1, "b": 1, "c": 0})
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

func TestAClientThatReadsSlowlyIsNotAStall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		backend, wire := io.Pipe()
		ctx, cancel := context.WithCancelCause(t.Context())
		b := &replyBody{backend: new(http.Response), body: backend, idle: 10 * time.Second, cancel: cancel}
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
		if _, err := b.Read(make([]byte, 1)); err != errIdleStream || time.Since(start) != 10*time.Second {
			t.Errorf("a backend that stalls gives %v after %s", err, time.Since(start))
		}
	})
}

func TestACompressedStreamPassesAsItIs(t *testing.T) {
	var zipped bytes.Buffer
	gz := gzip.NewWriter(&zipped)
	io.WriteString(gz, streamContent+streamEnd)
	gz.Close()
	inBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *world) {
		w.backends["a"].replies(func(rw http.ResponseWriter, r *http.Request) {
			if ae := r.Header.Get("Accept-Encoding"); ae != "" {
				t.Errorf("a was offered %q for a stream", ae)
			}
			rw.Header().Set("Content-Type", "text/event-stream")
			rw.Header().Set("Content-Encoding", "gzip")
			rw.Write(zipped.Bytes())
		})
		r := w.request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{"stream":true}`))
		r.Header.Set("Accept-Encoding", "gzip")
		if reply := w.send(r); reply.err != nil || reply.body != zipped.String() {
			t.Errorf("client got %q, %v", reply.body, reply.err)
		}
	})
}

func TestTrailersAndInterimRepliesPass(t *testing.T) {
	inBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *world) {
		w.backends["a"].replies(func(rw http.ResponseWriter, r *http.Request) {
			rw.Header().Set("Link", "</x>")
			rw.WriteHeader(103)
			rw.Header().Set("Trailer", "X-Sum")
			rw.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(rw, streamContent+streamEnd)
			rw.Header().Set("X-Sum", "abc")
		})
		res, err := w.client.Do(w.request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{}`)))
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		if body, err := io.ReadAll(res.Body); string(body) != streamContent+streamEnd || err != nil || res.Trailer.Get("X-Sum") != "abc" {
			t.Errorf("client got %q, %v and the trailers %v", body, err, res.Trailer)
		}
	})
}

func TestWhatIsOnlyLookedUpIsNoFailure(t *testing.T) {
	failed := `{"object":"response","status":"failed","error":{"code":"server_error","message":"x"}}`
	stream := "event: response.failed\ndata: {\"type\":\"response.failed\",\"response\":{\"error\":{\"code\":\"server_error\"}}}\n\n"
	for _, c := range []struct {
		method, path, body string
		reply              http.HandlerFunc
	}{
		{http.MethodGet, "/v1/responses/resp_1", failed, says(200, failed)},
		{http.MethodGet, "/v1/responses/resp_1?stream=true", stream, streams(stream)},
		{http.MethodPost, "/v1/responses/resp_1/cancel", failed, says(200, failed)},
		{http.MethodPost, "/v1/chat/completions", `{"choices":[{}],"error":""}`, says(200, `{"choices":[{}],"error":""}`)},
	} {
		inBubble(t, threeInOrder, func(t *testing.T, w *world) {
			w.backends["a"].replies(c.reply)
			if reply := w.send(w.request(c.method, c.path, nil)); reply.status != 200 || reply.body != c.body || reply.backend != "a" {
				t.Errorf("%s %s gives %d %q of %q", c.method, c.path, reply.status, reply.body, reply.backend)
			}
			w.wantCalls(map[string]int{"b": 0})
		})
	}
}

func TestTheClientsOwnErrorInTheMiddleOfAStreamBlamesNobody(t *testing.T) {
	inBubble(t, threeInOrder, func(t *testing.T, w *world) {
		stream := streamContent + "event: response.failed\ndata: {\"type\":\"response.failed\",\"response\":{\"error\":{\"code\":\"invalid_prompt\"}}}\n\n"
		w.backends["a"].replies(streams(stream))
		for range 3 {
			if reply := w.stream(); reply.body != stream || reply.backend != "a" {
				t.Errorf("client got %q of %q", reply.body, reply.backend)
			}
		}
		if n := len(w.logged("backend benched")); n != 0 {
			t.Errorf("%d benches", n)
		}
	})
}

func TestTrailersOfAReplyThatWasHeldBackForTheWholeTimePass(t *testing.T) {
	inBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *world) {
		w.backends["a"].replies(func(rw http.ResponseWriter, r *http.Request) {
			rw.Header().Set("Trailer", "X-Sum")
			streams(streamPreamble, 5*time.Second)(rw, r)
			rw.Header().Set("X-Sum", "abc")
		})
		res, err := w.client.Do(w.request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{}`)))
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		if body, err := io.ReadAll(res.Body); string(body) != streamPreamble || err != nil || res.Trailer.Get("X-Sum") != "abc" {
			t.Errorf("client got %q, %v and the trailers %v", body, err, res.Trailer)
		}
	})
}

func TestALongUploadIsNotATimeout(t *testing.T) {
	inBubble(t, "openai_lb {\nbackend http://a\nstream_first_event_timeout 10s\n}", func(t *testing.T, w *world) {
		w.backends["a"].replies(func(rw http.ResponseWriter, r *http.Request) {
			buf := make([]byte, 64<<10)
			for {
				time.Sleep(time.Second)
				if _, err := io.ReadFull(r.Body, buf); err != nil {
					break
				}
			}
			streams(streamContent, streamEnd)(rw, r)
		})
		r := w.request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{"stream":true,"x":"`+strings.Repeat("x", 4<<20)+`"}`))
		r.Header.Set("X-Early", "a")
		w.send(r).wantServed(t, "a")
	})
}
