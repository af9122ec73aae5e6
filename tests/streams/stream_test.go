package streams

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// A server may go by Accept, and not by the body. SDKs accept JSON alone, also
// where they want a stream.
func TestABackendThatGoesByAcceptSendsAStreamWhereOneIsWanted(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			if first, _, _ := strings.Cut(r.Header.Get("Accept"), ","); first == "text/event-stream" {
				lbtest.Streams(lbtest.StreamContent, lbtest.StreamEnd)(rw, r)
				return
			}
			lbtest.Says(200, `{"choices":[]}`)(rw, r)
		})
		for body, want := range map[string]string{
			`{"model":"m","stream":true}`: lbtest.StreamContent + lbtest.StreamEnd,
			`{"model":"m"}`:               `{"choices":[]}`,
		} {
			r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(body))
			r.Header.Set("Accept", "application/json")
			if reply := w.Send(r); reply.Status != 200 || reply.Body != want {
				t.Errorf("%s: the client got %d %s", body, reply.Status, reply.Body)
			}
		}
		w.WantNobodyBlamed()
	})
}

func TestAStreamThatFailsBeforeItsContentGoesOn(t *testing.T) {
	const preambleOfResponses = "event: response.created\ndata: {\"type\":\"response.created\"}\n\nevent: response.in_progress\ndata: {\"type\":\"response.in_progress\"}\n\n"
	for _, c := range []struct {
		name    string
		reply   http.HandlerFunc
		class   string
		seconds float64
	}{
		{"an error at once", lbtest.Streams(lbtest.StreamError), "overloaded", 10},
		{"an error after the preamble", lbtest.Streams(lbtest.StreamPreamble, time.Second, lbtest.StreamError), "overloaded", 10},
		{"an error with a hint", lbtest.Streams(`data: {"error":{"code":"rate_limit_exceeded","message":"Please try again in 7s."}}` + "\n\n"), "throttled", 7},
		{"Azure's error event", lbtest.Streams("event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"too_many_requests\",\"code\":\"no_capacity\"}}\n\n"), "overloaded", 10},
		{"a failed response", lbtest.Streams(preambleOfResponses, "event: response.failed\ndata: {\"type\":\"response.failed\",\"response\":{\"error\":{\"code\":\"server_error\"}}}\n\n"), "failed", 10},
		{"an error split over packets", lbtest.Streams(lbtest.StreamError[:9], lbtest.StreamError[9:30], lbtest.StreamError[30:]), "overloaded", 10},
		{"an error with CRLF", lbtest.Streams(strings.ReplaceAll(lbtest.StreamPreamble+lbtest.StreamError, "\n", "\r\n")), "overloaded", 10},
		{"an end at once", lbtest.Streams(), "failed", 10},
		{"an end after the preamble", lbtest.Streams(lbtest.StreamPreamble), "failed", 10},
		{"[DONE] at once", lbtest.Streams(lbtest.StreamEnd), "failed", 10},
		{"no body at all", lbtest.Says(200, "", "Content-Type", "text/event-stream", "Content-Length", "0"), "failed", 10},
		{"a whole reply that is cut", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.Header().Set("Content-Length", "100")
			io.WriteString(w, `{"id":`)
		}, "failed", 10},
		{"a model that is not there", lbtest.Streams(`data: {"error":{"type":"invalid_request_error","code":"model_not_found"}}` + "\n\n"), "no_model", 60},
		{"a cut at once", lbtest.Streams(lbtest.Abort), "failed", 10},
		{"a cut after the preamble", lbtest.Streams(lbtest.StreamPreamble, lbtest.Abort), "failed", 10},
		{"a whole reply that is an error", lbtest.Says(200, `{"error":{"code":429,"message":"try again in 3s"}}`), "throttled", 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
				good := lbtest.StreamPreamble + lbtest.StreamContent + lbtest.StreamEnd
				w.Backends["a"].Replies(c.reply)
				w.Backends["b"].Replies(lbtest.Streams(good))
				reply := w.PostStream()
				reply.WantServed(t, "b")
				if reply.Body != good {
					t.Errorf("client got %q, want b's bytes alone", reply.Body)
				}
				cooldowns := w.Logged("cooldown started")
				if len(cooldowns) != 1 || cooldowns[0].ContextMap()["class"] != c.class || cooldowns[0].ContextMap()["seconds"] != c.seconds {
					t.Errorf("logged %v, want %s for %v s", cooldowns, c.class, c.seconds)
				}
				w.WantCalls(map[string]int{"a": 1, "b": 1, "c": 0})

				// with nobody left, the client gets an HTTP error, not a 200
				for _, name := range []string{"b", "c"} {
					w.Backends[name].Replies(c.reply)
				}
				if reply := w.PostStream(); reply.Status < 400 || !strings.Contains(reply.Body, `"error"`) || reply.Header.Get("Content-Type") != "application/json" {
					t.Errorf("with nobody left the client got %d %s", reply.Status, reply.Body)
				}
			})
		})
	}
}

func TestAStreamsOwnErrorIsTheClients(t *testing.T) {
	lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
		stream := lbtest.StreamPreamble + "data: {\"error\":{\"code\":\"content_filter\",\"type\":\"invalid_request_error\"}}\n\n"
		w.Backends["a"].Replies(lbtest.Streams(stream))
		if reply := w.PostStream(); reply.Status != 200 || reply.Body != stream {
			t.Errorf("client got %d %q, want the stream as it was", reply.Status, reply.Body)
		}
		w.WantCalls(map[string]int{"b": 0})
		if n := len(w.Logged("cooldown started")) + len(w.Logged("reply broken")); n != 0 {
			t.Errorf("%d log entries blame the backend", n)
		}
	})
}

func TestContentIsNotHeldBack(t *testing.T) {
	lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Streams(lbtest.StreamPreamble, time.Second, lbtest.StreamContent, 10*time.Second, lbtest.StreamContent, time.Second, lbtest.StreamEnd))
		start := time.Now()
		events := w.Open(t)
		if got := events.Next(t, len(lbtest.StreamPreamble+lbtest.StreamContent)); got != lbtest.StreamPreamble+lbtest.StreamContent {
			t.Errorf("first the client got %q", got)
		}
		if at := time.Since(start); at != time.Second {
			t.Errorf("the first content came after %s, want 1s", at)
		}
		if got := events.Next(t, len(lbtest.StreamContent)); got != lbtest.StreamContent || time.Since(start) != 11*time.Second {
			t.Errorf("after %s the client got %q", time.Since(start), got)
		}
		if rest, err := io.ReadAll(events.Response.Body); string(rest) != lbtest.StreamEnd || err != nil {
			t.Errorf("at the end the client got %q, %v", rest, err)
		}
	})
}

func TestAPreambleIsHeldBackForTwoSeconds(t *testing.T) {
	lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Streams(lbtest.StreamPreamble, 30*time.Second, lbtest.StreamError))
		start := time.Now()
		events := w.Open(t)
		if at := time.Since(start); at != 2*time.Second {
			t.Errorf("the headers came after %s, want 2s", at)
		}
		if got := events.Next(t, len(lbtest.StreamPreamble)); got != lbtest.StreamPreamble || time.Since(start) != 2*time.Second {
			t.Errorf("after %s the client got %q, want the preamble after 2s", time.Since(start), got)
		}
		rest, err := io.ReadAll(events.Response.Body)
		if string(rest) != lbtest.StreamError || err != nil || time.Since(start) != 30*time.Second {
			t.Errorf("after %s the client got %q, %v", time.Since(start), rest, err)
		}
		w.WantCalls(map[string]int{"b": 0})
	})
	lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
		comments := strings.Repeat(": nothing yet\n\n", 5000)
		w.Backends["a"].Replies(lbtest.Streams(comments, time.Second, lbtest.StreamContent, lbtest.StreamEnd))
		start := time.Now()
		events := w.Open(t)
		if at := time.Since(start); at != time.Second {
			t.Errorf("the headers came after %s, want 1s", at)
		}
		if rest, err := io.ReadAll(events.Response.Body); string(rest) != comments+lbtest.StreamContent+lbtest.StreamEnd || err != nil {
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
		pauses bool // which cools the backend not down
	}{
		{"a cut", lbtest.Streams(lbtest.StreamContent, lbtest.Abort), "", lbtest.StreamContent, false, false},
		{"an error event", lbtest.Streams(lbtest.StreamContent, lbtest.StreamError, lbtest.StreamEnd), "", lbtest.StreamContent + lbtest.StreamError + lbtest.StreamEnd, true, false},
		{"a stall", lbtest.Streams(lbtest.StreamContent, time.Hour), "stream_idle_timeout 30s", lbtest.StreamContent, false, true},
		{"a stall after the preamble", lbtest.Streams(lbtest.StreamPreamble, time.Hour), "stream_idle_timeout 30s", lbtest.StreamPreamble, false, true},
		{"a short Content-Length", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			w.Header().Set("Content-Length", "1000")
			io.WriteString(w, lbtest.StreamContent)
		}, "", lbtest.StreamContent, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			lbtest.InBubble(t, "openai_lb {\nbackend http://a\nbackend http://b {\npriority 2\n}\n"+c.config+"\n}", func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(c.reply)
				reply := w.PostStream()
				if reply.Status != 200 || reply.Body != c.want || (reply.Err == nil) != c.clean {
					t.Errorf("client got %d %q, %v", reply.Status, reply.Body, reply.Err)
				}
				w.WantCalls(map[string]int{"a": 1, "b": 0})
				broken, cooldowns := w.Logged("reply broken"), w.Logged("cooldown started")
				if c.pauses {
					if len(broken) != 1 || len(cooldowns) != 0 {
						t.Errorf("logged %v and %v, want one broken reply and no cooldown", broken, cooldowns)
					}
					return
				}
				if len(broken) != 1 || len(cooldowns) != 1 || cooldowns[0].ContextMap()["class"] != "broken_stream" {
					t.Errorf("logged %v and %v, want one broken reply and its cooldown", broken, cooldowns)
				}
				w.Backends["b"].Replies(lbtest.Streams(lbtest.StreamContent, lbtest.StreamEnd))
				w.PostStream().WantServed(t, "b")
			})
		})
	}
}

func TestAStreamThatEndsProperlyIsNotBroken(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
		for _, stream := range []string{
			lbtest.StreamContent + lbtest.StreamEnd,
			strings.ReplaceAll(lbtest.StreamContent+lbtest.StreamEnd, "\n", "\r\n"),
			"event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\"}\n\nevent: response.completed\ndata: {}\n\n",
			"data: {\"choices\":[{\"delta\":{\"content\":\"" + strings.Repeat("x", 1<<20) + "\"}}]}\n\n" + lbtest.StreamEnd,
		} {
			w.Backends["a"].Replies(lbtest.Streams(stream))
			if reply := w.PostStream(); reply.Err != nil || reply.Body != stream {
				t.Errorf("client got %d bytes of %d: %v", len(reply.Body), len(stream), reply.Err)
			}
		}
		if n := len(w.Logged("reply broken")); n != 0 {
			t.Errorf("%d replies were taken for broken", n)
		}
	})
}

func TestACompressedStreamPassesAsItIs(t *testing.T) {
	var zipped bytes.Buffer
	gz := gzip.NewWriter(&zipped)
	io.WriteString(gz, lbtest.StreamContent+lbtest.StreamEnd)
	gz.Close()
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			if ae := r.Header.Get("Accept-Encoding"); ae != "" {
				t.Errorf("a was offered %q for a stream", ae)
			}
			rw.Header().Set("Content-Type", "text/event-stream")
			rw.Header().Set("Content-Encoding", "gzip")
			rw.Write(zipped.Bytes())
		})
		r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{"stream":true}`))
		r.Header.Set("Accept-Encoding", "gzip")
		if reply := w.Send(r); reply.Err != nil || reply.Body != zipped.String() {
			t.Errorf("client got %q, %v", reply.Body, reply.Err)
		}
	})
}

func TestTrailersAndInterimRepliesPass(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			rw.Header().Set("Link", "</x>")
			rw.WriteHeader(103)
			rw.Header().Set("Trailer", "X-Sum")
			rw.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(rw, lbtest.StreamContent+lbtest.StreamEnd)
			rw.Header().Set("X-Sum", "abc")
		})
		res := lbtest.Do(t, w.Client, w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{}`)))
		if body, err := io.ReadAll(res.Body); string(body) != lbtest.StreamContent+lbtest.StreamEnd || err != nil || res.Trailer.Get("X-Sum") != "abc" {
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
		{http.MethodGet, "/v1/responses/resp_1", failed, lbtest.Says(200, failed)},
		{http.MethodGet, "/v1/responses/resp_1?stream=true", stream, lbtest.Streams(stream)},
		{http.MethodPost, "/v1/responses/resp_1/cancel", failed, lbtest.Says(200, failed)},
		{http.MethodPost, "/v1/chat/completions", `{"choices":[{}],"error":""}`, lbtest.Says(200, `{"choices":[{}],"error":""}`)},
	} {
		lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
			w.Backends["a"].Replies(c.reply)
			if reply := w.Send(w.Request(c.method, c.path, nil)); reply.Status != 200 || reply.Body != c.body || reply.Backend != "a" {
				t.Errorf("%s %s gives %d %q of %q", c.method, c.path, reply.Status, reply.Body, reply.Backend)
			}
			w.WantCalls(map[string]int{"b": 0})
		})
	}
}

func TestTheClientsOwnErrorInTheMiddleOfAStreamBlamesNobody(t *testing.T) {
	lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
		stream := lbtest.StreamContent + "event: response.failed\ndata: {\"type\":\"response.failed\",\"response\":{\"error\":{\"code\":\"invalid_prompt\"}}}\n\n"
		w.Backends["a"].Replies(lbtest.Streams(stream))
		for range 3 {
			if reply := w.PostStream(); reply.Body != stream || reply.Backend != "a" {
				t.Errorf("client got %q of %q", reply.Body, reply.Backend)
			}
		}
		if n := len(w.Logged("cooldown started")); n != 0 {
			t.Errorf("%d cooldowns", n)
		}
	})
}

func TestTrailersOfAReplyThatWasHeldBackForTheWholeTimePass(t *testing.T) {
	for want, parts := range map[string][]any{
		lbtest.StreamPreamble: {lbtest.StreamPreamble, 5 * time.Second},
		lbtest.StreamPreamble + lbtest.StreamContent + lbtest.StreamEnd: {lbtest.StreamPreamble, 5 * time.Second, lbtest.StreamContent, time.Second, lbtest.StreamEnd},
	} {
		lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
			w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
				rw.Header().Set("Trailer", "X-Sum")
				lbtest.Streams(parts...)(rw, r)
				rw.Header().Set("X-Sum", "abc")
			})
			res := lbtest.Do(t, w.Client, w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{}`)))
			if body, err := io.ReadAll(res.Body); string(body) != want || err != nil || res.Trailer.Get("X-Sum") != "abc" {
				t.Errorf("client got %q, %v and the trailers %v", body, err, res.Trailer)
			}
		})
	}
}

func TestEventsOfAMebibytePassByteForByteAndAtOnce(t *testing.T) {
	s := lbtest.NewSites(t, "https")
	var events []string
	for n := range 4 {
		events = append(events, "data: {\"choices\":[{\"delta\":{\"content\":\""+lbtest.Noise(1<<20+n)+"\"}}]}\n\n")
	}
	var rows []lbtest.Row
	for _, wire := range lbtest.Wires {
		a, backend, options := listenBy(t, wire.Backend, "a")
		seen := make(chan struct{})
		a.Replies(func(w http.ResponseWriter, r *http.Request) {
			for _, event := range events {
				lbtest.Streams(event)(w, r)
				select {
				case <-seen:
				case <-r.Context().Done():
					return
				}
			}
			io.WriteString(w, lbtest.StreamEnd)
		})
		name := fmt.Sprintf("a%d", len(rows))
		url := s.Add("openai_lb {\nbackend " + backend + " {\nname " + name + "\n}\n" + options + "\n}")
		rows = append(rows, lbtest.Row{Name: fmt.Sprintf("HTTP/%d to HTTP/%d", wire.Client, wire.Backend), Test: func(t *testing.T) {
			res, err := s.NewClient(t, wire.Client).Post(url, "application/json", strings.NewReader(`{"stream":true}`))
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			if got := a.Received()[0].Request.ProtoMajor; res.ProtoMajor != wire.Client || got != wire.Backend {
				t.Fatalf("it goes by HTTP/%d to HTTP/%d", res.ProtoMajor, got)
			}
			for n, event := range events {
				got := make([]byte, len(event))
				if _, err := io.ReadFull(res.Body, got); err != nil || string(got) != event {
					t.Fatalf("event %d is not what it was: %v", n, err)
				}
				seen <- struct{}{} // only now the backend goes on
			}
			if rest, err := io.ReadAll(res.Body); string(rest) != lbtest.StreamEnd || err != nil {
				t.Errorf("the stream ends with %q, %v", rest, err)
			}
			if _, cooldown := s.LoggedOf(t, name); cooldown != nil {
				t.Errorf("got the cooldown %+v", cooldown)
			}
		}})
	}
	s.Serve(t)
	lbtest.SideBySide(t, rows)
}
