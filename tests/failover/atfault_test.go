package failover

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// openAIError is an error as OpenAI writes it. A param or code of null is
// written as such.
func openAIError(message, param, code string) string {
	quoted := func(s string) string {
		if s == "null" {
			return s
		}
		return fmt.Sprintf("%q", s)
	}
	return fmt.Sprintf(`{"error":{"message":%q,"type":"invalid_request_error","param":%s,"code":%s}}`, message, quoted(param), quoted(code))
}

func TestABackendThatLacksAPathIsAskedForOthers(t *testing.T) {
	for name, lacks := range map[string]http.HandlerFunc{
		"Azure":     lbtest.Says(404, `{"error":{"code":"404","message":"Resource not found"}}`),
		"FastAPI":   lbtest.Says(404, `{"detail":"Not Found"}`),
		"a page":    lbtest.Says(404, "<html><title>404 Not Found</title></html>", "Content-Type", "text/html"),
		"a method":  lbtest.Says(405, `{"detail":"Method Not Allowed"}`),
		"OpenAI":    lbtest.Says(404, openAIError("Invalid URL (POST /v1/responses)", "null", "null")),
		"a version": lbtest.Says(400, `{"error":{"code":"BadRequest","message":"API version not supported"}}`),
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
					if strings.HasSuffix(r.URL.Path, "/responses") && r.URL.RawQuery == "" {
						lacks(rw, r)
						return
					}
					lbtest.Says(200, `{"id":"x"}`)(rw, r)
				})
				ask := func(path string) lbtest.Reply {
					return w.Send(w.Request(http.MethodPost, path, strings.NewReader(`{"model":"gpt-4o","store":false}`)))
				}
				for range 3 {
					ask("/v1/responses").WantServed(t, "b")
				}
				w.WantCalls(map[string]int{"a": 1, "b": 3})
				ask("/v1/chat/completions").WantServed(t, "a")
				ask("/v1/responses?api-version=preview").WantServed(t, "a")
				w.WantNobodyBlamed()
				time.Sleep(time.Minute)
				ask("/v1/responses").WantServed(t, "b")
				w.WantCalls(map[string]int{"a": 4, "b": 4})

				w.Backends["b"].Replies(lacks)
				for range 2 {
					ask("/v1/responses")
				}
				before := len(w.Backends["a"].Received()) + len(w.Backends["b"].Received())
				if reply := ask("/v1/responses"); reply.Status < 400 || reply.Status > 405 {
					t.Errorf("the client got %d, want the backend's refusal", reply.Status)
				}
				if n := len(w.Backends["a"].Received()) + len(w.Backends["b"].Received()); n != before+1 {
					t.Errorf("%d backends were asked for what both lack, want 1", n-before)
				}
			})
		})
	}
}

func TestANameThatEveryBackendRefusesIsAskedOfOneUntilItIsThere(t *testing.T) {
	for name, missing := range map[string]http.HandlerFunc{
		"OpenAI":    lbtest.Says(404, openAIError("The model `made-up` does not exist or you do not have access to it.", "null", "model_not_found")),
		"Foundry":   lbtest.Says(400, `{"error":{"code":"unknown_model","message":"Unknown model: made-up"}}`),
		"Anthropic": lbtest.Says(404, `{"type":"error","error":{"type":"not_found_error","message":"model: made-up"}}`),
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.PoolOf("a b c d e", ""), func(t *testing.T, w *lbtest.World) {
				calls := func() (n int) {
					for _, b := range w.Backends {
						n += len(b.Received())
					}
					return n
				}
				w.AllReply(missing)
				for i, want := range []int{5, 6, 7, 8} {
					if reply := w.Post(`{"model":"made-up"}`); reply.Status >= 500 || !strings.Contains(reply.Body, "made-up") {
						t.Errorf("the client got %d %s", reply.Status, reply.Body)
					}
					if n := calls(); n != want {
						t.Fatalf("after %d requests there were %d calls, want %d", i+1, n, want)
					}
				}
				w.Post(`{"model":"another"}`)
				if n := calls(); n != 13 {
					t.Errorf("another name was asked of %d backends, want 5", n-8)
				}
				time.Sleep(time.Minute)
				w.Post(`{"model":"made-up"}`)
				if n := calls(); n != 18 {
					t.Errorf("after a minute it was asked of %d backends, want 5", n-13)
				}
				w.Backends["c"].Recovers() // it has the model now
				served := 0
				for range 40 {
					if w.Post(`{"model":"made-up"}`).Status == 200 {
						served++
					}
				}
				if served < 30 {
					t.Errorf("%d of 40 requests were served once one backend had the model", served)
				}
			})
		})
	}
}

func TestAnAccountThatMayNotDoThisServesEverythingElse(t *testing.T) {
	for name, refusal := range map[string]http.HandlerFunc{
		"a stream":  lbtest.Says(400, openAIError("Your organization must be verified to stream this model. Please go to: https://platform.openai.com/settings/organization/general", "stream", "unsupported_value")),
		"a summary": lbtest.Says(400, openAIError("Your organization must be verified to generate reasoning summaries. Please go to: …", "reasoning.summary", "unsupported_value")),
		"a model":   lbtest.Says(403, openAIError("Your organization must be verified to use the model `gpt-image-1`.", "null", "null")),
		"otherwise": lbtest.Says(403, openAIError("This feature requires a verified organization.", "null", "null")),
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(refusal)
				w.Post(`{"model":"gpt-4o"}`).WantServed(t, "b")
				w.Backends["a"].Recovers()
				w.Post(`{"model":"gpt-4o"}`).WantServed(t, "a")
				w.WantNobodyBlamed()
				w.AllReply(refusal)
				if reply := w.Post(`{"model":"gpt-4o"}`); reply.Status/100 != 4 || !strings.Contains(reply.Body, "verified") {
					t.Errorf("the client got %d %s, want the provider's words", reply.Status, reply.Body)
				}
				w.WantNobodyBlamed()
			})
		})
	}
}

func TestAnAccountWithoutMoneyRestsWhateverTheStatus(t *testing.T) {
	anthropic := func(message string) string {
		return fmt.Sprintf(`{"type":"error","error":{"type":"invalid_request_error","message":%q},"request_id":"req_1"}`, message)
	}
	for name, c := range map[string]struct {
		reply   func() http.HandlerFunc
		class   string
		seconds float64
	}{
		"no credit": {func() http.HandlerFunc {
			return lbtest.Says(400, anthropic("Your credit balance is too low to access the Anthropic API."))
		}, "quota", 300},
		"a limit until a date": {func() http.HandlerFunc {
			until := time.Now().Add(3 * time.Minute).UTC().Truncate(time.Minute)
			return lbtest.Says(400, anthropic(until.Format("You have reached your specified API usage limits. You will regain access on 2006-01-02 at 15:04 UTC.")))
		}, "quota", 180},
		"a gateway's quota": {func() http.HandlerFunc {
			return lbtest.Says(403, `{ "statusCode": 403, "message": "Token quota is exceeded. Try again in 2 minutes 2 seconds." }`)
		}, "quota", 122},
		"a quota with a header": {func() http.HandlerFunc { return lbtest.Says(403, `{"message":"no"}`, "Retry-After", "40") }, "quota", 40},
		"no bill was paid": {func() http.HandlerFunc {
			return lbtest.Says(429, `{"error":{"message":"no","type":"billing_not_active","param":null,"code":"billing_not_active"}}`)
		}, "quota", 300},
		"a closed account": {func() http.HandlerFunc { return lbtest.Says(400, anthropic("This organization has been disabled.")) }, "credential", 60},
		"a wrong key": {func() http.HandlerFunc {
			return lbtest.Says(400, `{"error":{"code":400,"message":"API key not valid."}}`)
		}, "credential", 60},
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(c.reply())
				for _, model := range []string{"gpt-4o", "other"} {
					w.Post(`{"model":"`+model+`"}`).WantServed(t, "b")
				}
				w.WantCalls(map[string]int{"a": 1, "b": 2})
				cooldowns := w.Logged("cooldown started")
				if len(cooldowns) != 1 || cooldowns[0].Level.String() != "error" {
					t.Fatalf("logged %v, want one error", cooldowns)
				}
				fields := cooldowns[0].ContextMap()
				if fields["class"] != c.class || fields["deployment"] != nil || fields["seconds"] != c.seconds {
					t.Errorf("logged %v, want %s for %v s of the whole backend", fields, c.class, c.seconds)
				}
			})
		})
	}
}

func TestAPageOfAFirewallIsAboutOneRequest(t *testing.T) {
	const page = "<html><head><title>403 Forbidden</title></head><body>Blocked</body></html>"
	for name, blocks := range map[string]http.HandlerFunc{
		"HTML":                           lbtest.Says(403, page, "Content-Type", "text/html"),
		"text":                           lbtest.Says(403, "Request blocked. Support ID: 1", "Content-Type", "text/plain"),
		"XML":                            lbtest.Says(403, `<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>`, "Content-Type", "application/xml"),
		"HTML that says that it is JSON": lbtest.Says(403, page),
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
				bad := func(i int) string { return fmt.Sprintf(`{"model":"gpt-4o","user":"%d"}`, i) }
				w.Backends["a"].Replies(blocks)
				for range 5 { // one client, which tries again
					w.Post(bad(0)).WantServed(t, "b")
				}
				w.WantCalls(map[string]int{"a": 5, "b": 5})
				w.WantNobodyBlamed()
				w.Backends["a"].Recovers()
				w.Post(bad(9)).WantServed(t, "a")
				w.Backends["a"].Replies(blocks)
				for i := range 2 {
					w.Post(bad(i)).WantServed(t, "b")
				}
				w.WantNobodyBlamed()
				w.Post(bad(2)).WantServed(t, "b")
				cooldowns := w.Logged("cooldown started")
				if len(cooldowns) != 1 || cooldowns[0].ContextMap()["class"] != "failed" || cooldowns[0].ContextMap()["seconds"] != 10. {
					t.Errorf("logged %v, want a failure after three different requests", cooldowns)
				}
				time.Sleep(11 * time.Second)
				w.AllReply(blocks)
				reply := w.Post(bad(3))
				if reply.Status != 403 || reply.Backend == "" {
					t.Errorf("the client got %d of %q, want the page", reply.Status, reply.Backend)
				}
			})
		})
	}
}

// A firewall may refuse every request for one model or operation, and let all
// others pass.
func TestAFirewallThatBlocksOneUseIsFoundWhileItLetsOthersPass(t *testing.T) {
	const chat = "/v1/chat/completions"
	for name, c := range map[string]struct{ path, model, otherPath, otherModel string }{
		"two models":     {chat, "gpt-5", chat, "gpt-4o"},
		"two operations": {"/v1/images/edits", "gpt-image-1", "/v1/images/generations", "gpt-image-1"},
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
					body, _ := io.ReadAll(r.Body)
					if r.URL.Path == c.path && strings.Contains(string(body), c.model) {
						lbtest.Says(403, "<html><title>403 Forbidden</title></html>", "Content-Type", "text/html")(rw, r)
						return
					}
					lbtest.Says(200, `{"id":"x"}`)(rw, r)
				})
				ask := func(path, model string, i int) lbtest.Reply {
					body := fmt.Sprintf(`{"model":%q,"prompt":"%d"}`, model, i)
					return w.Send(w.Request(http.MethodPost, path, strings.NewReader(body)))
				}
				for i := range 3 {
					ask(c.path, c.model, i).WantServed(t, "b")
					ask(c.otherPath, c.otherModel, i)
				}
				cooldowns := w.Logged("cooldown started")
				if len(cooldowns) != 1 || cooldowns[0].ContextMap()["class"] != "failed" || cooldowns[0].ContextMap()["deployment"] != c.model {
					t.Errorf("logged %v, want a failure of %s", cooldowns, c.model)
				}
			})
		})
	}
}

func TestARequestOfAnotherModelThatAFirewallBlocksDoesNotCount(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Says(403, "<html><title>403 Forbidden</title></html>", "Content-Type", "text/html"))
		for _, model := range []string{"gpt-4o", "gpt-5", "gpt-4o", "gpt-5"} {
			w.Post(fmt.Sprintf(`{"model":%q,"seed":%d}`, model, len(w.Backends["a"].Received()))).WantServed(t, "b")
		}
		w.WantNobodyBlamed()
	})
}

func TestARefusedPromptIsNotSentToEveryAccount(t *testing.T) {
	failed := func(code string, stream bool) http.HandlerFunc {
		response := `{"id":"resp_1","object":"response","status":"failed","error":{"code":"` + code + `","message":"no"},"output":[]}`
		if !stream {
			return lbtest.Says(200, response)
		}
		return lbtest.Streams("event: response.failed\ndata: {\"type\":\"response.failed\",\"response\":" + response + "}\n\n")
	}
	for code, want := range map[string]struct{ a, b, c int }{
		"bio_policy":                    {1, 0, 0},
		"cyber_policy":                  {1, 0, 0},
		"misalignment_policy_violation": {1, 0, 0},
		"weapons_policy":                {1, 0, 0}, // there will be more
		"data_residency_mismatch":       {1, 1, 1},
		"mass_persuasion":               {1, 1, 0}, // unknown
		"CapabilityGate":                {1, 1, 0},
		"word-1.2":                      {1, 1, 0},
	} {
		for _, stream := range []bool{false, true} {
			t.Run(fmt.Sprint(code, stream), func(t *testing.T) {
				lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
					w.AllReply(failed(code, stream))
					reply := w.Send(w.Request(http.MethodPost, "/v1/responses", strings.NewReader(fmt.Sprintf(`{"model":"gpt-4o","stream":%v,"store":false}`, stream))))
					if !strings.Contains(reply.Body, code) {
						t.Errorf("the client got %d %s", reply.Status, reply.Body)
					}
					w.WantCalls(map[string]int{"a": want.a, "b": want.b, "c": want.c})
					w.WantNobodyBlamed()
					if unknown := want.b == 1 && want.c == 0; unknown != (reply.Header.Get("X-Should-Retry") == "false") {
						t.Errorf("X-Should-Retry is %q", reply.Header.Get("X-Should-Retry"))
					}
				})
			})
		}
	}
}

func TestAGatewayMayReportAFailureWithA4xx(t *testing.T) {
	for name, reply := range map[string]http.HandlerFunc{
		"Cloudflare": lbtest.Says(400, `{"success":false,"result":[],"messages":[],"error":[{"code":2005,"message":"Failed to get response from provider"}]}`),
		"a 403":      lbtest.Says(403, `{"error":{"message":"The server had an error while processing your request.","type":"server_error"}}`),
		"a 422":      lbtest.Says(422, `{"error":{"message":"Upstream request failed"}}`),
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(reply)
				w.Post(`{"model":"gpt-4o"}`).WantServed(t, "b")
				if cooldowns := w.Logged("cooldown started"); len(cooldowns) != 1 || cooldowns[0].ContextMap()["class"] != "failed" {
					t.Errorf("logged %v, want a failure", cooldowns)
				}
			})
		})
	}
}
