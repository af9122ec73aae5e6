package health

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/modules/status"
	"github.com/openai-lb/caddy-openai-lb/simulator"
)

const (
	flexChat    = `{"model":"gpt-4o","messages":[],"service_tier":"flex"}`
	defaultChat = `{"model":"gpt-4o","messages":[]}`

	flexPool = "openai_lb {\nbackend http://a {\nname a\n}\nbackend http://b {\nname b\npriority 2\n}\n}"
)

// byTier has a backend refuse flex, and serve everything else.
func byTier(flex http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if strings.Contains(string(body), `"service_tier":"flex"`) || r.Header.Get("X-Ms-Service-Tier") == "flex" {
			flex(w, r)
			return
		}
		lbtest.Says(200, `{"id":"chatcmpl-1","choices":[]}`)(w, r)
	}
}

func inFlexBubble(t *testing.T, config string, flex http.HandlerFunc, test func(t *testing.T, w *lbtest.World)) {
	t.Helper()
	lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
		w.AllReply(byTier(flex))
		test(t, w)
	})
}

func TestARefusedFlexRequestCoolsOnlyFlexDown(t *testing.T) {
	for name, refusal := range map[string]http.HandlerFunc{
		"a throttle without a time": lbtest.Status(429),
		"a throttle with a time":    lbtest.Throttled("20"),
		"no capacity":               lbtest.Status(503),
		"a timeout of its own":      lbtest.Status(408),
		"a gateway's timeout":       lbtest.Status(504),
		"a cut connection": func(w http.ResponseWriter, _ *http.Request) {
			conn, _, _ := w.(http.Hijacker).Hijack()
			conn.Close()
		},
		"a word for no capacity": lbtest.Says(429, `{"error":{"code":"slow_down","message":"","type":"server_error","param":null}}`),
	} {
		t.Run(name, func(t *testing.T) {
			inFlexBubble(t, flexPool, refusal, func(t *testing.T, w *lbtest.World) {
				for range 12 {
					if got := w.Post(flexChat); got.Status == 200 {
						t.Errorf("flex got %d", got.Status)
					}
					w.Post(defaultChat).WantServed(t, "a")
					time.Sleep(time.Second)
				}
			})
		})
	}
}

func TestFlexThrottlesAsLongAsItWasTold(t *testing.T) {
	inFlexBubble(t, flexPool, lbtest.Throttled("20"), func(t *testing.T, w *lbtest.World) {
		w.Post(flexChat)
		w.Post(defaultChat).WantServed(t, "a")
		time.Sleep(time.Second)
		w.WantCalls(map[string]int{"a": 2, "b": 1})
		if got := w.Post(flexChat); got.Status != 429 || got.Header.Get("Retry-After") != "19" {
			t.Errorf("flex got %d with Retry-After %s, want 429 with 19", got.Status, got.Header.Get("Retry-After"))
		}
		w.WantCalls(map[string]int{"a": 2, "b": 1})
		time.Sleep(19 * time.Second)
		w.Backends["a"].Recovers()
		w.Post(flexChat).WantServed(t, "a")
	})
}

func TestAFlexRequestThatMeetsASharedLimitCoolsAllTiersDown(t *testing.T) {
	refusal := lbtest.Status(429, "X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "0", "X-Ratelimit-Reset-Tokens", "5s")
	inFlexBubble(t, flexPool, refusal, func(t *testing.T, w *lbtest.World) {
		w.Backends["b"].Recovers()
		w.Post(flexChat).WantServed(t, "b")
		w.Post(defaultChat).WantServed(t, "b")
		time.Sleep(5 * time.Second)
		w.Post(defaultChat).WantServed(t, "a")
	})
}

func TestBackendsOfOneDeploymentShareWhatAllRequestsMeet(t *testing.T) {
	const config = "openai_lb {\nbackend http://a {\nname as_asked\n}\nbackend http://a {\nname default\npriority 2\nservice_tier default\n}\n}"
	lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Throttled("20"))
		w.Post(defaultChat).WantStatus(t, 429)
		w.Post(flexChat).WantStatus(t, 429)
		w.WantCalls(map[string]int{"a": 1})
		time.Sleep(20 * time.Second)
		w.Backends["a"].Replies(lbtest.Status(429, "X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "0", "X-Ratelimit-Reset-Tokens", "5s"))
		w.Post(flexChat).WantStatus(t, 429)
		w.WantCalls(map[string]int{"a": 2})
	})
}

// TestAHugeFlexRequestDoesNotKeepSmallRequestsAway has a limit of all requests
// that only the huge one exceeds.
func TestAHugeFlexRequestDoesNotKeepSmallRequestsAway(t *testing.T) {
	inFlexBubble(t, flexPool, lbtest.Status(429, "Retry-After", "60", "X-Ratelimit-Limit-Tokens", "100000", "X-Ratelimit-Remaining-Tokens", "0"), func(t *testing.T, w *lbtest.World) {
		w.Post(strings.Replace(flexChat, "{", `{"max_tokens":100000,`, 1)).WantStatus(t, 429)
		for range 20 {
			w.Post(defaultChat).WantServed(t, "a", "b")
		}
	})
}

func TestABackendThatRefusedFlexIsNotProbing(t *testing.T) {
	inFlexBubble(t, flexPool, lbtest.Status(503), func(t *testing.T, w *lbtest.World) {
		w.Post(flexChat)
		w.Post(defaultChat).WantServed(t, "a")
		time.Sleep(time.Hour)
		for _, b := range status.Backends(time.Now(), func(string) bool { return true }) {
			if b.State != status.Available {
				t.Errorf("%s is %s", b.Name, b.State)
			}
		}
	})
}

func TestRefusedFlexIsNoFaultOfThePool(t *testing.T) {
	name := lbtest.Unique("flex-refused")
	inFlexBubble(t, strings.Replace(flexPool, "{", "{\npool "+name, 1), lbtest.Throttled("20"), func(t *testing.T, w *lbtest.World) {
		for range 3 {
			w.Post(flexChat).WantError(t, 429, "rate_limit_exceeded")
		}
		lbtest.WantSums(t, name, "requests_total class=not_here 3", "all_throttled_total 0")
		w.AllReply(lbtest.Throttled("20"))
		w.Post(defaultChat).WantStatus(t, 429)
		lbtest.WantSums(t, name, "requests_total class=all_throttled 1", "all_throttled_total 1")
	})
}

func TestAPauseSaysMoreThanABackendWithoutTheTier(t *testing.T) {
	lacks := lbtest.Says(400, `{"error":{"message":"flex is not supported","type":"invalid_request_error","param":"service_tier","code":"invalid_value"}}`)
	for _, first := range []string{"a", "b"} {
		inFlexBubble(t, flexPool, lbtest.Throttled("20"), func(t *testing.T, w *lbtest.World) {
			w.Backends[first].Replies(byTier(lacks))
			for range 2 {
				if got := w.Post(flexChat); got.Status != 429 || got.Header.Get("Retry-After") != "20" {
					t.Errorf("%s lacks flex: the client got %d with Retry-After %q", first, got.Status, got.Header.Get("Retry-After"))
				}
			}
		})
	}
}

func TestABackendWithItsOwnTierGetsNoBodyThatMayNameAnother(t *testing.T) {
	const config = "openai_lb {\nbackend http://a {\nname a\nservice_tier default\n}\nbackend http://b {\nname b\npriority 2\n}\n}"
	lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
		w.Post(`{"model":"gpt-4o","service_tier":"priority"}`).WantServed(t, "a")
		if got := string(w.Backends["a"].Received()[0].Beginning); !strings.Contains(got, `"service_tier":"default"`) {
			t.Errorf("a got %s", got)
		}
		form := "--x\r\nContent-Disposition: form-data; name=\"service_tier\"\r\n\r\npriority\r\n--x--\r\n"
		for kind, body := range map[string]string{"multipart/form-data; boundary=x": form, "application/x-www-form-urlencoded": `{"service_tier":"priority"}`} {
			r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(body))
			r.Header.Set("Content-Type", kind)
			w.Send(r).WantServed(t, "b")
		}
		r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader("compressed"))
		r.Header.Set("Content-Encoding", "gzip")
		w.Send(r).WantServed(t, "b")
	})
}

func TestOperationsWithoutServiceTiersAreNotFlex(t *testing.T) {
	inFlexBubble(t, flexPool, lbtest.Throttled("20"), func(t *testing.T, w *lbtest.World) {
		w.Send(w.Request(http.MethodPost, "/v1/embeddings", strings.NewReader(flexChat))).WantStatus(t, 429)
		w.Send(w.Request(http.MethodPost, "/v1/embeddings", strings.NewReader(defaultChat))).WantStatus(t, 429)
		w.WantCalls(map[string]int{"a": 1, "b": 1})
	})
}

func TestAThrottleOfOtherRequestsHoldsForFlex(t *testing.T) {
	lbtest.InBubble(t, flexPool, func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Throttled("20"))
		w.Post(defaultChat).WantServed(t, "b")
		w.Post(flexChat).WantServed(t, "b")
		w.WantCalls(map[string]int{"a": 1})
	})
}

func TestABackendWithoutTheTierIsNoFailure(t *testing.T) {
	for name, reply := range map[string]http.HandlerFunc{
		"a service tier that is forbidden": lbtest.Says(403, `{"error":{"message":"flex is not for you","type":"invalid_request_error","param":"service_tier","code":"invalid_value"}}`),
		"a service tier":                   lbtest.Says(400, `{"error":{"message":"flex is not supported","type":"invalid_request_error","param":"service_tier","code":"invalid_value"}}`),
		"an operation":                     lbtest.Says(400, `{"error":{"message":"The chatCompletion operation does not work with the specified model","code":"OperationNotSupported"}}`),
	} {
		t.Run(name, func(t *testing.T) {
			inFlexBubble(t, flexPool, reply, func(t *testing.T, w *lbtest.World) {
				w.Backends["b"].Recovers()
				w.Post(flexChat).WantServed(t, "b")
				w.Post(defaultChat).WantServed(t, "a")
				w.WantNobodyBlamed()

				w.Backends["b"].Replies(reply)
				if got := w.Post(flexChat); got.Status != 400 && got.Status != 403 || !strings.Contains(got.Body, "not") {
					t.Errorf("the client got %d %s, want the backends' error", got.Status, got.Body)
				}
			})
		})
	}
}

func TestFlexMayTakeFifteenMinutes(t *testing.T) {
	for _, stream := range []string{"", `"stream":true,`} {
		waits := func(wait time.Duration) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				select {
				case <-time.After(wait):
					if stream != "" {
						lbtest.Streams(lbtest.StreamContent, lbtest.StreamEnd)(w, r)
						return
					}
					lbtest.Says(200, `{"id":"chatcmpl-1","choices":[]}`)(w, r)
				case <-r.Context().Done():
				}
			}
		}
		chat := strings.Replace(flexChat, "{", "{"+stream, 1)
		inFlexBubble(t, flexPool, waits(14*time.Minute), func(t *testing.T, w *lbtest.World) {
			for range 20 { // what is usual is known
				w.Post(defaultChat).WantServed(t, "a")
			}
			served := make(chan lbtest.Reply)
			for range 2 {
				go func() { served <- w.Post(chat) }()
			}
			time.Sleep(100 * time.Second)
			w.Post(defaultChat).WantServed(t, "a")
			(<-served).WantServed(t, "a")
			(<-served).WantServed(t, "a")
			w.WantCalls(map[string]int{"a": 23})
			w.WantNobodyBlamed()
			if silent := w.Logged("backend silent"); len(silent) > 0 {
				t.Errorf("logged %v", silent)
			}

			w.Backends["a"].Replies(byTier(waits(16 * time.Minute)))
			began := time.Now()
			w.Backends["b"].Recovers()
			w.Post(chat).WantServed(t, "b")
			if took := time.Since(began); took != 15*time.Minute {
				t.Errorf("flex was given up after %s", took)
			}
			w.Post(defaultChat).WantServed(t, "a")
			w.Post(chat).WantServed(t, "b")
		})
	}
}

// TestAFlexStreamMayPauseForFifteenMinutes has streams that begin at once, and
// then wait for the model.
func TestAFlexStreamMayPauseForFifteenMinutes(t *testing.T) {
	for pause, served := range map[time.Duration]bool{14 * time.Minute: true, 16 * time.Minute: false} {
		inFlexBubble(t, flexPool, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(w, "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{}}\n\n")
			w.(http.Flusher).Flush()
			select {
			case <-time.After(pause):
				io.WriteString(w, "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{}}\n\n")
			case <-r.Context().Done():
			}
		}, func(t *testing.T, w *lbtest.World) {
			got := w.Send(w.Request(http.MethodPost, "/v1/responses", strings.NewReader(strings.Replace(flexChat, "{", `{"stream":true,`, 1))))
			if completed := strings.Contains(got.Body, "response.completed"); completed != served {
				t.Errorf("a pause of %s: the stream is %q", pause, got.Body)
			}
			w.Post(defaultChat).WantServed(t, "a")
			if served {
				w.WantNobodyBlamed()
			}
		})
	}
}

func TestBackendsThatDifferInTheirServiceTierHaveSeparateCooldowns(t *testing.T) {
	const both = "openai_lb {\nbackend http://a {\nname flex\n%s\n}\nbackend http://a {\nname standard\n%s\npriority 2\n}\n}"
	for name, config := range map[string]string{
		"in the body":                   strings.Replace(strings.Replace(both, "%s", "service_tier flex", 1), "%s", "", 1),
		"in the header, at Azure":       strings.Replace(strings.Replace(both, "%s", "api_key key-of-a-backend\nauth api_key\nservice_tier flex", 1), "%s", "api_key key-of-a-backend\nauth api_key\nservice_tier default", 1),
		"in a header that is an option": strings.Replace(strings.Replace(both, "%s", "header X-Ms-Service-Tier flex", 1), "%s", "header X-Ms-Service-Tier default", 1),
	} {
		t.Run(name, func(t *testing.T) {
			inFlexBubble(t, config, lbtest.Throttled("20"), func(t *testing.T, w *lbtest.World) {
				for range 10 {
					w.Post(defaultChat).WantServed(t, "a")
				}
				w.WantCalls(map[string]int{"a": 11})
				time.Sleep(20 * time.Second)
				w.Post(defaultChat).WantServed(t, "a")
				w.WantCalls(map[string]int{"a": 13}) // flex had its turn again
				for i, call := range w.Backends["a"].Received() {
					if strings.Contains(name, "Azure") && strings.Contains(string(call.Beginning), "service_tier") {
						t.Errorf("call %d has a service tier in its body: %s", i, call.Beginning)
					}
				}
			})
		})
	}
}

func TestNoClientSendsAzuresHeader(t *testing.T) {
	lbtest.InBubble(t, flexPool, func(t *testing.T, w *lbtest.World) {
		r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(defaultChat))
		r.Header["x-ms-service-tier"] = []string{"priority"}
		w.Send(r).WantServed(t, "a")
		if got := w.Backends["a"].Received()[0].Request.Header.Get("X-Ms-Service-Tier"); got != "" {
			t.Errorf("the backend got the header %q", got)
		}
	})
}

// TestFlexThatIsRefusedTakesNothingFromOtherRequests has as many flex requests
// as others, which use 0.8 of the quota.
func TestFlexThatIsRefusedTakesNothingFromOtherRequests(t *testing.T) {
	mix := func(flexes bool) (early int64) {
		lbtest.InBubble(t, flexPool, func(t *testing.T, w *lbtest.World) {
			none := 0
			simulators := map[string]http.Handler{}
			for _, name := range []string{"a", "b"} {
				simulators[name] = lbtest.Simulate(t, simulator.Handler{Name: name, RequestsPerMinute: 600, FlexCapacity: &none})
				w.Serve(name+":80", simulators[name])
			}
			var clients sync.WaitGroup
			seconds := 60
			if lbtest.Race {
				seconds = 15
			}
			for range seconds * 16 { // 0.8 of twice 600 a minute
				clients.Go(func() { w.Post(defaultChat).WantStatus(t, 200) })
				if flexes {
					clients.Go(func() { w.Post(flexChat).WantStatus(t, http.StatusTooManyRequests) })
				}
				time.Sleep(time.Second / 16)
			}
			clients.Wait()
			for _, s := range simulators {
				var status simulator.Status
				reply := httptest.NewRecorder()
				if s.ServeHTTP(reply, httptest.NewRequest(http.MethodGet, "/_simulator/status", nil)); json.Unmarshal(reply.Body.Bytes(), &status) != nil {
					t.Errorf("the simulator's status is %s", reply.Body)
				}
				early += status.Early
			}
		})
		return early
	}
	if without, with := mix(false), mix(true); with > without {
		t.Errorf("%d requests came too early, and %d without flex", with, without)
	}
}
