package openailb_test

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/textproto"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestAHandlerAfterTheBackendsDoesNotSendAnEmptyBody(t *testing.T) {
	a, serverA := lbtest.Listen(t, "a")
	a.Replies(lbtest.Status(400))
	b, serverB := lbtest.Listen(t, "b")
	for _, inner := range []string{
		"openai_lb {\nbackend " + serverB.URL + "\n}",
		"reverse_proxy " + serverB.Listener.Addr().String() + " {\nlb_policy openai_lb\n}",
		"reverse_proxy " + serverB.Listener.Addr().String() + " {\ntransport openai_lb\n}",
		"reverse_proxy " + serverB.Listener.Addr().String() + " {\nlb_policy openai_lb\ntransport openai_lb\n}",
	} {
		t.Run(inner, func(t *testing.T) {
			address := lbtest.ServeAt(t, "intercept {\n@e status 400\nhandle_response @e {\n"+inner+"\n}\n}\nopenai_lb {\nbackend "+serverA.URL+"\n}")
			for _, body := range []io.Reader{strings.NewReader("{}"), lbtest.Chunked([]byte("{}"))} {
				res, err := lbtest.NewClient(t).Do(lbtest.NewRequest(t, http.MethodPost, "http://"+address+"/v1/x", body))
				if err == nil {
					if res.Body.Close(); res.StatusCode == 200 {
						t.Errorf("client got 200 of %q", res.Header.Get("X-Backend"))
					}
				}
				for _, call := range b.Received() {
					if call.ReadErr == nil {
						t.Errorf("b got %d bytes for whole", call.BodyBytes)
					}
				}
			}
		})
	}
}

func TestAHandlerAfterTheBackendsDoesNotHaveARequestExecutedAgain(t *testing.T) {
	a, serverA := lbtest.Listen(t, "a")
	a.Replies(lbtest.Status(502))
	b, serverB := lbtest.Listen(t, "b")
	address := lbtest.ServeAt(t, "intercept {\n@e status 5xx\nhandle_response @e {\nreverse_proxy "+serverB.Listener.Addr().String()+"\n}\n}\nopenai_lb {\nbackend "+serverA.URL+"\n}")
	for _, body := range []string{`{"input_file_id":"file-1234"}`, ""} {
		reply := lbtest.Post(lbtest.NewClient(t), "http://"+address+"/v1/batches", body)
		if n := len(a.Received()); n != 1 || reply.Err == nil && reply.Status < 500 {
			t.Errorf("with the body %q, a got %d requests, and the client %d", body, n, reply.Status)
		}
		for _, call := range b.Received() {
			if call.ReadErr == nil {
				t.Errorf("with the body %q, b got it too", body)
			}
		}
		a.Forget()
		b.Forget()
	}
}

// TestCaddyKnowsTheSizeOfARequestThatWasServed holds although no later handler
// may read the body.
func TestCaddyKnowsTheSizeOfARequestThatWasServed(t *testing.T) {
	_, server := lbtest.Listen(t, "a")
	address := lbtest.ServeAt(t, "metrics /metrics\nopenai_lb {\nbackend "+server.URL+"\n}", "metrics")
	client := lbtest.NewClient(t)
	lbtest.Post(client, "http://"+address+"/v1/x", strings.Repeat(" ", 100_000)).WantServed(t, "a")
	const sum = `caddy_http_request_size_bytes_sum{code="200",handler="openai_lb",method="POST",server="srv0"} `
	var size string
	lbtest.WaitFor(t, func() (counted bool) { // which may be after the client has its reply
		_, size, counted = strings.Cut(lbtest.Get(client, "http://"+address+"/metrics").Body, sum)
		return counted
	})
	if !strings.HasPrefix(size, "100") {
		t.Errorf("the request had %.6s… bytes, want 100,000 and its header", size)
	}
}

func TestTwoReverseProxiesOfOneRequestDoNotMix(t *testing.T) {
	_, serverA := lbtest.Listen(t, "a")
	b, serverB := lbtest.Listen(t, "b")
	address := lbtest.ServeAt(t, fmt.Sprintf(`route {
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
	lbtest.Ask(lbtest.NewClient(t), "http://"+address+"/v1/x").WantServed(t, "b")
	if got := b.Received()[0].BodyHash; got != lbtest.Hash([]byte(`{"model":"gpt-4o"}`)) {
		t.Error("b did not get the body")
	}
}

func TestATransportWithoutThePolicyIsWarnedOf(t *testing.T) {
	wantWarning(t, "has no effect without lb_policy", map[string]bool{
		"reverse_proxy a {\ntransport openai_lb\n}":                                    true,
		"reverse_proxy a {\ntransport openai_lb\nlb_policy openai_lb\n}":               false,
		"reverse_proxy a {\nhandle_response {\nopenai_lb {\nbackend http://b\n}\n}\n}": false,
	})
}

func TestWeightsThatAPolicyIgnoresAreWarnedOf(t *testing.T) {
	balancer := func(weight, policy string) string {
		return "openai_lb {\nbackend http://a\nbackend http://b {\nweight " + weight + "\n}\n" + policy + "\n}"
	}
	plain := func(weight, policy string) string {
		return "reverse_proxy a:1 b:1 {\nlb_policy openai_lb {\nupstream b:1 {\nweight " + weight + "\n}\n" + policy + "\n}\ntransport openai_lb\n}"
	}
	wantWarning(t, "weight is ignored", map[string]bool{
		balancer("3", "lb_policy least_conn"): true,
		balancer("3", ""):                     false,
		balancer("0", "lb_policy first"):      false, // drained, whatever the policy
		balancer("1", "lb_policy first"):      false,
		plain("3", "lb_policy least_conn"):    true,
		plain("3", ""):                        false,
		plain("0", "lb_policy least_conn"):    false,
	})
}

// Only the pool counts the requests of openai_lb, and a fallback does not see
// its counts.
func TestAFallbackThatCountsRequestsIsWarnedOf(t *testing.T) {
	balancer := func(policy string) string { return "openai_lb {\nbackend http://a\n" + policy + "\n}" }
	wantWarning(t, "the fallback of lb_policy counts no requests", map[string]bool{
		balancer("lb_policy header X-User {\nfallback least_conn\n}"):                           true,
		balancer("lb_policy query user {\nfallback header X-User {\nfallback least_conn\n}\n}"): true,
		balancer("lb_policy header X-User"):                                                     false,
		balancer("lb_policy header X-User {\nfallback first\n}"):                                false,
		balancer("lb_policy least_conn"):                                                        false,
	})
}

// wantWarning checks for which directives these words are logged at load.
func wantWarning(t *testing.T, words string, wants map[string]bool) {
	t.Helper()
	for directives, want := range wants {
		t.Run(directives, func(t *testing.T) {
			logs := filepath.Join(t.TempDir(), "log")
			lbtest.ServeAt(t, directives, "log {\noutput file "+logs+"\n}")
			text := lbtest.ReadFile(t, logs)
			if warned := strings.Contains(string(text), words); warned != want {
				t.Errorf("warned is %t, want %t", warned, want)
			}
		})
	}
}

func TestAnErrorOfAPlainReverseProxyHasTheFormOfTheClientsPath(t *testing.T) {
	a, serverA := lbtest.Listen(t, "a")
	a.Replies(lbtest.Throttled("59"))
	address := lbtest.ServeAt(t, fmt.Sprintf(`reverse_proxy %s {
		rewrite /anthropic{uri}
		lb_policy openai_lb
		transport openai_lb
	}`, serverA.Listener.Addr()))
	client := lbtest.NewClient(t)
	for path, want := range map[string]string{
		"/v1/messages":         `{"error":{"details":{"error_code":"rate_limit_exceeded"},"message":"All backends are rate limited`,
		"/v1/chat/completions": `{"error":{"message":"All backends are rate limited`,
	} {
		got := lbtest.Ask(client, "http://"+address+path)
		got.WantError(t, 429, "rate_limit_exceeded")
		if !strings.HasPrefix(got.Body, want) {
			t.Errorf("%s: %s", path, got.Body)
		}
	}
	if got := a.Received()[0].Request.URL.Path; !strings.HasPrefix(got, "/anthropic/v1/") {
		t.Errorf("a was asked for %s", got)
	}
}

func TestThePolicyAloneKeepsTryingForLBTryDuration(t *testing.T) {
	up := fmt.Sprintf("127.0.0.1:%d", lbtest.FreePort(t))
	address := lbtest.ServeAt(t, "reverse_proxy "+up+" {\nlb_policy openai_lb\nlb_try_duration 20s\nlb_try_interval 10ms\n}")
	done := make(chan lbtest.Reply)
	go func() { done <- lbtest.Ask(lbtest.NewClient(t), "http://"+address+"/") }()
	time.Sleep(50 * time.Millisecond) // some attempts fail, whenever the backend comes up
	l, err := net.Listen("tcp", up)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: &lbtest.Backend{Name: "a"}}
	go server.Serve(l)
	defer server.Close()
	reply := <-done
	reply.WantServed(t, "a")
}

func TestWhatAPlainReverseProxyCannotDoIsRefused(t *testing.T) {
	for options, want := range map[string]string{
		"lb_policy openai_lb\nlb_retry_match {\nmethod POST\n}\ntransport openai_lb":                  "lb_retry_match is not allowed",
		"lb_policy openai_lb\nfail_duration 30s\ntransport openai_lb":                                 "fail_duration of reverse_proxy is not allowed",
		"lb_policy openai_lb\nmax_fails 2\ntransport openai_lb":                                       "max_fails of reverse_proxy is not allowed",
		"lb_policy openai_lb\nunhealthy_status 5xx\ntransport openai_lb":                              "unhealthy_status of reverse_proxy is not allowed",
		"lb_policy openai_lb\nunhealthy_latency 3s\ntransport openai_lb":                              "unhealthy_latency of reverse_proxy is not allowed",
		"lb_policy openai_lb\nunhealthy_request_count 3\ntransport openai_lb {\nfail_duration 30s\n}": "",
		"lb_policy openai_lb\nfail_duration 30s":                                                      "",
		"lb_policy openai_lb {\nupstream b {\npriority 2\n}\n}":                                       "upstream 'b' is not one of reverse_proxy's upstreams: a:1, b:80",
		"lb_policy openai_lb {\nupstream b:80\nupstream b:80\n}":                                      "upstream b:80 is given twice",
		"lb_policy openai_lb {\nupstream b:80 {\npriority 2\n}\n}":                                    "",
		"lb_policy openai_lb {\nupstream c:1\n}\ndynamic a c 1":                                       "",
		"lb_policy openai_lb\ntransport openai_lb {\nrequest_buffers 1KiB\nsilence off\n}":            "silence has no effect in a plain reverse_proxy: use the directive openai_lb, at Caddyfile:6",
		"lb_policy openai_lb\ntransport openai_lb {\nsilence off\n}":                                  "silence has no effect in a plain reverse_proxy",
		"lb_policy openai_lb\ntransport openai_lb {\nfail_duration 30s\nquota_steering off\n}":        "quota_steering has no effect in a plain reverse_proxy: use the directive openai_lb, at Caddyfile:6",
	} {
		err := lbtest.ValidateCaddyfile(t, ":0 {\nreverse_proxy a:1 b {\n"+options+"\n}\n}")
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s gives %v, want %q", options, err, want)
		}
	}
}

func TestAPlainReverseProxyHonoursPriorityWeightAndRetryAfter(t *testing.T) {
	for _, retries := range []string{"", "lb_retries 5", "lb_try_duration 5s"} {
		t.Run(retries, func(t *testing.T) {
			a, serverA := lbtest.Listen(t, "a")
			b, serverB := lbtest.Listen(t, "b")
			c, serverC := lbtest.Listen(t, "c")
			dial := func(s *httptest.Server) string { return s.Listener.Addr().String() }
			url := "http://" + lbtest.ServeAt(t, fmt.Sprintf(`reverse_proxy %[1]s %[2]s %[3]s {
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
			client := lbtest.NewClient(t)
			for range 20 {
				lbtest.Ask(client, url).WantServed(t, "a")
			}
			a.Replies(lbtest.Throttled("300"))
			for range 400 {
				lbtest.Ask(client, url).WantServed(t, "b", "c")
			}
			if n := len(a.Received()); n != 21 {
				t.Errorf("a was called %d times, want 21", n)
			}
			if n := len(b.Received()); n < 250 || n > 350 {
				t.Errorf("b served %d of 400, want about 300", n)
			}
			for _, call := range append(b.Received(), c.Received()...) {
				if call.BodyHash != lbtest.Hash([]byte(`{"model":"gpt-4o"}`)) {
					t.Fatal("a body was changed on its way")
				}
			}
			b.Replies(lbtest.Throttled("40"))
			c.Replies(lbtest.Throttled("50"))
			for range 2 {
				reply := lbtest.Ask(client, url)
				reply.WantError(t, 429, "rate_limit_exceeded")
				if n, err := strconv.Atoi(reply.Header.Get("Retry-After")); err != nil || n < 1 || n > 40 {
					t.Errorf("Retry-After is %q, want what is left of 40 s", reply.Header.Get("Retry-After"))
				}
			}
			if n := len(b.Received()) + len(c.Received()); n != 402 {
				t.Errorf("b and c were called %d times, want 402", n)
			}
		})
	}
}

func TestAPlainReverseProxySendsNoTraceToAnUpstream(t *testing.T) {
	a, server := lbtest.Listen(t, "a")
	url := "http://" + lbtest.ServeAt(t, "reverse_proxy "+server.Listener.Addr().String()+" {\nlb_policy openai_lb\ntransport openai_lb\nheader_up Authorization {env.KEY}\n}") + "/v1/x"
	client := lbtest.NewClient(t)
	for _, method := range []string{http.MethodTrace, http.MethodConnect} {
		r := lbtest.NewRequest(t, method, url, http.NoBody)
		res := lbtest.Do(t, client, r)
		res.Body.Close()
		if res.StatusCode != http.StatusMethodNotAllowed {
			t.Errorf("%s gives %d, want 405", method, res.StatusCode)
		}
	}
	if n := len(a.Received()); n != 0 {
		t.Errorf("a was called %d times", n)
	}
	lbtest.Ask(client, url).WantServed(t, "a")
}

func TestThePolicyAloneBalancesByPriorityAndFailsOver(t *testing.T) {
	_, serverA := lbtest.Listen(t, "a")
	b, serverB := lbtest.Listen(t, "b")
	serverA.Close()
	address := lbtest.ServeAt(t, fmt.Sprintf(`reverse_proxy %s %s {
		lb_policy openai_lb {
			upstream %[2]s {
				priority 2
			}
		}
		lb_retries 1
	}`, serverA.Listener.Addr(), serverB.Listener.Addr()))
	for range 3 {
		lbtest.Ask(lbtest.NewClient(t), "http://"+address+"/").WantServed(t, "b")
	}
	if n := len(b.Received()); n != 3 {
		t.Errorf("b served %d, want 3", n)
	}
}

func TestAPlainReverseProxyPassesInterimRepliesAndTrailersAsTheyAre(t *testing.T) {
	a, backend := lbtest.Listen(t, "a")
	a.Replies(func(rw http.ResponseWriter, _ *http.Request) {
		rw.Header().Set("Link", "</style.css>; rel=preload")
		rw.WriteHeader(http.StatusEarlyHints)
		rw.Header().Set("Trailer", "Set-Cookie")
		rw.(http.Flusher).Flush()
		rw.Header().Set("Set-Cookie", "a=1")
	})
	address := lbtest.ServeAt(t, "reverse_proxy "+backend.Listener.Addr().String()+" {\nlb_policy openai_lb\ntransport openai_lb\n}")
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
	res := lbtest.Do(t, lbtest.NewClient(t), r)
	if _, err := io.Copy(io.Discard, res.Body); err != nil || res.Trailer.Get("Set-Cookie") != "a=1" {
		t.Errorf("client got the trailers %v, %v", res.Trailer, err)
	}
	if len(links) != 1 || links[0] != "</style.css>; rel=preload" {
		t.Errorf("client got the links %q", links)
	}
}

func TestAPlainReverseProxyPassesOnWhatItNeedNotRead(t *testing.T) {
	a, serverA := lbtest.Listen(t, "a")
	address := lbtest.ServeAt(t, "reverse_proxy "+serverA.Listener.Addr().String()+" {\nlb_policy openai_lb\ntransport openai_lb {\nrequest_buffers 1KiB\n}\n}")
	url := "http://" + address + "/openai/deployments/whisper/audio/transcriptions?api-version=1"
	for name, headers := range map[string][]string{"compressed": {"Content-Encoding", "gzip"}, "longer than what is kept": nil} {
		body := strings.Repeat(`{"x":"y"`, 1000)
		a.Forget()
		lbtest.Post(lbtest.NewClient(t), url, body, headers...).WantServed(t, "a")
		if got := a.Received()[0]; got.BodyHash != lbtest.Hash([]byte(body)) {
			t.Errorf("%s: a got another body, of %d bytes", name, got.BodyBytes)
		}
	}
}

// TestADynamicUpstreamIsForgottenThatIsGoneForAnHour also by the metrics, so
// that any number of addresses can follow each other.
func TestADynamicUpstreamIsForgottenThatIsGoneForAnHour(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("x", ""), func(t *testing.T, w *lbtest.World) {
		name := lbtest.Unique("dynamic")
		module, err := lbtest.Context(t).LoadModuleByID("http.reverse_proxy.selection_policies.openai_lb", []byte(`{"pool":"`+name+`"}`))
		if err != nil {
			t.Fatal(err)
		}
		chosen := func(dial string) {
			t.Helper()
			rw, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/", nil)
			r = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), rw, new(caddyhttp.Server))
			upstream := &reverseproxy.Upstream{Dial: dial, Host: new(reverseproxy.Host)}
			if got := module.(reverseproxy.Selector).Select(reverseproxy.UpstreamPool{upstream}, r, rw); got != upstream {
				t.Errorf("%v was chosen, want %s", got, dial)
			}
		}
		for i := range 2000 {
			chosen(fmt.Sprintf("10.0.%d.%d:80", i/250, i%250))
			time.Sleep(time.Minute)
		}
		for dial, want := range map[string]int{"10.0.0.0:80": 0, "10.0.7.0:80": 0, "10.0.7.249:80": 1} {
			series := 0
			for _, family := range lbtest.Scrape(t) {
				for _, metric := range family.GetMetric() {
					if family.GetName() == "caddy_openai_lb_request_duration_seconds" && lbtest.HasLabels(metric, map[string]string{"pool": name, "backend": dial}) {
						series++
					}
				}
			}
			if series != want {
				t.Errorf("%s: %d series, want %d", dial, series, want)
			}
		}
	})
}
