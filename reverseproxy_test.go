package openailb

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/textproto"
	"strconv"
	"strings"
	"testing"
	"time"
)

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

func TestAPlainReverseProxyHonoursPriorityWeightAndRetryAfter(t *testing.T) {
	for _, retries := range []string{"", "lb_retries 5", "lb_try_duration 5s"} {
		t.Run(retries, func(t *testing.T) {
			a, serverA := listen(t, "a")
			b, serverB := listen(t, "b")
			c, serverC := listen(t, "c")
			dial := func(s *httptest.Server) string { return s.Listener.Addr().String() }
			url := "http://" + serveAt(t, fmt.Sprintf(`reverse_proxy %[1]s %[2]s %[3]s {
				lb_policy openai_lb {
					upstream %[2]s {
						priority 2
						weight 3
					}
					upstream %[3]s {
						priority 2
						weight 1
					}
				}
				%[4]s
				transport openai_lb
			}`, dial(serverA), dial(serverB), dial(serverC), retries)) + "/anything"
			client := newClient(t)
			for range 20 {
				ask(client, url).wantServed(t, "a")
			}
			a.replies(throttled("300"))
			for range 400 {
				ask(client, url).wantServed(t, "b", "c")
			}
			if n := len(a.received()); n != 21 {
				t.Errorf("a was called %d times, want 21", n)
			}
			if n := len(b.received()); n < 250 || n > 350 {
				t.Errorf("b served %d of 400, want about 300", n)
			}
			for _, call := range append(b.received(), c.received()...) {
				if call.bodyHash != sha([]byte(`{"model":"gpt-4o"}`)) {
					t.Fatal("a body was changed on its way")
				}
			}
			b.replies(throttled("40"))
			c.replies(throttled("50"))
			for range 2 {
				reply := ask(client, url)
				reply.wantError(t, 429, "rate_limit_exceeded")
				if n, err := strconv.Atoi(reply.header.Get("Retry-After")); err != nil || n < 1 || n > 40 {
					t.Errorf("Retry-After is %q, want what is left of 40 s", reply.header.Get("Retry-After"))
				}
			}
			if n := len(b.received()) + len(c.received()); n != 402 {
				t.Errorf("b and c were called %d times, want 402", n)
			}
		})
	}
}

func TestThePolicyAloneBalancesByPriorityAndFailsOver(t *testing.T) {
	_, serverA := listen(t, "a")
	b, serverB := listen(t, "b")
	serverA.Close()
	address := serveAt(t, fmt.Sprintf(`reverse_proxy %s %s {
		lb_policy openai_lb {
			upstream %[2]s {
				priority 2
			}
		}
		lb_retries 1
	}`, serverA.Listener.Addr(), serverB.Listener.Addr()))
	for range 3 {
		ask(newClient(t), "http://"+address+"/").wantServed(t, "b")
	}
	if n := len(b.received()); n != 3 {
		t.Errorf("b served %d, want 3", n)
	}
}

func TestAPlainReverseProxyPassesInterimRepliesAsTheyAre(t *testing.T) {
	a, backend := listen(t, "a")
	a.replies(func(rw http.ResponseWriter, _ *http.Request) {
		rw.Header().Set("Link", "</style.css>; rel=preload")
		rw.WriteHeader(http.StatusEarlyHints)
	})
	address := serveAt(t, "reverse_proxy "+backend.Listener.Addr().String()+" {\nlb_policy openai_lb\ntransport openai_lb\n}")
	var links []string
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{
		Got1xxResponse: func(_ int, header textproto.MIMEHeader) error {
			links = append(links, header.Get("Link"))
			return nil
		},
	})
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	res, err := newClient(t).Do(r)
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if len(links) != 1 || links[0] != "</style.css>; rel=preload" {
		t.Errorf("client got the links %q", links)
	}
}

func TestAPlainReverseProxyPassesOnWhatItNeedNotRead(t *testing.T) {
	a, serverA := listen(t, "a")
	address := serveAt(t, "reverse_proxy "+serverA.Listener.Addr().String()+" {\nlb_policy openai_lb\ntransport openai_lb {\nrequest_buffers 1KiB\n}\n}")
	url := "http://" + address + "/openai/deployments/whisper/audio/transcriptions?api-version=1"
	for name, headers := range map[string][]string{"compressed": {"Content-Encoding", "gzip"}, "longer than what is kept": nil} {
		body := strings.Repeat(`{"x":"y"`, 1000)
		a.forget()
		post(newClient(t), url, body, headers...).wantServed(t, "a")
		if got := a.received()[0]; got.bodyHash != sha([]byte(body)) {
			t.Errorf("%s: a got another body, of %d bytes", name, got.bodyBytes)
		}
	}
}
