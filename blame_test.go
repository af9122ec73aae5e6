package openailb

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap/zapcore"
)

// raw answers with these bytes, whatever they are, and closes the connection.
func raw(text string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			panic(err)
		}
		io.WriteString(conn, text)
		conn.Close()
	}
}

// hangs takes the request and never answers.
func hangs(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }

// mayBeTheRequest are failures that a request may cause at every backend.
var mayBeTheRequest = map[string]http.HandlerFunc{
	"a reset after the request":       aborts,
	"what is not HTTP":                raw("SSH-2.0-OpenSSH_9.2p1\r\n"),
	"half a status line":              raw("HTTP/1.1 20"),
	"half the headers":                raw("HTTP/1.1 200 OK\r\nContent-Type: te"),
	"an interim reply alone":          raw("HTTP/1.1 103 Early Hints\r\n\r\n"),
	"no answer in time":               hangs,
	"an internal error":               status(500),
	"a status under 100":              raw("HTTP/1.1 042 Odd\r\nContent-Length: 0\r\n\r\n"),
	"an upgrade that nobody asked":    raw("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n"),
	"a reply that is cut":             raw("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"),
	"a stream that ends at its start": raw("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"),
}

func TestWhatARequestMayCauseBenchesOneBackendForItsModel(t *testing.T) {
	for name, fault := range mayBeTheRequest {
		for _, names := range []string{"a", "a b c"} {
			t.Run(name+", "+names, func(t *testing.T) {
				inBubble(t, poolOf(names, "lb_policy first\nfail_duration 5m"), func(t *testing.T, w *world) {
					w.allReply(fault)
					if reply := w.post(`{"model":"poison"}`); reply.status < 500 {
						t.Errorf("client got %d %s (%v)", reply.status, reply.body, reply.err)
					}
					w.wantReady()
					benches := w.logged("backend benched")
					if len(benches) != 1 {
						t.Errorf("%d benches, want 1: what fails everywhere is the request's own fault", len(benches))
					}
					for _, b := range benches {
						if fields := b.ContextMap(); fields["model"] != "poison" || fields["class"] != "failed" && fields["class"] != "timeout" {
							t.Errorf("benched %v, want the model alone, for failed or timeout", fields)
						}
					}
					for _, b := range w.backends {
						b.recovers()
						b.forget()
					}
					// another model is as it was, at the first backend
					w.post(`{"model":"gpt-4o"}`).wantServed(t, "a")
					w.post(`{}`).wantServed(t, "a")
				})
			})
		}
	}
}

func TestAsManyRequestsAsItTakesLeaveTheReplicaReady(t *testing.T) {
	for name, fault := range mayBeTheRequest {
		t.Run(name, func(t *testing.T) {
			inBubble(t, poolOf("a b c", "fail_duration 5m\nresponse_header_timeout 1s\nstream_first_event_timeout 1s"), func(t *testing.T, w *world) {
				w.allReply(fault)
				for range 5 {
					w.post(`{}`)
					w.wantReady()
				}
				w.allReply(nil)
				for range 5 {
					w.post(`{}`).wantServed(t, "a", "b", "c")
				}
			})
		})
	}
}

func TestFailuresOfEveryKindInOneRequestBenchOneBackend(t *testing.T) {
	inBubble(t, threeInOrder, func(t *testing.T, w *world) {
		w.backends["a"].replies(aborts)
		w.backends["b"].replies(hangs)
		w.backends["c"].replies(status(401))
		w.post(`{}`)
		w.wantCalls(map[string]int{"a": 1, "b": 1, "c": 1})
		if benches := w.logged("backend benched"); len(benches) != 1 || benches[0].ContextMap()["backend"] != "a" {
			t.Errorf("benches %v, want a's alone", benches)
		}
	})
}

func TestABackendThatCannotBeReachedIsBenchedAsAWhole(t *testing.T) {
	inBubble(t, poolOf("a b c", ""), func(t *testing.T, w *world) {
		for _, name := range []string{"a", "b", "c"} {
			w.stop(name)
		}
		w.post(`{"model":"gpt-4o"}`).wantError(t, 502, "upstream_unreachable")
		benches := w.logged("backend benched")
		if len(benches) != 3 {
			t.Errorf("%d benches, want 3: no request can cause that", len(benches))
		}
		for _, b := range benches {
			if fields := b.ContextMap(); fields["model"] != nil || fields["class"] != "unreachable" {
				t.Errorf("benched %v, want the whole backend", fields)
			}
		}
		w.wantNotReady("10")
	})
}

// listenWithLimits serves a backend by HTTP/2 and TLS that takes headers of so
// many bytes, and so many requests on a connection.
func listenWithLimits(t *testing.T, name string, headers, streams int) (b *fakeBackend, url string) {
	t.Helper()
	b = &fakeBackend{name: name}
	server := httptest.NewUnstartedServer(b)
	server.EnableHTTP2 = true
	server.Config.MaxHeaderBytes = headers
	server.Config.HTTP2 = &http.HTTP2Config{MaxConcurrentStreams: streams}
	server.StartTLS()
	t.Cleanup(server.Close)
	return b, server.URL
}

// manyHeaders is a request whose headers are few bytes in HTTP/1.1, and many in
// the way that HTTP/2 counts them (RFC 9113 section 6.5.2).
func manyHeaders(method string) string {
	return method + " /v1/chat/completions HTTP/1.1\r\nHost: lb\r\nContent-Type: application/json\r\nContent-Length: 2\r\n" +
		strings.Repeat("a:\r\n", 3000) + "\r\n{}"
}

func TestAHeaderListThatBackendsRefuseIsItsClientsFault(t *testing.T) {
	s := newSites(t, "http")
	_, _, trust := listenTLS(t, "unused", true) // all of them show the same certificate
	a, urlA := listenWithLimits(t, "a", 40_000, 0)
	b, urlB := listenWithLimits(t, "b", 40_000, 0)
	url := s.add(fmt.Sprintf("openai_lb {\nready_path /readyz\nbackend %s {\nname a\n}\nbackend %s {\nname b\npriority 2\n}\n%s\n}", urlA, urlB, trust))
	s.serve(t)
	client := s.newClient(t, 1)
	ask(client, url).wantServed(t, "a")
	a.replies(throttled("1"))
	ask(client, url).wantServed(t, "b") // both have told their limits
	a.recovers()
	waitFor(t, func() bool { return ask(client, url).backend == "a" })
	before := len(a.received()) + len(b.received())
	for range 3 {
		conn, err := net.Dial("tcp", s.address)
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(conn, strings.Replace(manyHeaders(http.MethodPost), "Host: lb", "Host: row-0.example.com", 1))
		res, err := http.ReadResponse(bufio.NewReader(conn), nil)
		conn.Close()
		if err != nil {
			t.Fatal(err)
		}
		if res.StatusCode != http.StatusRequestHeaderFieldsTooLarge && res.StatusCode != http.StatusBadRequest {
			t.Errorf("client got %d, want 431 or 400", res.StatusCode)
		}
	}
	if n := len(a.received()) + len(b.received()); n != before {
		t.Errorf("backends got %d of these requests: the test does not show what it is to show", n-before)
	}
	for _, entry := range s.logged(t) {
		if entry.Msg == "backend benched" && entry.Class != "throttled" {
			t.Errorf("benched %+v", entry)
		}
	}
	res, err := client.Get(strings.Replace(url, "/v1/chat/completions", "/readyz", 1))
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if res.StatusCode != 200 {
		t.Errorf("ready_path answers %d", res.StatusCode)
	}
	ask(client, url).wantServed(t, "a")
}

var notInference = [][2]string{
	{"GET", "/v1/files"}, {"POST", "/v1/files"}, {"DELETE", "/v1/files/file-1"}, {"GET", "/v1/models"},
	{"POST", "/v1/batches"}, {"GET", "/v1/batches/b"}, {"POST", "/v1/fine_tuning/jobs"}, {"POST", "/v1/uploads"},
	{"POST", "/v1/vector_stores"}, {"GET", "/v1/responses/resp_1"}, {"GET", "/openai/files?api-version=1"},
	{"GET", "/"}, {"POST", "/admin"}, {"PUT", "/v1/anything"},
}

func TestARefusedKeyForWhatIsNotInferenceBenchesNobody(t *testing.T) {
	for _, code := range []int{401, 403} {
		for _, op := range notInference {
			t.Run(fmt.Sprint(code, op), func(t *testing.T) {
				inBubble(t, poolOf("a b c", "lb_policy first"), func(t *testing.T, w *world) {
					w.allReply(status(code))
					for range 3 {
						if reply := w.send(w.request(op[0], op[1], strings.NewReader(`{}`))); reply.status != 502 || !strings.Contains(reply.body, "upstream_credentials_rejected") {
							t.Errorf("client got %d %s", reply.status, reply.body)
						}
					}
					if benches := w.logged("backend benched"); len(benches) > 0 {
						t.Errorf("benched %v", benches[0].ContextMap())
					}
					w.wantReady()
					w.allReply(nil)
					w.post(`{}`).wantServed(t, "a")
				})
			})
		}
	}
}

func TestARefusedKeyForInferenceBenchesOneBackendWhateverIsInferred(t *testing.T) {
	for _, path := range []string{
		"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/moderations", "/v1/audio/speech",
		"/v1/images/generations", "/v1/messages", "/v1/rerank", "/openai/v1/chat/completions", "/openai/deployments/x/chat/completions?api-version=1",
	} {
		inBubble(t, poolOf("a b c", "lb_policy first"), func(t *testing.T, w *world) {
			w.allReply(status(401))
			w.send(w.request(http.MethodPost, path, strings.NewReader(`{}`))).wantError(t, 502, "upstream_credentials_rejected")
			benches := w.logged("backend benched")
			if len(benches) != 1 || benches[0].Level != zapcore.ErrorLevel || benches[0].ContextMap()["class"] != "credential" {
				t.Errorf("%s: benches %v, want one", path, benches)
			}
		})
	}
}

func TestABackendWithFewStreamsIsNotBenchedForIt(t *testing.T) {
	s := newSites(t, "http")
	_, _, trust := listenTLS(t, "unused", true) // all of them show the same certificate
	a, urlA := listenWithLimits(t, "a", 0, 20)
	a.replies(func(http.ResponseWriter, *http.Request) { time.Sleep(20 * time.Millisecond) })
	b, serverB := listen(t, "b")
	url := s.add(fmt.Sprintf("openai_lb {\nbackend %s {\nname a\n}\nbackend %s {\nname b\npriority 2\n}\n%s\n}", urlA, serverB.URL, trust))
	s.serve(t)
	client := s.newClient(t, 1)
	replies := make(chan clientReply, 120)
	for range cap(replies) {
		go func() { replies <- ask(client, url) }()
	}
	for range cap(replies) {
		if reply := <-replies; reply.status != 200 {
			t.Errorf("client got %d of %q (%v)", reply.status, reply.backend, reply.err)
		}
	}
	for _, entry := range s.logged(t) {
		// on a busy machine, a connection may fail for other reasons
		if entry.Msg == "attempt" && entry.Class != "served" && entry.Error != errLostAgain.Error() {
			t.Log("a failed otherwise:", entry.Error)
			return
		}
	}
	if _, benched := s.loggedOf(t, "a"); benched != nil {
		t.Errorf("a is benched: %+v", benched)
	}
	if len(a.received()) == 0 || len(a.received())+len(b.received()) != cap(replies) {
		t.Errorf("a served %d and b %d of %d", len(a.received()), len(b.received()), cap(replies))
	}
	ask(client, url).wantServed(t, "a")
}

func TestACallerThatStallsItsUploadBlamesNobody(t *testing.T) {
	inBubble(t, poolOf("a b", "request_buffers 1KiB\nlb_policy first"), func(t *testing.T, w *world) {
		w.useHTTP2()
		w.backends["a"].replies(func(rw http.ResponseWriter, r *http.Request) {
			control := http.NewResponseController(rw)
			control.EnableFullDuplex()
			rw.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(rw, streamContent)
			control.Flush()
			if _, err := io.Copy(io.Discard, r.Body); err == nil {
				io.WriteString(rw, streamEnd)
			}
		})
		upload, feed := io.Pipe()
		r := w.request(http.MethodPost, "/v1/chat/completions", upload)
		r.Header.Set("X-Early", "a")
		defer feed.Close()
		go io.WriteString(feed, `{"stream":true,"user":"`+strings.Repeat("x", 4096))
		leave := time.AfterFunc(20*time.Minute, func() { feed.CloseWithError(io.ErrUnexpectedEOF) })
		defer leave.Stop()
		w.send(r)
		if n := len(w.logged("backend benched")) + len(w.logged("reply broken")); n > 0 {
			t.Errorf("%d log entries blame a backend", n)
		}
		w.backends["a"].recovers()
		w.post(`{}`).wantServed(t, "a")
	})
}
