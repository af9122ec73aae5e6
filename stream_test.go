package openailb

import (
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

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

func TestEventsOfAMebibytePassByteForByteAndAtOnce(t *testing.T) {
	s := newSites(t, "https")
	var events []string
	for n := range 4 {
		events = append(events, "data: {\"choices\":[{\"delta\":{\"content\":\""+noise(1<<20+n)+"\"}}]}\n\n")
	}
	var rows []subtest
	for _, wire := range wires {
		a, backend, options := listenBy(t, wire.backend, "a")
		seen := make(chan struct{})
		a.replies(func(w http.ResponseWriter, r *http.Request) {
			for _, event := range events {
				streams(event)(w, r)
				select {
				case <-seen:
				case <-r.Context().Done():
					return
				}
			}
			io.WriteString(w, streamEnd)
		})
		name := fmt.Sprintf("a%d", len(rows))
		url := s.add("openai_lb {\nbackend " + backend + " {\nname " + name + "\n}\nstream_require_end\n" + options + "\n}")
		rows = append(rows, subtest{name: fmt.Sprintf("HTTP/%d to HTTP/%d", wire.client, wire.backend), test: func(t *testing.T) {
			res, err := s.newClient(t, wire.client).Post(url, "application/json", strings.NewReader(`{"stream":true}`))
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			if got := a.received()[0].request.ProtoMajor; res.ProtoMajor != wire.client || got != wire.backend {
				t.Fatalf("it goes by HTTP/%d to HTTP/%d", res.ProtoMajor, got)
			}
			for n, event := range events {
				got := make([]byte, len(event))
				if _, err := io.ReadFull(res.Body, got); err != nil || string(got) != event {
					t.Fatalf("event %d is not what it was: %v", n, err)
				}
				seen <- struct{}{} // only now the backend goes on
			}
			if rest, err := io.ReadAll(res.Body); string(rest) != streamEnd || err != nil {
				t.Errorf("the stream ends with %q, %v", rest, err)
			}
			if _, benched := s.loggedOf(t, name); benched != nil {
				t.Errorf("benched %+v", benched)
			}
		}})
	}
	s.serve(t)
	sideBySide(t, rows)
}
