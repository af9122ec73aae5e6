package callers

import (
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// TestRequestsInParallelUseAtMost110PercentOfALimit has a caller that makes its
// estimates low by many short answers, and then asks for 200 long ones at once.
func TestRequestsInParallelUseAtMost110PercentOfALimit(t *testing.T) {
	for _, members := range []string{``, `"max_tokens":16000,`, `"n":4,"max_tokens":4000,`, `"stream":true,`} {
		inBubble(t, "caller alice {\ntokens 60k/minute\n}", func(t *testing.T, w *world) {
			w.AllReply(used(50, 10))
			for range 34 {
				w.chat(prompt(50, `"max_tokens":10,`)).WantServed(t, "a")
			}
			release := make(chan struct{})
			w.AllReply(func(rw http.ResponseWriter, r *http.Request) {
				<-release
				if strings.Contains(members, "stream") {
					lbtest.Streams(lbtest.StreamContent, `data: {"choices":[],"usage":`+usage(50, 16_000)+"}\n\n", lbtest.StreamEnd)(rw, r)
					return
				}
				used(50, 16_000)(rw, r)
			})
			var wg sync.WaitGroup
			var served, refused atomic.Int64
			for range 200 {
				wg.Go(func() {
					switch got := w.chat(prompt(50, members)); {
					case got.Status == 200:
						served.Add(1)
					case got.Status == 429 && got.Header.Get("Retry-After") == "1" && strings.Contains(got.Body, "Rate limit reached for alice on tokens per min (TPM): its requests in progress may use all that is left. Limit 60000, Used "):
						refused.Add(1)
					default:
						t.Errorf("got %d %s", got.Status, got.Body)
					}
				})
			}
			synctest.Wait()
			close(release)
			wg.Wait()
			synctest.Wait()
			if got := w.of("alice").Today; served.Load() < 3 || served.Load()+refused.Load() != 200 || got > 66_000 {
				t.Errorf("%s: %d requests used %d tokens", members, served.Load(), got)
			}
			w.post(bobKey, "/v1/chat/completions", "{}").WantServed(t, "a")
		})
	}
}

// TestARequestWaitsForThoseInFlight has a limit that requests wait for.
func TestARequestWaitsForThoseInFlight(t *testing.T) {
	inBubble(t, "wait 5s\ncaller alice {\ntokens 1k/minute\n}", func(t *testing.T, w *world) {
		w.AllReply(func(rw http.ResponseWriter, r *http.Request) {
			time.Sleep(1500 * time.Millisecond)
			used(50, 10)(rw, r)
		})
		var wg sync.WaitGroup
		begun := time.Now()
		for range 2 {
			wg.Go(func() { w.chat(prompt(50, `"max_tokens":2000,`)).WantServed(t, "a") })
		}
		wg.Wait()
		if took := time.Since(begun); took != 3*time.Second {
			t.Errorf("two requests took %s", took)
		}
	})
}

// TestAStreamCountsWhileItsEventsArrive has events of which each has many
// tokens, and one stream that never says what it has used.
func TestAStreamCountsWhileItsEventsArrive(t *testing.T) {
	inBubble(t, "caller alice {\ntokens 10k/minute\n}", func(t *testing.T, w *world) {
		w.AllReply(lbtest.Streams(lbtest.StreamPreamble, longEvent, longEvent, time.Minute, strings.Repeat(longEvent, 8), time.Minute, lbtest.StreamEnd))
		done := make(chan struct{})
		go func() { w.chat(prompt(50, `"stream":true,"max_tokens":4000,`)); close(done) }()
		synctest.Wait()
		for _, want := range []int64{50 + 500, 50 + 2500} {
			if s := w.of("alice"); s.Today < want || s.Today > want+100 {
				t.Errorf("%d tokens are used, want about %d", s.Today, want)
			}
			time.Sleep(time.Minute + time.Millisecond)
			synctest.Wait()
		}
		<-done
		synctest.Wait()
		w.wantUse(t, 50+2500)
	})
}
