package callers

import (
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/modules/status"
)

// ofModel is a chat of alice's of 20 tokens for a model.
func (w *world) ofModel(model string) lbtest.Reply {
	return w.chat(strings.Replace(prompt(20, `"max_tokens":1,`), "gpt-4o", model, 1))
}

// wantLimits checks how much alice has used of each limit.
func (w *world) wantLimits(t *testing.T, want string) {
	t.Helper()
	synctest.Wait()
	text := ""
	for _, u := range w.of("alice").Limits {
		text += fmt.Sprintf("%s %d of %s\n", u.Limit.Kind, u.Used, u.Limit)
	}
	if text = strings.TrimSpace(text); text != want {
		t.Errorf("alice has used\n%s\nwant\n%s", text, want)
	}
}

func TestALimitOfAModelRefusesRequestsForThatModel(t *testing.T) {
	inBubble(t, "caller alice {\ntokens 1k/minute\ntokens 150/minute gpt-4o\nrequests 5/day o3\n}", func(t *testing.T, w *world) {
		w.AllReply(used(60, 40))
		got := w.ofModel("gpt-4o")
		got.WantServed(t, "a")
		wantHeaders(t, got, "X-Ratelimit-Limit-Tokens", "150", "X-Ratelimit-Limit-Requests", "")
		w.ofModel("gpt-4o").WantServed(t, "a")
		got = w.ofModel("gpt-4o")
		got.WantError(t, http.StatusTooManyRequests, "rate_limit_exceeded")
		if want := "Rate limit reached for alice on tokens per min (TPM) of gpt-4o: Limit 150, Used 200, Requested "; !strings.Contains(got.Body, want) || !strings.Contains(got.Body, `"type":"tokens"`) {
			t.Errorf("got %s, want %s", got.Body, want)
		}
		wantHeaders(t, got, "Retry-After", "59", "X-Ratelimit-Limit-Tokens", "150", "X-Ratelimit-Remaining-Tokens", "0")
		// the model is also that of a path, and its name that of the client
		w.post(aliceKey, "/openai/deployments/gpt-4o/chat/completions?api-version=1", `{"messages":[]}`).WantError(t, http.StatusTooManyRequests, "rate_limit_exceeded")
		got = w.ofModel("o3")
		got.WantServed(t, "a")
		wantHeaders(t, got, "X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Limit-Requests", "5")
		w.post(aliceKey, "/v1/chat/completions", `{"messages":[]}`).WantServed(t, "a") // without a model
		w.post(bobKey, "/v1/chat/completions", prompt(20, "")).WantServed(t, "a")
		w.wantLimits(t, "tokens 400 of 1k/minute\ntokens 200 of 150/minute gpt-4o\nrequests 1 of 5/day o3")
		w.WantCalls(map[string]int{"a": 5})
		lbtest.WantSums(t, w.Handler.Pool, "caller_limited_total caller=alice kind=tokens window=minute model=gpt-4o 2", "caller_limited_total 2",
			"caller_limit_used_ratio caller=alice kind=tokens window=minute model= 0.4", "caller_limit_used_ratio caller=alice kind=requests window=day model=o3 0.2")
		if logged := w.Logged("caller reached its limit"); len(logged) != 1 || logged[0].ContextMap()["limit"] != "150/minute gpt-4o" || logged[0].ContextMap()["caller"] != "alice" {
			t.Errorf("logged is %v", logged)
		}
	})
}

func TestTheNameOfTheClientCountsForALimitOfAModel(t *testing.T) {
	inBubbleWith(t, "backend http://a {\nmodel luna deployment-1\n}\ncaller alice {\nrequests 1/day luna\n}", func(t *testing.T, w *world) {
		w.ofModel("luna").WantServed(t, "a")
		w.ofModel("luna").WantError(t, http.StatusTooManyRequests, "insufficient_quota")
		got := w.post(aliceKey, "/openai/deployments/luna/chat/completions?api-version=1", `{"messages":[]}`)
		if want := "You exceeded your quota: alice has used 1 of 1 requests per day of luna, and this request needs 1."; !strings.Contains(got.Body, want) {
			t.Errorf("got %s, want %s", got.Body, want)
		}
	})
}

// TestARefusedRequestIsChargedToNoLimit whether the limit of all models refuses
// it or that of one, or a backend fails.
func TestARefusedRequestIsChargedToNoLimit(t *testing.T) {
	for limits, want := range map[string]string{
		"tokens 150/day\ntokens 1k/day gpt-4o": "tokens 200 of 150/day\ntokens 200 of 1k/day gpt-4o",
		"tokens 1k/day\ntokens 150/day gpt-4o": "tokens 200 of 1k/day\ntokens 200 of 150/day gpt-4o",
	} {
		inBubble(t, "caller alice {\n"+limits+"\n}", func(t *testing.T, w *world) {
			w.AllReply(lbtest.Status(500))
			w.ofModel("gpt-4o").WantStatus(t, http.StatusInternalServerError)
			w.wantLimits(t, strings.ReplaceAll(want, " 200 of ", " 0 of "))
			time.Sleep(time.Minute)
			w.AllReply(used(60, 40))
			for range 2 {
				w.ofModel("gpt-4o").WantServed(t, "a")
			}
			for range 3 {
				w.ofModel("gpt-4o").WantError(t, http.StatusTooManyRequests, "insufficient_quota")
			}
			w.wantLimits(t, want)
		})
	}
}

func TestARequestOverALimitOfAModelGetsAnotherTier(t *testing.T) {
	inBubble(t, "caller alice {\ntier batch\ntokens 150/day gpt-4o then nightly\n}\ntier batch\ntier nightly", func(t *testing.T, w *world) {
		w.AllReply(used(60, 40))
		for _, model := range []string{"gpt-4o", "gpt-4o", "gpt-4o", "o3"} {
			w.ofModel(model).WantServed(t, "a")
		}
		lbtest.WantSums(t, w.Handler.Pool, "caller_demoted_total caller=alice kind=tokens window=day model=gpt-4o 1", "caller_demoted_total 1")
	})
}

func TestALimitOfACallerReplacesThatOfItsTierForTheSameModel(t *testing.T) {
	inBubble(t, "tier batch {\ntokens 1k/day\ntokens 500/day luna\ntokens 600/day terra\nrequests 7/day luna\n}\ncaller alice {\ntokens 50/day luna\ntokens 60/hour luna\n}", func(t *testing.T, w *world) {
		w.chat(`{}`)
		w.wantLimits(t, "tokens 1 of 1k/day\nrequests 0 of 7/day luna\ntokens 0 of 60/hour luna\ntokens 0 of 50/day luna\ntokens 0 of 600/day terra")
	})
}

// TestALimitOfAModelCannotBeEvaded by a body in which servers may read another
// model than the balancer.
func TestALimitOfAModelCannotBeEvaded(t *testing.T) {
	inBubble(t, "request_buffers 2KB\ncaller alice {\nrequests 1/day luna\n}", func(t *testing.T, w *world) {
		w.ofModel("luna").WantServed(t, "a")
		for body, want := range map[string]int{
			`{"model":"terra","model":"luna"}`:                             http.StatusBadRequest,
			`{"model":"luna","model":"terra"}`:                             http.StatusBadRequest,
			`{"model":"terra","user":"` + strings.Repeat("x", 4000) + `"}`: http.StatusRequestEntityTooLarge,
			`{"user":"` + strings.Repeat("x", 4000) + `","model":"luna"}`:  http.StatusRequestEntityTooLarge,
			`{"mod\u0065l":"luna"}`:                                        http.StatusTooManyRequests,
			`{"model":"terra"}`:                                            http.StatusOK,
			`{}`:                                                           http.StatusOK,
			`{"messages":[{"role":"user","content":"` + strings.Repeat("x", 50) + `"}]}`: http.StatusOK,
		} {
			if got := w.chat(body); got.Status != want {
				t.Errorf("%.60s: got %d %s, want %d", body, got.Status, got.Body, want)
			}
			if want != http.StatusTooManyRequests && want != http.StatusRequestEntityTooLarge && want != http.StatusBadRequest {
				continue
			}
			w.post(bobKey, "/v1/chat/completions", body).WantStatus(t, http.StatusOK)
		}
		r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(lbtest.Gzipped(`{"model":"luna"}`)))
		r.Header.Set("Authorization", "Bearer "+aliceKey)
		r.Header.Set("Content-Encoding", "gzip")
		w.Send(r).WantStatus(t, http.StatusUnsupportedMediaType)
	})
}

func TestALimitOfAModelIsInTheReports(t *testing.T) {
	inBubble(t, "caller alice {\ntokens 1k/day\ntokens 500/day gpt-4o\n}", func(t *testing.T, w *world) {
		w.AllReply(used(60, 40))
		w.ofModel("gpt-4o").WantServed(t, "a")
		w.ofModel("o3").WantServed(t, "a")
		synctest.Wait()
		w.wantUsage(t, aliceKey, status.Caller{Name: "alice", TokensToday: 200, TokensMonth: 200, Limits: []status.CallerLimit{
			{Kind: "tokens", Window: "day", Limit: 1000, Used: 200, Left: 800}, {Kind: "tokens", Window: "day", Model: "gpt-4o", Limit: 500, Used: 100, Left: 400},
		}})
		all := status.Callers(time.Now(), w.Handler.Pool)
		if len(all) != 1 || len(all[0].Limits) != 2 || all[0].Limits[1].Model != "gpt-4o" || all[0].Limits[1].Used != 100 || all[0].LastHour.Requests != 2 {
			t.Errorf("operators see %+v", all)
		}
	})
}

func TestAResetGivesBackTheUseOfModels(t *testing.T) {
	inBubble(t, "caller alice {\nrequests 9/day\nrequests 1/day gpt-4o\n}", func(t *testing.T, w *world) {
		w.ofModel("gpt-4o").WantServed(t, "a")
		w.ofModel("gpt-4o").WantStatus(t, http.StatusTooManyRequests)
		lbtest.LimitersOf(w.Handler.Pool).Reset(time.Now(), "alice")
		w.wantLimits(t, "requests 0 of 9/day\nrequests 0 of 1/day gpt-4o")
		w.ofModel("gpt-4o").WantServed(t, "a")
	})
}

func TestTheUseOfAModelCountsAtAnotherReplica(t *testing.T) {
	hub := lbtest.Unique("hub")
	inBubble(t, "caller alice {\ntokens 1000/hour gpt-4o\n}\nstate hub "+hub, func(t *testing.T, w *world) {
		lbtest.Connect(t, hub)
		other := anotherReplica(t, hub, w.Handler.Pool, "1000/hour gpt-4o")
		time.Sleep(3 * time.Second) // they know each other
		w.AllReply(used(20, 580))
		w.ofModel("gpt-4o").WantServed(t, "a")
		pass(late)
		other.wantUsed(t, 600)
		other.spend(400)
		pass(flush)
		w.ofModel("gpt-4o").WantError(t, http.StatusTooManyRequests, "rate_limit_exceeded")
		w.ofModel("o3").WantServed(t, "a")
	})
}

// TestTheUseOfAModelOutlivesReloadsAndRestarts that add its limit, change it
// and remove it.
func TestTheUseOfAModelOutlivesReloadsAndRestarts(t *testing.T) {
	s := newSite(t)
	const none, high, low = "caller alice { tokens 1k/day }", "caller alice { tokens 250/day gpt-4o }", "caller alice { tokens 150/day gpt-4o }"
	lbtest.Run(t, s.config(block(none)))
	ask := func(options string, want int, used int64) {
		t.Helper()
		s.ask(t, block(options)).WantStatus(t, want)
		lbtest.WaitFor(t, func() bool { return usedToday(s.pool) == used })
	}
	ask(none, 200, 100)
	lbtest.Reload(t, s.config(block(high)))
	ask(high, 200, 200)
	lbtest.Reload(t, s.config(block(none)))
	lbtest.Reload(t, s.config(block(low)))
	ask(low, 200, 300)
	if err := caddy.Stop(); err != nil {
		t.Fatal(err)
	}
	lbtest.Reload(t, s.config(block(low)))
	s.ask(t, block(low)).WantError(t, http.StatusTooManyRequests, "insufficient_quota")
	if err := caddy.Stop(); err != nil {
		t.Fatal(err)
	}
	lbtest.Reload(t, s.config(block(high)))
	ask(high, 200, 400)
	s.ask(t, block(high)).WantError(t, http.StatusTooManyRequests, "insufficient_quota")
}

func TestALimitOfAModelWithoutEffectIsAWarning(t *testing.T) {
	inBubble(t, "caller alice {\nmodels gpt-4o\nrequests 5/day\nrequests 6/hour gpt-4o\nrequests 7/day gpt-4o\nrequests 1/day o3\n}\ncaller bob {\nrequests 1/day luna\n}\ntier batch {\nmodels terra\n}", func(t *testing.T, w *world) {
		for message, want := range map[string]int{
			"caller 'alice': '1/day o3' has no effect, because models does not include 'o3'":          1,
			"caller 'bob': '1/day luna' has no effect, because models does not include 'luna'":        1,
			"caller 'alice': 'requests 6/hour gpt-4o' has no effect, because 5/day is less":           1,
			"caller 'alice': 'requests 7/day gpt-4o' has no effect, because 5/day is less":            1,
			"caller 'alice': 'requests 5/day' has no effect, because 1/day o3 is less":                0,
			"caller 'alice': 'requests 6/hour gpt-4o' has no effect, because 1/day o3 is less":        0,
			"caller 'alice': '6/hour gpt-4o' has no effect, because models does not include 'gpt-4o'": 0,
			"caller 'alice': 'requests 6/hour gpt-4o' has no effect, because 7/day gpt-4o is less":    0,
			"caller 'alice': '7/day gpt-4o then batch' changes no tier, because 'batch' is not less":  0,
		} {
			if got := len(w.Logged(message)); got != want {
				t.Errorf("%q was logged %d times, want %d", message, got, want)
			}
		}
	})
}

func TestALimitOfAModelMayBeInAFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "limits")
	lbtest.WriteFile(t, file, "caller alice {\n\trequests 1/day gpt-4o\n}\n")
	inBubble(t, "caller alice {\nrequests 9/day gpt-4o\nrequests 3/day o3\n}\ncallers_file "+file, func(t *testing.T, w *world) {
		w.ofModel("gpt-4o").WantServed(t, "a")
		w.ofModel("gpt-4o").WantStatus(t, http.StatusTooManyRequests)
		lbtest.WriteFile(t, file, "caller alice {\n\trequests 2/day gpt-4o\n}\n")
		for range 3 {
			time.Sleep(time.Second)
			w.ofModel("o3").WantServed(t, "a")
		}
		w.ofModel("gpt-4o").WantServed(t, "a")
		w.ofModel("gpt-4o").WantStatus(t, http.StatusTooManyRequests)
		w.ofModel("o3").WantStatus(t, http.StatusTooManyRequests)
	})
}
