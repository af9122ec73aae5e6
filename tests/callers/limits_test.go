package callers

import (
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestAnIdleCallersFirstRequestIsAdmittedAndOnlyOneOfFifty(t *testing.T) {
	inBubble(t, "caller alice {\nrequests 1/minute\n}", func(t *testing.T, w *world) {
		var mu sync.Mutex
		statuses := make(map[int]int)
		var wg sync.WaitGroup
		for range 50 {
			wg.Go(func() {
				got := w.chat(`{}`)
				mu.Lock()
				defer mu.Unlock()
				statuses[got.Status]++
			})
		}
		wg.Wait()
		if statuses[200] != 1 || statuses[429] != 49 {
			t.Errorf("got %v, want one 200 and 49 429s", statuses)
		}
		if got := w.post(bobKey, "/v1/chat/completions", `{}`); got.Status != 200 {
			t.Errorf("bob, who has no limit, gets %d", got.Status)
		}
	})
}

func TestALimitBelowAnEstimateWithoutMaxTokensLetsOneRequestThrough(t *testing.T) {
	inBubble(t, "caller alice {\ntokens 100/minute\n}", func(t *testing.T, w *world) {
		w.AllReply(used(30, 40))
		w.chat(prompt(50, "")).WantServed(t, "a")
		w.wantUse(t, 70)
		got := w.chat(prompt(50, ""))
		got.WantError(t, 429, "rate_limit_exceeded")
		w.WantCalls(map[string]int{"a": 1})
	})
}

func TestAReservationCountsTheLargestOutputThatTheAPIObeys(t *testing.T) {
	for body, want := range map[string]int64{
		prompt(50, `"max_tokens":1,"max_completion_tokens":10000,`): 50 + 256, // twice the usual output
		prompt(50, `"max_tokens":1,"max_completion_tokens":100,`):   50 + 100,
		prompt(50, `"max_tokens":10,`):                              50 + 10,
		prompt(50, `"max_tokens":10,"n":4,`):                        50 + 40,
		prompt(50, `"max_output_tokens":1,`):                        50 + 256, // a chat ignores it
		prompt(50, ``):                                              50 + 256,
	} {
		inBubble(t, "caller alice {\ntokens 100k/minute\n}", func(t *testing.T, w *world) {
			release := make(chan struct{})
			w.AllReply(func(rw http.ResponseWriter, r *http.Request) {
				<-release
				used(1, 1)(rw, r)
			})
			done := make(chan struct{})
			go func() { w.chat(body); close(done) }()
			synctest.Wait()
			if got := w.of("alice").Reserved; got != want {
				t.Errorf("%.80s: reserved %d, want %d", body, got, want)
			}
			close(release)
			<-done
			w.wantUse(t, 2)
		})
	}
}

func TestAPictureOfAMegabyteIsNotChargedByItsBytes(t *testing.T) {
	inBubble(t, "caller alice {\ntokens 10k/minute\n}", func(t *testing.T, w *world) {
		body := `{"model":"gpt-4o","messages":[{"content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,` + strings.Repeat("QUJD", 250_000) + `"}}]}]}`
		w.chat(body).WantServed(t, "a")
		if got := w.of("alice").Today; got < 1000 || got > 1100 {
			t.Errorf("a picture without a usage was charged with %d tokens", got)
		}
	})
}

func TestTheMessageHasOpenAIsWords(t *testing.T) {
	inBubble(t, "caller alice {\ntokens 200k/minute\nrequests 1k/hour\n}", func(t *testing.T, w *world) {
		w.AllReply(used(198_000, 200))
		w.chat(`{}`).WantServed(t, "a") // its prompts are longer than they look from now on
		w.AllReply(used(1, 1))
		for range 3 {
			got := w.chat(prompt(4000, ""))
			if got.Status != 429 || !strings.Contains(got.Body, "Rate limit reached for alice on tokens per min (TPM): Limit 200000, Used 198200, Requested ") ||
				!strings.Contains(got.Body, ". Please try again in ") || !strings.Contains(got.Body, `"type":"tokens"`) {
				t.Fatalf("got %d %s", got.Status, got.Body)
			}
			wantHeaders(t, got, "X-Should-Retry", "", "Retry-After", "59", "X-Ratelimit-Limit-Tokens", "200000", "X-Ratelimit-Remaining-Tokens", "1800", "X-Ratelimit-Reset-Tokens", "1m0s",
				"X-Ratelimit-Limit-Requests", "1000", "X-Ratelimit-Remaining-Requests", "999", "X-Ratelimit-Reset-Requests", "1h0m0s")
		}
		w.WantCalls(map[string]int{"a": 1})
	})
}

func TestEachUnitHasOpenAIsName(t *testing.T) {
	for unit, name := range map[string]string{"second": "per second (RPS)", "minute": "per min (RPM)", "hour": "per hour (RPH)"} {
		inBubble(t, "caller alice {\nrequests 1/"+unit+"\n}", func(t *testing.T, w *world) {
			w.chat(`{}`).WantServed(t, "a")
			wait := map[string]string{"second": "1s", "minute": "59s", "hour": "1h0m0s"}[unit]
			got := w.chat(`{}`)
			wantRefused(t, got, "rate_limit_exceeded", "requests", "Rate limit reached for alice on requests "+name+": Limit 1, Used 1, Requested 1. Please try again in "+wait+".")
		})
	}
}

// TestAWaitOfMoreThanAMinuteIsARefusal has limits of each kind. SDKs wait for a
// minute at most and come again, and some clients do so for minutes before they
// fail.
func TestAWaitOfMoreThanAMinuteIsARefusal(t *testing.T) {
	for _, c := range []struct {
		limit       string
		after       time.Duration // since the request that used all of it, which came when the window began
		retry, left string        // what the client is told. retry is empty if it must not come again
	}{
		{"requests 1/second", 0, "1", "1s"},
		{"requests 1/minute", 0, "59", "59s"}, // the longest that each SDK waits
		{"requests 1/minute", 500 * time.Millisecond, "59", "59s"},
		{"requests 1/minute", 40 * time.Second, "20", "20s"},
		{"requests 1/hour", 0, "", "1h0m0s"},
		{"requests 1/hour", 15 * time.Minute, "", "45m0s"},
		{"requests 1/hour", 59*time.Minute + 30*time.Second, "30", "30s"},
		{"tokens 100/minute", 0, "59", "59s"},
		{"tokens 100/minute", 40 * time.Second, "20", "20s"},
		{"tokens 100/hour", 15 * time.Minute, "", "45m0s"},
		{"tokens 100/hour", 59*time.Minute + 30*time.Second, "30", "30s"},
	} {
		inBubble(t, "caller alice {\n"+c.limit+"\n}", func(t *testing.T, w *world) {
			w.AllReply(used(60, 40))
			w.chat(prompt(50, "")).WantServed(t, "a")
			time.Sleep(c.after)
			got := w.chat(prompt(50, ""))
			got.WantError(t, 429, "rate_limit_exceeded")
			if !strings.Contains(got.Body, "Please try again in "+c.left+".") {
				t.Errorf("%s, after %s: got %s, want %s", c.limit, c.after, got.Body, c.left)
			}
			if c.retry == "" {
				wantHeaders(t, got, "X-Should-Retry", "false", "Retry-After", "", "Retry-After-Ms", "")
			} else {
				wantHeaders(t, got, "X-Should-Retry", "", "Retry-After", c.retry)
			}
		})
	}
}

// TestALimitByTheMinuteIsAdmittedAgainAfterAMinute is about any place of the
// request in a part of the window, and an SDK that comes back when it is told
// to, twice.
func TestALimitByTheMinuteIsAdmittedAgainAfterAMinute(t *testing.T) {
	for _, phase := range []time.Duration{0, 69 * time.Millisecond, 1500 * time.Millisecond, 2499 * time.Millisecond} {
		inBubble(t, "caller alice {\nrequests 6/minute\n}", func(t *testing.T, w *world) {
			time.Sleep(phase)
			for range 6 {
				w.chat(`{}`).WantServed(t, "a")
			}
			begun, got := time.Now(), w.chat(`{}`)
			for range 2 {
				if got.Status == 200 {
					break
				}
				wait, err := time.ParseDuration(got.Header.Get("Retry-After") + "s")
				if err != nil || wait > 59*time.Second {
					t.Fatalf("after %s, the wait is %q", phase, got.Header.Get("Retry-After"))
				}
				time.Sleep(wait)
				got = w.chat(`{}`)
			}
			if got.WantServed(t, "a"); time.Since(begun) != time.Minute {
				t.Errorf("after %s, the next one is admitted after %s", phase, time.Since(begun))
			}
		})
	}
}

func TestAQuotaOfADayIsRefusedWithItsEndAndWithoutARetryAfter(t *testing.T) {
	inBubble(t, "caller alice {\nrequests 2/day\n}\ntimezone Europe/Berlin", func(t *testing.T, w *world) {
		for range 2 {
			w.chat(`{}`).WantServed(t, "a")
		}
		got := w.chat(`{}`)
		wantRefused(t, got, "insufficient_quota", "insufficient_quota",
			"You exceeded your quota: alice has used 2 of 2 requests per day, and this request needs 1. The quota begins anew at 2000-01-02T00:00:00+01:00.")
		wantHeaders(t, got, "X-Should-Retry", "false", "Retry-After", "", "Retry-After-Ms", "", "X-Ratelimit-Remaining-Requests", "0")
		time.Sleep(time.Until(time.Date(2000, 1, 1, 23, 0, 0, 0, time.UTC)))
		w.chat(`{}`).WantServed(t, "a")
	})
}

func TestARequestThatAloneExceedsALimitIsTooLarge(t *testing.T) {
	for unit, named := range map[string]string{"minute": "min (TPM)", "month": "month"} {
		inBubble(t, "caller alice {\ntokens 100/"+unit+"\n}", func(t *testing.T, w *world) {
			got := w.chat(prompt(400, ""))
			wantRefused(t, got, "rate_limit_exceeded", "tokens", "Request too large for alice on tokens per "+named+": Limit 100, Requested 400. The input must be reduced in order to run successfully.")
			wantHeaders(t, got, "X-Should-Retry", "false", "Retry-After", "")
			w.wantUse(t, 0)
		})
	}
}

func TestACallerHasAtMostSoManyRequestsAtATime(t *testing.T) {
	inBubble(t, "caller alice {\nmax_requests 2\n}", func(t *testing.T, w *world) {
		release := make(chan struct{})
		w.AllReply(func(rw http.ResponseWriter, r *http.Request) {
			<-release
			used(1, 1)(rw, r)
		})
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() { w.chat(`{}`).WantServed(t, "a") })
		}
		synctest.Wait()
		got := w.chat(`{}`)
		wantRefused(t, got, "rate_limit_exceeded", "requests", "Rate limit reached for alice on requests in progress: Limit 2, Used 2. Please try again in 1s.")
		wantHeaders(t, got, "Retry-After", "1", "Retry-After-Ms", "1000")
		close(release)
		wg.Wait()
		synctest.Wait()
		w.chat(`{}`).WantServed(t, "a")
		w.wantUse(t, 6)
	})
}

// TestAnUploadIsOneOfTheRequestsAtATime has a caller begin uploads and not end
// them. Each would hold up to request_buffers of memory.
func TestAnUploadIsOneOfTheRequestsAtATime(t *testing.T) {
	inBubble(t, "caller alice {\nmax_requests 2\n}", func(t *testing.T, w *world) {
		w.AllReply(used(1, 1))
		send := func(body io.Reader) lbtest.Reply {
			r := w.Request(http.MethodPost, "/v1/chat/completions", body)
			r.Header.Set("Authorization", "Bearer "+aliceKey)
			return w.Send(r)
		}
		long := `{"model":"gpt-4o","messages":"` + strings.Repeat("a", 100<<10) + `"}`
		var wg sync.WaitGroup
		var uploads []*io.PipeWriter
		for range 2 {
			body, upload := io.Pipe()
			uploads = append(uploads, upload)
			wg.Go(func() { send(body).WantServed(t, "a") })
		}
		synctest.Wait()
		for _, body := range []string{long, `{}`} {
			got := send(strings.NewReader(body))
			wantRefused(t, got, "rate_limit_exceeded", "requests", "Rate limit reached for alice on requests in progress: Limit 2, Used 2. Please try again in 1s.")
			wantHeaders(t, got, "Retry-After", "1", "Retry-After-Ms", "1000")
		}
		for _, upload := range uploads {
			io.WriteString(upload, long)
			upload.Close()
		}
		wg.Wait()
		synctest.Wait()
		send(strings.NewReader(long)).WantServed(t, "a")
		body, upload := io.Pipe() // a client that leaves
		upload.CloseWithError(io.ErrUnexpectedEOF)
		send(body)
		synctest.Wait()
		send(strings.NewReader(long)).WantServed(t, "a")
	})
}

func TestACallerThatRetriesAfterA429DoesNotLockItselfOut(t *testing.T) {
	inBubble(t, "caller alice {\nrequests 10/minute\n}", func(t *testing.T, w *world) {
		served := 0
		for begin := time.Now(); time.Since(begin) < 10*time.Minute; time.Sleep(500 * time.Millisecond) { // it ignores Retry-After
			if w.chat(`{}`).Status == 200 {
				served++
			}
		}
		if served < 90 || served > 100 {
			t.Errorf("%d requests were served in ten minutes, want nearly 100", served)
		}
	})
}

func TestACallerMayUseOnlyItsModels(t *testing.T) {
	inBubble(t, "caller alice {\nmodels gpt-4o gpt-4o-mini\n}\ncaller * {\nmodels o3\n}", func(t *testing.T, w *world) {
		w.chat(`{"model":"gpt-4o"}`).WantServed(t, "a")
		for _, c := range []struct {
			body   string
			status int
			code   string
		}{
			{`{"model":"o3"}`, 404, "model_not_found"},
			{`{}`, 400, "missing_required_parameter"},
			{`{"model":"gpt-4o","model":"o3"}`, 400, "missing_required_parameter"},
			{`{"model":"o3","model":"gpt-4o"}`, 400, "missing_required_parameter"},
			{`{"Model":"o3","model":"gpt-4o"}`, 400, "missing_required_parameter"},
		} {
			got := w.chat(c.body)
			got.WantError(t, c.status, c.code)
			if !strings.Contains(got.Body, "Available models: gpt-4o, gpt-4o-mini.") {
				t.Errorf("%s: got %s", c.body, got.Body)
			}
		}
		w.post(bobKey, "/v1/chat/completions", `{"model":"gpt-4o"}`).WantError(t, 404, "model_not_found")
		w.post(aliceKey, "/openai/deployments/o3/chat/completions?api-version=1", `{"model":"gpt-4o"}`).WantError(t, 404, "model_not_found")
		r := w.Request(http.MethodGet, "/v1/models", nil)
		r.Header.Set("Authorization", "Bearer "+aliceKey)
		if got := w.Send(r); strings.Count(got.Body, `"object":"model"`) != 2 || !strings.Contains(got.Body, `"gpt-4o-mini"`) {
			t.Errorf("the list of models is %s", got.Body)
		}
		w.WantCalls(map[string]int{"a": 1})
	})
}

func TestABodyOfUnknownLengthPassesNoLimitOfTokens(t *testing.T) {
	inBubble(t, "caller alice {\ntokens 20k/minute\n}\nrequest_buffers 64KiB", func(t *testing.T, w *world) {
		send := func(key, path, kind, body string) lbtest.Reply {
			r := w.Request(http.MethodPost, path, io.MultiReader(strings.NewReader(body))) // in chunks
			r.Header.Set("Authorization", "Bearer "+key)
			r.Header.Set("Content-Type", kind)
			return w.Send(r)
		}
		const chat, kind = "/v1/chat/completions", "application/json"
		long := `{"model":"gpt-4o","messages":[{"content":"` + strings.Repeat("x", 1<<20) + `"}]}`
		send(aliceKey, chat, kind, long).WantError(t, http.StatusRequestEntityTooLarge, "request_too_large")
		w.wantUse(t, 0)
		send(aliceKey, chat, kind, `{"model":"gpt-4o"}`).WantServed(t, "a")
		send(bobKey, chat, kind, long).WantServed(t, "a")
		form := "--x\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--x\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.mp3\"\r\n\r\n" +
			strings.Repeat("x", 1<<20) + "\r\n--x--\r\n"
		send(aliceKey, "/v1/audio/transcriptions", "multipart/form-data; boundary=x", form).WantServed(t, "a") // an estimate that does not depend on it
	})
}

func TestOnlyItsOwnLimitsAreInTheHeadersOfACallerWithLimits(t *testing.T) {
	inBubble(t, "caller alice {\ntokens 1k/minute\ntokens 10k/day\n}", func(t *testing.T, w *world) {
		w.AllReply(lbtest.Says(200, `{"usage":`+usage(10, 20)+`}`, "X-Ratelimit-Limit-Requests", "5", "X-Ratelimit-Remaining-Tokens", "7", "X-Ratelimit-Renewalperiod-Tokens", "60"))
		got := w.chat(prompt(50, `"max_tokens":100,`)) // the estimate counts until the reply is over
		wantHeaders(t, got, "X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "850", "X-Ratelimit-Reset-Tokens", "1m0s",
			"X-Ratelimit-Limit-Requests", "", "X-Ratelimit-Renewalperiod-Tokens", "")
		got = w.post(bobKey, "/v1/chat/completions", `{}`)
		wantHeaders(t, got, "X-Ratelimit-Limit-Requests", "5", "X-Ratelimit-Remaining-Tokens", "7", "X-Ratelimit-Renewalperiod-Tokens", "60")
	})
}

func TestALimitWithAnotherTierRefusesNothing(t *testing.T) {
	inBubble(t, "caller alice {\ntier batch\nrequests 2/day then nightly\n}\ntier batch\ntier nightly", func(t *testing.T, w *world) {
		w.AllReply(used(1, 1))
		var replacer *caddy.Replacer
		w.Prepares = func(r *http.Request) *http.Request {
			replacer = r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
			return r
		}
		for i, want := range []string{"1", "1", "2", "2"} {
			w.chat(`{}`).WantServed(t, "a")
			synctest.Wait()
			if got := replacer.ReplaceAll("{http.openai_lb.tier}", ""); got != want {
				t.Errorf("request %d has the tier %q, want %q", i+1, got, want)
			}
		}
	})
}
