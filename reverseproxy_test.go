package openailb

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

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

func TestACommittedStreamHoldsNeitherPromptNorEarlierReply(t *testing.T) {
	inBubble(t, threeInOrder, func(t *testing.T, w *world) {
		recorder := &recordingTransport{next: w.handler.transport.roundTripper}
		w.handler.transport.roundTripper = recorder
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
		upload := recorder.requests[1].Body.(*bodyReader)
		if upload.body.prefix != nil || upload.segments != nil {
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

func TestForwardNeverPassesARefusedKeyOn(t *testing.T) {
	inBubble(t, `openai_lb {
		backend http://a
		all_throttled forward
	}`, func(t *testing.T, w *world) {
		w.backends["a"].replies(throttled("60"))
		w.post(`{}`)
		w.backends["a"].replies(status(401))
		w.post(`{}`).wantError(t, 429, "rate_limit_exceeded")
	})
}

// serveAt runs a site with these directives and returns its address.
func serveAt(t *testing.T, directives string) (address string) {
	t.Helper()
	port := freePort(t)
	run(t, fmt.Sprintf("{\nadmin off\n}\nhttp://:%d {\nbind 127.0.0.1\n%s\n}", port, directives))
	return fmt.Sprintf("127.0.0.1:%d", port)
}

func TestAHandlerAfterTheBackendsDoesNotSendAnEmptyBody(t *testing.T) {
	a, serverA := listen(t, "a")
	a.replies(status(400))
	b, serverB := listen(t, "b")
	for _, inner := range []string{
		"openai_lb {\nbackend " + serverB.URL + "\n}",
		"reverse_proxy " + serverB.Listener.Addr().String() + " {\nlb_policy openai_lb\n}",
		"reverse_proxy " + serverB.Listener.Addr().String() + " {\ntransport openai_lb\n}",
		"reverse_proxy " + serverB.Listener.Addr().String() + " {\nlb_policy openai_lb\ntransport openai_lb\n}",
	} {
		t.Run(inner, func(t *testing.T) {
			address := serveAt(t, "openai_lb {\nbackend "+serverA.URL+"\nreverse_proxy {\n@e status 400\nhandle_response @e {\n"+inner+"\n}\n}\n}")
			reply := ask(newClient(t), "http://"+address+"/v1/x")
			if reply.err == nil && reply.status == 200 {
				t.Errorf("client got 200 of %q", reply.backend)
			}
			for _, call := range b.received() {
				if call.readErr == nil {
					t.Errorf("b got %d bytes for whole", call.bodyBytes)
				}
			}
		})
	}
}

func TestTwoReverseProxiesOfOneRequestDoNotMix(t *testing.T) {
	_, serverA := listen(t, "a")
	b, serverB := listen(t, "b")
	address := serveAt(t, fmt.Sprintf(`route {
		reverse_proxy %s {
			method GET
			lb_policy openai_lb
			transport openai_lb
			@ok status 2xx
			handle_response @ok {
			}
		}
		reverse_proxy %s {
			transport openai_lb
		}
	}`, serverA.Listener.Addr(), serverB.Listener.Addr()))
	ask(newClient(t), "http://"+address+"/v1/x").wantServed(t, "b")
	if got := b.received()[0].bodyHash; got != sha([]byte(`{"model":"gpt-4o"}`)) {
		t.Error("b did not get the body")
	}
}

func TestThePolicyAloneKeepsTryingForLBTryDuration(t *testing.T) {
	up := fmt.Sprintf("127.0.0.1:%d", freePort(t))
	address := serveAt(t, "reverse_proxy "+up+" {\nlb_policy openai_lb\nlb_try_duration 20s\nlb_try_interval 10ms\n}")
	done := make(chan clientReply)
	go func() { done <- ask(newClient(t), "http://"+address+"/") }()
	time.Sleep(50 * time.Millisecond) // some attempts fail, whenever the backend comes up
	l, err := net.Listen("tcp", up)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: &fakeBackend{name: "a"}}
	go server.Serve(l)
	defer server.Close()
	reply := <-done
	reply.wantServed(t, "a")
}

func TestRetriesByResponseAreRefusedBesideTheTransport(t *testing.T) {
	config, err := adapt(":0 {\nreverse_proxy a:1 {\nlb_policy openai_lb\nlb_retry_match {\nmethod POST\n}\ntransport openai_lb\n}\n}")
	if err == nil {
		err = validate(t, config)
	}
	if err == nil || !strings.Contains(err.Error(), "lb_retry_match is not allowed") {
		t.Errorf("it gives %v", err)
	}
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

func TestOddRequestsReachABackendOrAnAnswerAndBenchNobody(t *testing.T) {
	backend := &fakeBackend{name: "a"}
	_, server := listen(t, "unused")
	server.Config.Handler = backend
	address := serveAt(t, "openai_lb {\nbackend "+server.URL+"\nresponse_header_timeout 5s\n}")
	for _, request := range []string{
		"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\n",
		"GET http:foo HTTP/1.1\r\nHost: x\r\n\r\n",
		"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
		"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n",
		"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n",
		"POST /v1/x HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 0\r\n\r\n",
	} {
		conn, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(conn, request)
		res, err := http.ReadResponse(bufio.NewReader(conn), nil)
		conn.Close()
		if err != nil {
			t.Errorf("%q gives %v", request, err)
			continue
		}
		if res.StatusCode >= 500 {
			t.Errorf("%q gives %d", request, res.StatusCode)
		}
	}
	ask(newClient(t), "http://"+address+"/v1/x").wantServed(t, "a")
}

func TestAURLWithASecretIsNotEchoed(t *testing.T) {
	for _, raw := range []string{"https://h?api-key=SECRET", "admin:SECRET@h", "https://user:SEC/RET@h", "https://user:SECRET@h:x"} {
		if _, err := parseBackendURL(raw); err == nil || strings.Contains(err.Error(), "SEC") {
			t.Errorf("%s gives %v", raw, err)
		}
	}
	if _, err := parseBackendURL("https://h:65536"); err == nil {
		t.Error("a port of 65536 was accepted")
	}
}
