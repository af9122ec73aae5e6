package callers

import (
	"net/http"
	"testing"
	"testing/synctest"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestMetricsSayWhichLimitsAreUsedAndRefuse(t *testing.T) {
	inBubble(t, "caller alice {\ntokens 400/minute\ntokens 1k/day\nrequests 10/hour\nmax_requests 1\n}\ncaller bob {\nrequests 1/day\n}", func(t *testing.T, w *world) {
		pool := w.Handler.Pool
		w.AllReply(used(60, 40))
		w.chat(prompt(20, `"max_tokens":1,`)).WantServed(t, "a")
		synctest.Wait()
		lbtest.WantSums(t, pool, "caller_limit_used_ratio caller=alice kind=tokens window=minute 0.25", "caller_limit_used_ratio caller=alice kind=tokens window=day 0.1",
			"caller_limit_used_ratio caller=alice kind=requests window=hour 0.1", "caller_limit_used_ratio caller=bob 0", "caller_limited_total 0", "caller_estimate_ratio caller=alice 0.21")

		w.chat(prompt(500, "")).WantError(t, 429, "rate_limit_exceeded")
		release := make(chan struct{})
		w.AllReply(func(rw http.ResponseWriter, r *http.Request) {
			<-release
			used(60, 40)(rw, r)
		})
		served := make(chan struct{})
		go func() {
			w.chat(prompt(20, `"max_tokens":1,`))
			close(served)
		}()
		synctest.Wait()
		w.chat(prompt(20, `"max_tokens":1,`)).WantError(t, 429, "rate_limit_exceeded")
		close(release)
		<-served
		w.AllReply(used(200, 100))
		w.chat(prompt(20, `"max_tokens":1,`)).WantServed(t, "a")
		w.chat(prompt(20, `"max_tokens":1,`)).WantError(t, 429, "rate_limit_exceeded")
		for _, want := range []int{200, 429, 429} {
			w.post(bobKey, "/v1/chat/completions", `{}`).WantStatus(t, want)
		}
		synctest.Wait()
		lbtest.WantSums(t, pool, "caller_limited_total caller=alice 3", "caller_limited_total caller=alice kind=tokens window=minute 2",
			"caller_limited_total caller=alice kind=max_requests window= 1", "caller_limited_total caller=bob kind=requests window=day 2", "caller_limit_used_ratio caller=bob kind=requests window=day 1",
			"requests_total class=caller_limited 5")
	})
}

func TestMetricsCountTheRequestsThatALimitGivesAnotherTier(t *testing.T) {
	inBubble(t, "caller alice {\nrequests 1/day then batch\nrequests 2/month then nightly\nrequests 4/minute\n}\ntier batch\ntier nightly", func(t *testing.T, w *world) {
		for range 4 {
			w.chat(prompt(20, "")).WantServed(t, "a")
		}
		w.chat(prompt(20, "")).WantError(t, 429, "rate_limit_exceeded")
		synctest.Wait()
		lbtest.WantSums(t, w.Handler.Pool, "caller_demoted_total 5", "caller_demoted_total caller=alice kind=requests window=day 3",
			"caller_demoted_total caller=alice kind=requests window=month 2", "caller_limited_total 1")
	})
}

func TestTheEstimatesOfACallerApproachWhatItsRequestsCost(t *testing.T) {
	inBubble(t, "caller * {\ntokens 1G/day\n}", func(t *testing.T, w *world) {
		w.AllReply(used(100, 50))
		for range 40 {
			w.chat(prompt(50, `"max_tokens":50,`)).WantServed(t, "a")
		}
		synctest.Wait()
		got := lbtest.SumOf(t, "caller_estimate_ratio", map[string]string{"pool": w.Handler.Pool, "caller": "alice"})
		if got < .9 || got > 1.1 {
			t.Errorf("the ratio is %v, want about 1", got)
		}
		w.AllReply(lbtest.Status(500))
		w.chat(prompt(50, ""))
		synctest.Wait()
		if after := lbtest.SumOf(t, "caller_estimate_ratio", map[string]string{"pool": w.Handler.Pool, "caller": "alice"}); after != got {
			t.Errorf("after a request without a cost, the ratio is %v instead of %v", after, got)
		}
	})
}
