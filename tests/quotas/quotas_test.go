package quotas

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap/zapcore"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/modules/status"
)

func TestABackendOverItsQuotaIsPassedOver(t *testing.T) {
	for name, quota := range map[string]string{
		"requests": "requests 2/minute", "tokens": "tokens 130/minute", "both": "requests 2/minute\ntokens 1M/day",
		"the least counts": "requests 2/minute\nrequests 1000/hour",
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, "", func(t *testing.T, w *world) {
				w.AllReply(used(50, 10))
				for range 2 {
					w.Post(small).WantServed(t, "a")
				}
				w.wantPassedOver("a", 0)
				w.Post(small).WantServed(t, "b")
				w.wantPassedOver("a", 1)
				w.WantNobodyBlamed()
				time.Sleep(time.Minute + 3*time.Second)
				w.Post(small).WantServed(t, "a")
				w.WantCalls(map[string]int{"a": 3, "b": 1})
				over := w.Logged("backend over its quota")
				if len(over) != 1 || over[0].Level != zapcore.DebugLevel || over[0].ContextMap()["backend"] != "a" {
					t.Errorf("the log has %v", over)
				}
			}, quota, "")
		})
	}
}

// TestABackendThatWasNotNeededIsNotPassedOver looks at a backend that was not
// passed over, because a better one served.
func TestABackendThatWasNotNeededIsNotPassedOver(t *testing.T) {
	inBubble(t, "", func(t *testing.T, w *world) {
		w.Backends["a"].Replies(lbtest.Throttled("5"))
		w.Post(small).WantServed(t, "b")
		w.Backends["a"].Recovers()
		time.Sleep(5 * time.Second)
		w.Post(small).WantServed(t, "a")
		w.wantPassedOver("b", 0)
	}, "", "requests 1/hour")
}

func TestAloneOverItsQuotaTheClientIsToldWhenThereIsRoom(t *testing.T) {
	inBubble(t, "", func(t *testing.T, w *world) {
		w.AllReply(used(50, 10))
		w.Post(small).WantServed(t, "a")
		time.Sleep(20 * time.Second)
		got := w.Post(small)
		w.wantOver(got, 40)
		if ms := got.Header.Get("Retry-After-Ms"); ms == "" || !strings.HasPrefix(got.Body, `{"error":{"message":"All backends are rate limited. Please retry after 40 seconds."`) {
			t.Errorf("got %v %s", got.Header, got.Body)
		}
		time.Sleep(40 * time.Second)
		w.Post(small).WantServed(t, "a")
		lbtest.WantSums(t, w.Handler.Pool, `all_throttled_total 1`)
	}, "requests 1/minute")
}

func TestTheClientIsToldTheShortestWaitOfQuotasAndThrottles(t *testing.T) {
	inBubble(t, "", func(t *testing.T, w *world) {
		w.Post(small).WantServed(t, "a")
		time.Sleep(10 * time.Second)
		w.Backends["b"].Replies(lbtest.Throttled("30"))
		w.wantOverButThrottled(w.Post(small), 30)
		time.Sleep(25 * time.Second)
		w.wantOverButThrottled(w.Post(small), 5)
	}, "requests 1/minute", "")
}

// wantOverButThrottled is wantOver where a backend has a cooldown.
func (w *world) wantOverButThrottled(got lbtest.Reply, seconds int) {
	w.t.Helper()
	got.WantError(w.t, 429, "rate_limit_exceeded")
	if wait := got.Header.Get("Retry-After"); wait != fmt.Sprint(seconds) {
		w.t.Errorf("Retry-After is %q, want %d", wait, seconds)
	}
}

func TestTokensAreSettledByWhatTheBackendReports(t *testing.T) {
	for name, reply := range map[string]http.HandlerFunc{
		"whole": used(70, 30),
		"streamed": lbtest.Streams(lbtest.StreamContent,
			"data: {\"choices\":[],\"usage\":"+usage(70, 30)+"}\n\n", lbtest.StreamEnd),
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, "", func(t *testing.T, w *world) {
				w.AllReply(reply)
				w.Post(prompt(50, fmt.Sprintf(`"max_tokens":500,"stream":%v,`, name == "streamed"))).WantStatus(t, 200)
				synctest.Wait()
				w.wantUsed("a", 1, 100)
			}, "tokens 10k/minute\nrequests 100/minute")
		})
	}
}

// TestAStreamIsAskedForItsUsage if the backend has a quota, also in a pool
// whose callers have no names.
func TestAStreamIsAskedForItsUsage(t *testing.T) {
	for quota, want := range map[string]bool{"": false, "tokens 1M/hour": true} {
		inBubble(t, "", func(t *testing.T, w *world) {
			w.PostStream()
			if got := strings.Contains(string(w.Backends["a"].Received()[0].Beginning), "include_usage"); got != want {
				t.Errorf("with the quota %q, the stream is asked for its usage: %v", quota, got)
			}
		}, quota)
	}
}

func TestAStreamIsChargedWhileItGrows(t *testing.T) {
	inBubble(t, "", func(t *testing.T, w *world) {
		pieces := []any{lbtest.StreamContent}
		for range 400 {
			pieces = append(pieces, lbtest.StreamContent)
		}
		w.Backends["a"].Replies(lbtest.Streams(append(pieces, time.Minute, lbtest.StreamEnd)...))
		s := w.Open(t)
		s.Next(t, 300*len(lbtest.StreamContent))
		if got := w.uses("a")[0].Used; got < 200 {
			t.Errorf("%d tokens are used while the stream goes on, want 200 or more", got)
		}
		w.Post(small).WantServed(t, "b")
	}, "tokens 400/minute", "")
}

func TestFailoverChargesEachBackendForWhatItDid(t *testing.T) {
	for name, tc := range map[string]struct {
		a    http.HandlerFunc
		want []int64 // requests, tokens
	}{
		"throttled":       {lbtest.Throttled("5"), []int64{0, 0}},
		"refused":         {lbtest.Status(401), []int64{0, 0}},
		"a server error":  {lbtest.Status(500), []int64{1, 50}},
		"cut in the head": {lbtest.Aborts, []int64{1, 50}},
	} {
		t.Run(name, func(t *testing.T) {
			const quota = "requests 100/minute\ntokens 10k/minute"
			inBubble(t, "", func(t *testing.T, w *world) {
				w.Backends["a"].Replies(tc.a)
				w.Backends["b"].Replies(used(60, 5))
				w.Post(small).WantServed(t, "b")
				synctest.Wait()
				w.wantUsed("a", tc.want...)
				w.wantUsed("b", 1, 65)
			}, quota, quota)
		})
	}
}

func TestARequestThatReachesNoBackendCostsNothing(t *testing.T) {
	inBubble(t, "", func(t *testing.T, w *world) {
		w.Stop("a")
		w.Post(small).WantServed(t, "b")
		w.wantUsed("a", 0)
	}, "requests 100/minute", "")
}

func TestAPromptThatIsLargerThanAQuotaBlocksNobodyElse(t *testing.T) {
	const quota = "tokens 200/minute"
	inBubble(t, "", func(t *testing.T, w *world) {
		w.AllReply(used(50, 10))
		for range 5 {
			w.Post(prompt(500, "")).WantServed(t, "b")
		}
		w.Post(small).WantServed(t, "a")
		w.wantPassedOver("a", 5)
		w.WantNobodyBlamed()
	}, quota, "")
	inBubble(t, "", func(t *testing.T, w *world) {
		got := w.Post(prompt(500, ""))
		got.WantError(t, 429, "rate_limit_exceeded")
		if got.Header.Get("X-Should-Retry") != "false" || got.Header.Get("Retry-After") != "" ||
			!strings.Contains(got.Body, "Limit 200, Requested 500") {
			t.Errorf("got %v %s", got.Header, got.Body)
		}
		w.Post(small).WantServed(t, "a")
	}, quota)
}

func TestRequestsAtOnceDoNotExceedAQuota(t *testing.T) {
	inBubble(t, "", func(t *testing.T, w *world) {
		w.AllReply(func(rw http.ResponseWriter, r *http.Request) {
			time.Sleep(time.Second)
			used(50, 10)(rw, r)
		})
		done := make(chan lbtest.Reply)
		for range 20 {
			go func() { done <- w.Post(small) }()
		}
		for range 20 {
			(<-done).WantServed(t, "a", "b")
		}
		w.WantCalls(map[string]int{"a": 7, "b": 13})
	}, "requests 7/minute", "")
}

// TestOnlyInferenceCounts holds that the balancer's other requests do not use
// up what is meant for inference.
func TestOnlyInferenceCounts(t *testing.T) {
	inBubble(t, "", func(t *testing.T, w *world) {
		for range 3 {
			w.Send(w.Request(http.MethodGet, "/v1/models", nil)).WantStatus(t, 200)
		}
		w.wantUsed("a", 0)
	}, "requests 1/hour")
}

func TestAWaitLastsUntilAQuotaHasRoom(t *testing.T) {
	inBubble(t, "wait 10s", func(t *testing.T, w *world) {
		w.AllReply(used(50, 10))
		w.Post(small).WantServed(t, "a")
		time.Sleep(52 * time.Second)
		begun := time.Now()
		w.Post(small).WantServed(t, "a")
		if waited := time.Since(begun); waited < 7*time.Second || waited > 9*time.Second {
			t.Errorf("the request has waited %s, want 8s", waited)
		}
		time.Sleep(20 * time.Second)
		begun = time.Now()
		w.wantOver(w.Post(small), 40) // a wait of 10 s is too short
		if waited := time.Since(begun); waited > time.Second {
			t.Errorf("the request has waited %s", waited)
		}
	}, "requests 1/minute")
}

// TestAWaitEndsWhenAChargeIsGivenBack has requests that are charged with nearly
// all of a quota, and cost less in the end. It would have room only later.
func TestAWaitEndsWhenAChargeIsGivenBack(t *testing.T) {
	const id, lasts = "resp_0123456789abcdef", 55 * time.Second
	responses := func(w *world, method, path, body string) lbtest.Reply {
		return w.Send(w.Request(method, "/v1/responses"+path, strings.NewReader(body)))
	}
	for name, large := range map[string]func(w *world){
		"a response that is short": func(w *world) {
			w.Backends["a"].Replies(after(lasts, used(50, 10)))
			w.Post(prompt(50, `"max_tokens":940,`))
		},
		"an account that lacks an object": func(w *world) {
			w.Backends["a"].Replies(after(lasts, lbtest.Says(400, `{"error":{"message":"Previous response with id '`+id+`' not found.","type":"invalid_request_error","param":"previous_response_id","code":"previous_response_not_found"}}`)))
			responses(w, http.MethodPost, "", prompt(50, `"max_output_tokens":940,"previous_response_id":"`+id+`",`))
		},
		"a response in the background": func(w *world) {
			queued := `{"id":"` + id + `","object":"response","status":"queued","background":true,"usage":null}`
			w.Backends["a"].Replies(lbtest.Says(200, queued))
			responses(w, http.MethodPost, "", prompt(50, `"background":true,"max_output_tokens":940,`))
			time.Sleep(lasts)
			w.Backends["a"].Replies(lbtest.Says(200, strings.Replace(queued, "null", `{"input_tokens":50,"output_tokens":10}`, 1)))
			responses(w, http.MethodGet, "/"+id, "")
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, "wait 10s", func(t *testing.T, w *world) {
				begun := time.Now()
				go large(w)
				time.Sleep(53*time.Second + 400*time.Millisecond)
				w.Backends["a"].Recovers()
				w.Post(small).WantServed(t, "a")
				if took := time.Since(begun); took < lasts || took > lasts+100*time.Millisecond {
					t.Errorf("the request was sent after %s, want %s", took, lasts)
				}
			}, "tokens 1000/minute", "tokens 10/minute")
		})
	}
}

func TestASessionMovesFromABackendOverItsQuotaAndStays(t *testing.T) {
	config := "openai_lb {\npool " + lbtest.Unique("quotas") + "\n"
	for _, name := range []string{"a", "b", "c"} {
		config += "backend http://" + name + " {\nname " + name + "\nrequests 3/minute\n}\n"
	}
	lbtest.InBubble(t, config+"}", func(t *testing.T, bare *lbtest.World) {
		w, session := &world{bare, t}, strings.Repeat("session 1234 ", 320)
		body := `{"model":"gpt-4o","messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"` + session + `"}]}`
		home := w.Post(body).Backend
		for range 2 {
			w.Post(body).WantServed(t, home)
		}
		moved := w.Post(body).Backend
		if moved == home {
			t.Fatalf("the session stays at %s, which is over its quota", home)
		}
		w.Post(body).WantServed(t, moved)
		time.Sleep(2 * time.Minute)
		w.Post(body).WantServed(t, moved) // its cache has the prompt now
		w.WantNobodyBlamed()
	})
}

func TestAnObjectsOwnerOverItsQuotaIsNotReplaced(t *testing.T) {
	inBubble(t, "", func(t *testing.T, w *world) {
		w.AllReply(lbtest.Says(200, `{"id":"resp_0123456789abcdef","object":"response","status":"completed","output":[],"usage":{"input_tokens":5,"output_tokens":5}}`))
		post := func(body string) lbtest.Reply {
			return w.Send(w.Request(http.MethodPost, "/v1/responses", strings.NewReader(body)))
		}
		post(`{"model":"gpt-4o","input":"hello"}`).WantServed(t, "a")
		got := post(`{"model":"gpt-4o","input":"go on","previous_response_id":"resp_0123456789abcdef"}`)
		w.wantOver(got, 59)
		if !strings.Contains(got.Body, "The account that stores the response 'resp_0123456789abcdef' is rate limited") {
			t.Errorf("got %s", got.Body)
		}
		w.WantCalls(map[string]int{"a": 1, "b": 0})
		post(`{"model":"gpt-4o","input":"hello"}`).WantServed(t, "b")
	}, "requests 1/hour", "")
}

// TestATierWithAReserveIsPassedOverToo because a reserve is about the limits
// that a backend names, and a quota comes before.
func TestATierWithAReserveIsPassedOverToo(t *testing.T) {
	inBubble(t, "client_key alice "+aliceKey+"\ncaller alice {\ntier gold\n}\ntier gold {\nreserve 50%\n}\ntier rest", func(t *testing.T, w *world) {
		post := func() lbtest.Reply {
			r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(small))
			r.Header.Set("Authorization", "Bearer "+aliceKey)
			return w.Send(r)
		}
		post().WantServed(t, "a")
		post().WantServed(t, "b")
		w.wantPassedOver("a", 1)
	}, "requests 1/hour", "")
}

func TestADrainedBackendServesWhatIsOverTheQuotaOfTheOthers(t *testing.T) {
	inBubble(t, "", func(t *testing.T, w *world) {
		w.Post(small).WantServed(t, "a")
		w.Post(small).WantServed(t, "b")
	}, "requests 1/hour", "weight 0")
}

func TestAResponseInTheBackgroundIsSettledLater(t *testing.T) {
	inBubble(t, "", func(t *testing.T, w *world) {
		const id = "resp_0123456789abcdef"
		queued := `{"id":"` + id + `","object":"response","status":"queued","background":true,"usage":null}`
		w.AllReply(lbtest.Says(200, queued))
		w.Send(w.Request(http.MethodPost, "/v1/responses", strings.NewReader(prompt(50, `"background":true,"max_output_tokens":4000,`)))).WantStatus(t, 200)
		synctest.Wait()
		w.wantUsed("a", 4050)
		w.AllReply(lbtest.Says(200, strings.Replace(queued, "null", `{"input_tokens":70,"output_tokens":10}`, 1)))
		w.Send(w.Request(http.MethodGet, "/v1/responses/"+id, nil)).WantStatus(t, 200)
		synctest.Wait()
		w.wantUsed("a", 80)
	}, "tokens 100k/hour")
}

func TestBackendsOfOneKeyShareAQuota(t *testing.T) {
	config := "openai_lb {\npool " + lbtest.Unique("quotas") + "\n"
	for i, model := range []string{"gpt-4o", "gpt-5"} {
		config += fmt.Sprintf("backend http://a {\nname a%d\nmodel %s\nrequests 1/hour\n}\n", i, model)
	}
	lbtest.InBubble(t, config+"}", func(t *testing.T, w *lbtest.World) {
		w.Post(small).WantStatus(t, 200)
		w.Post(strings.Replace(small, "gpt-4o", "gpt-5", 1)).WantStatus(t, 429)
	})
}

func TestOperatorsSeeTheUseOfAQuota(t *testing.T) {
	inBubble(t, "", func(t *testing.T, w *world) {
		for range 3 {
			w.Post(small).WantStatus(t, 200)
		}
		for _, b := range status.Backends(time.Now(), func(pool string) bool { return pool == w.Handler.Pool }) {
			ends := time.Now().UTC().Truncate(time.Hour).Add(time.Hour)
			want := []status.Quota{{Kind: "requests", Window: "hour", Limit: 2, Used: 2, PassedOver: 1, Ends: ends}}
			if b.Name == "b" {
				want = nil
			}
			if fmt.Sprint(b.Quotas) != fmt.Sprint(want) || b.State != status.Available {
				t.Errorf("%s is %s with the quotas %v, want %v", b.Name, b.State, b.Quotas, want)
			}
		}
	}, "requests 2/hour", "")
}

// TestAQuotaThatIsUsedUpForLongIsAProblem unlike one that gets room back bit by
// bit.
func TestAQuotaThatIsUsedUpForLongIsAProblem(t *testing.T) {
	for quota, want := range map[string]string{
		"requests 1/minute":                 "",
		"requests 1/hour":                   "",
		"requests 2/day":                    "",
		"tokens 60/day":                     "a has used up its quota: 60 tokens per day, until 2000-01-02T00:00:00Z",
		"tokens 1k/month":                   "",
		"requests 1/minute\nrequests 1/day": "a has used up its quota: 1 requests per day, until 2000-01-02T00:00:00Z",
	} {
		t.Run(quota, func(t *testing.T) {
			inBubble(t, "", func(t *testing.T, w *world) {
				w.AllReply(used(50, 10))
				problems := func() (text string) {
					for _, p := range status.Pools(time.Now(), nil) {
						if p.Name != w.Handler.Pool {
							continue
						}
						for _, its := range p.Problems(time.Now(), nil, nil) {
							text += its.Backend + " " + its.Meaning
							if its.Class != status.OverQuota || its.NeedsOperator || !strings.HasSuffix(its.RunbookURL, "#a-backend-has-used-up-its-quota") {
								t.Errorf("the problem is %+v", its)
							}
						}
					}
					return text
				}
				if got := problems(); got != "" {
					t.Errorf("before the first request, %q is a problem", got)
				}
				w.Post(small).WantServed(t, "a")
				if got := problems(); got != want {
					t.Errorf("got %q, want %q", got, want)
				}
				time.Sleep(24 * time.Hour)
				if got := problems(); got != "" {
					t.Errorf("a day later, %q is a problem", got)
				}
			}, quota, "")
		})
	}
}

func TestTheUseOfAQuotaIsAMetric(t *testing.T) {
	inBubble(t, "", func(t *testing.T, w *world) {
		w.AllReply(used(50, 10))
		w.Post(small).WantServed(t, "a")
		lbtest.WantSums(t, w.Handler.Pool, "backend_quota_used_ratio backend=a kind=requests window=hour 0.5",
			"backend_quota_used_ratio backend=a kind=tokens window=day 0.06", "backend_quota_used_ratio backend=b 0")
	}, "requests 2/hour\ntokens 1k/day", "")
}

func TestABackendWhoseQuotaIsTooSmallDoesNotShortenTheWait(t *testing.T) {
	inBubble(t, "", func(t *testing.T, w *world) {
		w.Backends["b"].Replies(lbtest.Throttled("30"))
		w.Post(prompt(500, "")).WantStatus(t, 429)
		time.Sleep(10 * time.Second)
		w.wantOverButThrottled(w.Post(prompt(500, "")), 20)
	}, "tokens 200/minute", "")
	inBubble(t, "", func(t *testing.T, w *world) {
		w.AllReply(used(50, 10))
		w.Post(prompt(500, "")).WantServed(t, "b")
		time.Sleep(10 * time.Second)
		w.wantOverButThrottled(w.Post(prompt(500, "")), 50)
	}, "tokens 200/minute", "requests 1/minute")
}

func TestAnAccountThatLacksAnObjectIsChargedWithOneRequest(t *testing.T) {
	const quota = "requests 100/minute\ntokens 10k/minute"
	inBubble(t, "", func(t *testing.T, w *world) {
		w.Backends["a"].Replies(lbtest.Says(400, `{"error":{"message":"Previous response with id 'resp_0123456789abcdef' not found.","type":"invalid_request_error","param":"previous_response_id","code":"previous_response_not_found"}}`))
		w.Backends["b"].Replies(lbtest.Says(200, `{"id":"resp_1123456789abcdef","object":"response","status":"completed","output":[],"usage":{"input_tokens":60,"output_tokens":5}}`))
		w.Send(w.Request(http.MethodPost, "/v1/responses", strings.NewReader(prompt(50, `"previous_response_id":"resp_0123456789abcdef",`)))).WantServed(t, "b")
		synctest.Wait()
		w.wantUsed("a", 1, 0)
		w.wantUsed("b", 1, 65)
	}, quota, quota)
}

// TestABackendOverItsQuotaIsNoReasonToLeaveTheOther looks at a path that the
// other backend has lacked: it is asked again, as while this one throttles.
func TestABackendOverItsQuotaIsNoReasonToLeaveTheOther(t *testing.T) {
	for name, tc := range map[string]struct{ quota, body string }{
		"used up":   {"requests 1/hour", small},
		"too small": {"tokens 200/hour", prompt(500, `"max_tokens":10,`)},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, "", func(t *testing.T, w *world) {
				w.Backends["a"].Replies(lbtest.Says(404, `{"detail":"Not Found"}`))
				w.Post(small).WantServed(t, "b")
				w.Backends["a"].Recovers()
				w.Post(tc.body).WantServed(t, "a")
			}, "", tc.quota)
		})
	}
}
