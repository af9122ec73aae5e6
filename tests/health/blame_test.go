package health

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap/zapcore"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// mayBeTheRequest are failures that a request may cause at every backend.
var mayBeTheRequest = map[string]http.HandlerFunc{
	"a reset after the request":       lbtest.Aborts,
	"what is not HTTP":                lbtest.Raw("SSH-2.0-OpenSSH_9.2p1\r\n"),
	"half a status line":              lbtest.Raw("HTTP/1.1 20"),
	"half the headers":                lbtest.Raw("HTTP/1.1 200 OK\r\nContent-Type: te"),
	"an interim reply alone":          lbtest.Raw("HTTP/1.1 103 Early Hints\r\n\r\n"),
	"no answer in time":               lbtest.Hangs,
	"an internal error":               lbtest.Status(500),
	"a status under 100":              lbtest.Raw("HTTP/1.1 042 Odd\r\nContent-Length: 0\r\n\r\n"),
	"an upgrade that nobody asked":    lbtest.Raw("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n"),
	"a reply that is cut":             lbtest.Raw("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"),
	"a stream that ends at its start": lbtest.Raw("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"),
}

func TestAFailureThatARequestMayCauseCoolsOneBackendDownForItsModel(t *testing.T) {
	for name, fault := range mayBeTheRequest {
		for _, names := range []string{"a", "a b c"} {
			t.Run(name+", "+names, func(t *testing.T) {
				lbtest.InBubble(t, lbtest.PoolOf(names, "lb_policy first\nfail_duration 5m"), func(t *testing.T, w *lbtest.World) {
					w.AllReply(fault)
					if reply := w.Post(`{"model":"poison"}`); reply.Status < 500 {
						t.Errorf("client got %d %s (%v)", reply.Status, reply.Body, reply.Err)
					}
					w.WantReady()
					cooldowns := w.Logged("cooldown started")
					if len(cooldowns) != 1 {
						t.Errorf("%d cooldowns, want 1: what fails everywhere is the request's own fault", len(cooldowns))
					}
					for _, b := range cooldowns {
						if fields := b.ContextMap(); fields["deployment"] != "poison" || fields["class"] != "failed" && fields["class"] != "timeout" {
							t.Errorf("got the cooldown %v, want one of the model alone, for failed or timeout", fields)
						}
					}
					for _, b := range w.Backends {
						b.Recovers()
						b.Forget()
					}
					// another model is as it was, at the first backend
					w.Post(`{"model":"gpt-4o"}`).WantServed(t, "a")
					w.Post(`{}`).WantServed(t, "a")
				})
			})
		}
	}
}

func TestAsManyRequestsAsItTakesLeaveTheReplicaReady(t *testing.T) {
	for name, fault := range mayBeTheRequest {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.PoolOf("a b c", "fail_duration 5m\nresponse_header_timeout 1s\nstream_first_event_timeout 1s"), func(t *testing.T, w *lbtest.World) {
				w.AllReply(fault)
				for range 5 {
					w.Post(`{}`)
					w.WantReady()
				}
				w.AllReply(nil)
				for range 5 {
					w.Post(`{}`).WantServed(t, "a", "b", "c")
				}
			})
		})
	}
}

func TestFailuresOfEveryKindInOneRequestCoolOneBackendDown(t *testing.T) {
	lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Aborts)
		w.Backends["b"].Replies(lbtest.Hangs)
		w.Backends["c"].Replies(lbtest.Status(401))
		w.Post(`{}`)
		w.WantCalls(map[string]int{"a": 1, "b": 1, "c": 1})
		if cooldowns := w.Logged("cooldown started"); len(cooldowns) != 1 || cooldowns[0].ContextMap()["backend"] != "a" {
			t.Errorf("got the cooldowns %v, want a's alone", cooldowns)
		}
	})
}

func TestABackendThatCannotBeReachedCoolsDownAsAWhole(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b c", ""), func(t *testing.T, w *lbtest.World) {
		for _, name := range []string{"a", "b", "c"} {
			w.Stop(name)
		}
		w.Post(`{"model":"gpt-4o"}`).WantError(t, 502, "upstream_unreachable")
		cooldowns := w.Logged("cooldown started")
		if len(cooldowns) != 3 {
			t.Errorf("%d cooldowns, want 3: no request can cause that", len(cooldowns))
		}
		for _, b := range cooldowns {
			if fields := b.ContextMap(); fields["deployment"] != nil || fields["class"] != "unreachable" {
				t.Errorf("got the cooldown %v, want one of the whole backend", fields)
			}
		}
		w.WantNotReady("1")
	})
}

// TestADeadBackendCostsOneClientItsTime: connections to it fail, which may take
// seconds each.
func TestADeadBackendCostsOneClientItsTime(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\nbackend http://b {\npriority 2\n}\n}", func(t *testing.T, w *lbtest.World) {
		w.Stop("a")
		for range 1000 {
			w.Post(`{}`).WantServed(t, "b")
			time.Sleep(time.Second)
		}
		if n := len(w.Logged("attempt")); n != 1001 {
			t.Errorf("%d of 1000 requests were sent to the dead backend, want 1", n-1000)
		}
		if n := len(w.Logged("cooldown started")) + len(w.Logged("cooldown ended")); n != 1 {
			t.Errorf("%d log lines about the dead backend, want 1", n)
		}
		w.Serve("a:80", w.Backends["a"])
		time.Sleep(time.Minute)
		w.Post(`{}`).WantServed(t, "a")
		if n := len(w.Logged("cooldown ended")); n != 1 {
			t.Errorf("%d log lines say that it is back", n)
		}

		// b is left, and fails: the dead backend is tried
		w.Stop("a")
		w.Post(`{}`).WantServed(t, "b")
		w.Backends["b"].Replies(lbtest.Status(500))
		w.Post(`{}`)
		w.Serve("a:80", w.Backends["a"])
		w.Post(`{}`).WantServed(t, "a")
		w.Post(`{}`).WantServed(t, "a")
	})
}

func TestABackendThatIsReachedAgainRestsForItsRefusedKey(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\nbackend http://b {\npriority 2\n}\n}", func(t *testing.T, w *lbtest.World) {
		begin := time.Now()
		w.Backends["a"].Replies(lbtest.Status(401))
		w.Post(`{}`).WantServed(t, "b")
		w.Stop("a")
		synctest.Wait() // until its idle connections are closed
		w.Backends["b"].Replies(lbtest.Throttled("1"))
		w.Post(`{}`).WantStatus(t, 429)
		w.Backends["b"].Recovers()
		w.Serve("a:80", w.Backends["a"])
		for range 20 {
			time.Sleep(time.Second)
			w.Post(`{}`).WantServed(t, "b")
		}
		w.WantCalls(map[string]int{"a": 2, "b": 22})      // the second one only looked whether a can be reached
		if n := len(w.Logged("cooldown ended")); n != 2 { // b's throttle is over, and a was reached
			t.Errorf("%d log lines of a backend that is back", n)
		}
		w.Backends["a"].Recovers()
		time.Sleep(time.Minute - time.Since(begin))
		w.Post(`{}`).WantServed(t, "a")
	})
}

// listenWithLimits serves a backend by HTTP/2 and TLS that takes headers of so
// many bytes, and so many requests on a connection.
func listenWithLimits(t *testing.T, name string, headers, streams int) (b *lbtest.Backend, url string) {
	t.Helper()
	b = &lbtest.Backend{Name: name}
	server := httptest.NewUnstartedServer(b)
	server.EnableHTTP2 = true
	server.Config.MaxHeaderBytes = headers
	server.Config.HTTP2 = &http.HTTP2Config{MaxConcurrentStreams: streams}
	lbtest.StartTLS(t, server)
	return b, server.URL
}

// manyHeaders is a request whose headers are few bytes in HTTP/1.1, and many in
// the way that HTTP/2 counts them (RFC 9113 section 6.5.2).
func manyHeaders(method string) string {
	return method + " /v1/chat/completions HTTP/1.1\r\nHost: lb\r\nContent-Type: application/json\r\nContent-Length: 2\r\n" +
		strings.Repeat("a:\r\n", 3000) + "\r\n{}"
}

func TestAHeaderListThatBackendsRefuseIsItsClientsFault(t *testing.T) {
	s := lbtest.NewSites(t, "http")
	_, _, trust := lbtest.ListenTLS(t, "unused", true) // all of them show the same certificate
	a, urlA := listenWithLimits(t, "a", 40_000, 0)
	b, urlB := listenWithLimits(t, "b", 40_000, 0)
	url := s.Add(fmt.Sprintf("openai_lb {\nready_path /readyz\nbackend %s {\nname a\n}\nbackend %s {\nname b\npriority 2\n}\n%s\n}", urlA, urlB, trust))
	s.Serve(t)
	client := s.NewClient(t, 1)
	lbtest.Ask(client, url).WantServed(t, "a")
	a.Replies(lbtest.Throttled("1"))
	lbtest.Ask(client, url).WantServed(t, "b") // both have told their limits
	a.Recovers()
	lbtest.WaitFor(t, func() bool { return lbtest.Ask(client, url).Backend == "a" })
	before := len(a.Received()) + len(b.Received())
	for range 3 {
		conn, err := net.Dial("tcp", s.Address)
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
	if n := len(a.Received()) + len(b.Received()); n != before {
		t.Errorf("backends got %d of these requests: the test does not show what it is to show", n-before)
	}
	for _, entry := range s.Logged(t) {
		if entry.Msg == "cooldown started" && entry.Class != "throttled" {
			t.Errorf("got the cooldown %+v", entry)
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
	lbtest.Ask(client, url).WantServed(t, "a")
}

var notInference = [][2]string{
	{"GET", "/v1/files"}, {"POST", "/v1/files"}, {"DELETE", "/v1/files/file-1"}, {"GET", "/v1/models"},
	{"POST", "/v1/batches"}, {"GET", "/v1/batches/b"}, {"POST", "/v1/fine_tuning/jobs"}, {"POST", "/v1/uploads"},
	{"POST", "/v1/vector_stores"}, {"GET", "/v1/responses/resp_1"}, {"GET", "/openai/files?api-version=1"},
	{"GET", "/v1"}, {"POST", "/openai/anything"}, {"PUT", "/v1/anything"},
}

func TestARefusedKeyForWhatIsNotInferenceStartsNoCooldown(t *testing.T) {
	for _, code := range []int{401, 403} {
		for _, op := range notInference {
			t.Run(fmt.Sprint(code, op), func(t *testing.T) {
				lbtest.InBubble(t, lbtest.PoolOf("a b c", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
					w.AllReply(lbtest.Status(code))
					for range 3 {
						if reply := w.Send(w.Request(op[0], op[1], strings.NewReader(`{}`))); reply.Status != 502 || !strings.Contains(reply.Body, "upstream_credentials_rejected") {
							t.Errorf("client got %d %s", reply.Status, reply.Body)
						}
					}
					if cooldowns := w.Logged("cooldown started"); len(cooldowns) > 0 {
						t.Errorf("got the cooldown %v", cooldowns[0].ContextMap())
					}
					w.WantReady()
					w.AllReply(nil)
					w.Post(`{}`).WantServed(t, "a")
				})
			})
		}
	}
}

func TestARefusedKeyForAnyInferenceCoolsOneBackendDown(t *testing.T) {
	for _, path := range []string{
		"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/moderations", "/v1/audio/speech",
		"/v1/images/generations", "/v1/messages", "/v1/rerank", "/v1/decisions", "/openai/v1/chat/completions", "/openai/deployments/x/chat/completions?api-version=1",
	} {
		lbtest.InBubble(t, lbtest.PoolOf("a b c", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
			w.AllReply(lbtest.Status(401))
			w.Send(w.Request(http.MethodPost, path, strings.NewReader(`{}`))).WantError(t, 502, "upstream_credentials_rejected")
			cooldowns := w.Logged("cooldown started")
			if len(cooldowns) != 1 || cooldowns[0].Level != zapcore.ErrorLevel || cooldowns[0].ContextMap()["class"] != "credential" {
				t.Errorf("%s: got the cooldowns %v, want one", path, cooldowns)
			}
		})
	}
}

// lostAgain is the error of an attempt that net/http lost twice before the
// backend took it.
const lostAgain = "the backend accepted the request on neither of two connections"

func TestABackendWithFewStreamsGetsNoCooldownForIt(t *testing.T) {
	s := lbtest.NewSites(t, "http")
	_, _, trust := lbtest.ListenTLS(t, "unused", true) // all of them show the same certificate
	a, urlA := listenWithLimits(t, "a", 0, 20)
	a.Replies(func(http.ResponseWriter, *http.Request) { time.Sleep(20 * time.Millisecond) })
	b, serverB := lbtest.Listen(t, "b")
	url := s.Add(fmt.Sprintf("openai_lb {\nbackend %s {\nname a\n}\nbackend %s {\nname b\npriority 2\n}\n%s\n}", urlA, serverB.URL, trust))
	s.Serve(t)
	client := s.NewClient(t, 1)
	replies := make(chan lbtest.Reply, 120)
	for range cap(replies) {
		go func() { replies <- lbtest.Ask(client, url) }()
	}
	for range cap(replies) {
		if reply := <-replies; reply.Status != 200 {
			t.Errorf("client got %d of %q (%v)", reply.Status, reply.Backend, reply.Err)
		}
	}
	for _, entry := range s.Logged(t) {
		// on a busy machine, a connection may fail for other reasons
		if entry.Msg == "attempt" && entry.Class != "served" && entry.Error != lostAgain {
			t.Log("a failed otherwise:", entry.Error)
			return
		}
	}
	if _, cooldown := s.LoggedOf(t, "a"); cooldown != nil {
		t.Errorf("a got the cooldown %+v", cooldown)
	}
	if strings.Contains(s.Log(t), `"backend silent"`) {
		t.Error("a is silent")
	}
	if len(a.Received()) == 0 || len(a.Received())+len(b.Received()) != cap(replies) {
		t.Errorf("a served %d and b %d of %d", len(a.Received()), len(b.Received()), cap(replies))
	}
	lbtest.Ask(client, url).WantServed(t, "a")
}

func TestACallerThatStallsItsUploadBlamesNobody(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b", "request_buffers 1KiB\nlb_policy first"), func(t *testing.T, w *lbtest.World) {
		w.UseHTTP2()
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			control := http.NewResponseController(rw)
			control.EnableFullDuplex()
			rw.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(rw, lbtest.StreamContent)
			control.Flush()
			if _, err := io.Copy(io.Discard, r.Body); err == nil {
				io.WriteString(rw, lbtest.StreamEnd)
			}
		})
		upload, feed := io.Pipe()
		r := w.Request(http.MethodPost, "/v1/chat/completions", upload)
		r.Header.Set("X-Early", "a")
		defer feed.Close()
		go io.WriteString(feed, `{"stream":true,"user":"`+strings.Repeat("x", 4096))
		leave := time.AfterFunc(20*time.Minute, func() { feed.CloseWithError(io.ErrUnexpectedEOF) })
		defer leave.Stop()
		w.Send(r)
		if n := len(w.Logged("cooldown started")) + len(w.Logged("reply broken")); n > 0 {
			t.Errorf("%d log entries blame a backend", n)
		}
		w.Backends["a"].Recovers()
		w.Post(`{}`).WantServed(t, "a")
	})
}

func TestARequestForAModelThatNoBackendHasCoolsOneBackendDown(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b c", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
		w.AllReply(lbtest.Says(404, `{"error":{"code":"model_not_found","message":"no","param":"model"}}`))
		w.Post(`{"model":"made-up"}`).WantStatus(t, 404)
		w.WantCalls(map[string]int{"a": 1, "b": 1, "c": 1})
		cooldowns := w.Logged("cooldown started")
		if len(cooldowns) != 1 || cooldowns[0].ContextMap()["backend"] != "a" || cooldowns[0].ContextMap()["class"] != "no_model" {
			t.Errorf("got the cooldowns %v, want a's alone", cooldowns)
		}
	})
}

func TestWhateverARequestMeetsItCoolsOneBackendDown(t *testing.T) {
	noModel := lbtest.Says(404, `{"error":{"code":"DeploymentNotFound","message":"no"}}`)
	for name, faults := range map[string][2]http.HandlerFunc{
		"a failure, then no model":         {lbtest.Status(500), noModel},
		"no model, then a failure":         {noModel, lbtest.Status(500)},
		"no model, then a refused key":     {noModel, lbtest.Status(401)},
		"no model, then a broken stream":   {noModel, lbtest.Streams(lbtest.StreamContent, lbtest.Abort)},
		"a failure, then a broken stream":  {lbtest.Status(500), lbtest.Streams(lbtest.StreamContent, lbtest.Abort)},
		"no model in a 200, then a reset":  {lbtest.Says(200, `{"error":{"code":"model_not_found"}}`), lbtest.Aborts},
		"an error in a 200, then no model": {lbtest.Says(200, `{"error":{"code":"server_error"}}`), noModel},
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(faults[0])
				w.Backends["b"].Replies(faults[1])
				w.PostStream()
				w.WantCalls(map[string]int{"a": 1, "b": 1})
				if cooldowns := w.Logged("cooldown started"); len(cooldowns) != 1 || cooldowns[0].ContextMap()["backend"] != "a" {
					t.Errorf("got the cooldowns %v, want a's alone", cooldowns)
				}
			})
		})
	}
}

func TestAModelThatIsMissingSomewhereInTheRequestIsTheClientsError(t *testing.T) {
	missing := func(param string) string {
		return `{"error":{"message":"The model 'x' does not exist","type":"invalid_request_error","param":` + param + `,"code":"model_not_found"}}`
	}
	for _, status := range []int{400, 404} {
		lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
			w.AllReply(lbtest.Says(status, missing(`"tools[0].model"`)))
			if reply := w.Post(`{"model":"gpt-4o"}`); reply.Status != status || reply.Body != missing(`"tools[0].model"`) || reply.Backend != "a" {
				t.Errorf("client got %d %s of %q, want a's reply", reply.Status, reply.Body, reply.Backend)
			}
			w.WantCalls(map[string]int{"a": 1, "b": 0})
			w.WantNobodyBlamed()
		})
	}
	for _, param := range []string{`null`, `"model"`, `""`} {
		lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
			w.Backends["a"].Replies(lbtest.Says(404, missing(param)))
			w.Post(`{"model":"gpt-4o"}`).WantServed(t, "b")
			if n := len(w.Logged("cooldown started")); n != 1 {
				t.Errorf("param %s: %d cooldowns, want 1", param, n)
			}
		})
	}
}

// TestALimitOfAnotherOperationIsNotThatOfInference has every backend refuse a
// job that names the model of other callers' chats.
func TestALimitOfAnotherOperationIsNotThatOfInference(t *testing.T) {
	for name, reply := range map[string]http.HandlerFunc{
		"a throttle": lbtest.Throttled("60"),
		"no budget":  lbtest.Says(429, `{"error":{"code":"insufficient_quota","message":"no budget for training"}}`),
		"a failure":  lbtest.Status(500),
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.PoolOf("a b", ""), func(t *testing.T, w *lbtest.World) {
				w.AllReply(reply)
				w.Send(w.Request(http.MethodPost, "/v1/fine_tuning/jobs", strings.NewReader(`{"model":"gpt-4o","training_file":"file-12345678"}`)))
				calls := w.TotalCalls()
				w.AllReply(nil)
				for range 10 {
					w.Post(`{"model":"gpt-4o"}`).WantServed(t, "a", "b")
				}
				if n := w.TotalCalls() - calls; n != 10 {
					t.Errorf("10 chats took %d attempts", n)
				}
				if name != "a failure" {
					w.AllReply(lbtest.Status(200))
					w.Send(w.Request(http.MethodPost, "/v1/fine_tuning/jobs", strings.NewReader(`{"model":"gpt-4o"}`))).WantStatus(t, 429)
				}
			})
		})
	}
}

// TestAModelThatAnotherOperationMissesStartsNoCooldown has a caller ask for a
// model that no backend has. The backends' other objects are as they were.
func TestAModelThatAnotherOperationMissesStartsNoCooldown(t *testing.T) {
	for operation, body := range map[string]string{
		"GET /v1/models/made-up":        "",
		"POST /v1/fine_tuning/jobs":     `{"model":"made-up","training_file":"file-12345678"}`,
		"POST /v1/assistants":           `{"model":"made-up"}`,
		"GET /v1/responses/resp_123456": "",
	} {
		t.Run(operation, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
				w.AllReply(lbtest.Says(404, `{"error":{"code":"model_not_found","message":"no","param":"model"}}`))
				method, path, _ := strings.Cut(operation, " ")
				w.Send(w.Request(method, path, strings.NewReader(body))).WantStatus(t, 404)
				w.WantCalls(map[string]int{"a": 1, "b": 1})
				w.WantNobodyBlamed()
				w.AllReply(nil)
				w.Send(w.Request(http.MethodPost, "/v1/files", strings.NewReader("x"))).WantServed(t, "a")
			})
		})
	}
}
