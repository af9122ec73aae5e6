package steering

import (
	"context"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// huge costs more than any limit.
const huge = `{"model":"gpt-4o","messages":[],"max_tokens":1000000000000}`

// renewed makes the ratio of the requests known, too.
var renewed = []string{"X-Ratelimit-Renewalperiod-Requests", "60"}

func TestARequestThatWasNotExecutedCostsNothingOfTheQuota(t *testing.T) {
	for name, tc := range map[string]struct {
		reply http.HandlerFunc
		// tokens and requests are which part is left.
		tokens, requests float64
	}{
		"a wrong request":              {lbtest.Status(400), 1, .75},
		"one that is not permitted":    {lbtest.Status(403), 1, .75},
		"a body that is too large":     {lbtest.Status(413), 1, .75},
		"a throttle without a reading": {lbtest.Throttled("1"), 1, .75},
		"a throttle with a reading": {lbtest.Status(429, "X-Ratelimit-Limit-Requests", "60", "X-Ratelimit-Remaining-Requests", "30", "X-Ratelimit-Renewalperiod-Requests", "60",
			"X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "500"), .5, .5},
		"one too large for the limit": {lbtest.Says(429, `{"error":{"message":"Request too large for gpt-4o"}}`), 1, .75},
		"an overload":                 {lbtest.Status(503), 1, .75},
		"no backend":                  {nil, 1, .75},
		"a failure":                   {lbtest.Status(500), 0, .75 - 1./60},
		"a reply":                     {lbtest.Says(200, `{"id":"chatcmpl-1","choices":[]}`), 0, .75 - 1./60},
		"a connection that breaks":    {lbtest.Aborts, 0, .75 - 1./60},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, "a:1", "", func(t *testing.T, w *world) {
				w.learn(map[string]http.HandlerFunc{"a": says(45, 1000, renewed...)})
				if w.Backends["a"].Replies(tc.reply); tc.reply == nil {
					w.Stop("a")
					synctest.Wait() // its connections are closed: nothing is sent by one that is
				}
				w.Post(huge)
				wantLeft(t, w, "tokens", tc.tokens)
				wantLeft(t, w, "requests", tc.requests)
			})
		})
	}
}

func wantLeft(t *testing.T, w *world, kind string, want float64) {
	t.Helper()
	if got := lbtest.SumOf(t, "quota_left_ratio", map[string]string{"pool": w.pool, "backend": "a", "type": kind}); got < want-.001 || got > want+.001 {
		t.Errorf("%v of the %s is left, want %v", got, kind, want)
	}
}

func TestRefusedRequestsTakeNoBackendOutOfUse(t *testing.T) {
	inBubble(t, "a:1 b:1 c:1", "", func(t *testing.T, w *world) {
		for range 30 {
			w.AllReply(says(60, 1000))
			w.Post(chat)
		}
		w.AllReply(lbtest.Status(400))
		for range 2 {
			w.Post(huge)
		}
		w.AllReply(says(60, 1000))
		w.wantAt(chat, "a", "b", "c")
	})
}

func TestAClientThatLeavesBeforeItsRequestIsSentCostsNothing(t *testing.T) {
	inBubble(t, "a:1", "", func(t *testing.T, w *world) {
		w.learn(map[string]http.HandlerFunc{"a": says(45, 1000)})
		w.Stop("a")
		time.Sleep(time.Second) // until its connections are closed
		w.Handler.Sender.HTTP.Transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		ctx, leave := context.WithTimeout(t.Context(), time.Second)
		defer leave()
		w.Send(w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(huge)).WithContext(ctx))
		time.Sleep(time.Second)
		wantLeft(t, w, "tokens", 1)
	})
}

func TestAReadingThatTheRepliesContradictDoesNotCount(t *testing.T) {
	for name, zero := range map[string]http.HandlerFunc{
		"no requests":     says(0, 1000),
		"no tokens":       says(60, 0),
		"too few tokens":  says(60, 7),
		"nothing is left": says(0, 0),
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, "a:1 b:1", "", func(t *testing.T, w *world) {
				w.Backends["a"].Replies(zero)
				w.Backends["b"].Replies(says(1000, 100_000))
				for began := time.Now(); time.Since(began) < 10*time.Minute; time.Sleep(time.Second) {
					w.Post(chat)
				}
				w.wantAt(chat, "a", "b")
				if n := len(w.Backends["a"].Received()); n < 10 {
					t.Errorf("a got %d of 40 requests", n)
				}
				w.Backends["a"].Replies(says(1, 10))
				w.wantAt(chat, "a", "b")
				if n := len(w.Backends["a"].Received()); n != 1 { // the header says something else, and counts again
					t.Errorf("a got %d requests, want 1", n)
				}
			})
		})
	}
}

func TestARefusalConfirmsAReading(t *testing.T) {
	inBubble(t, "a:1 b:1", "", func(t *testing.T, w *world) {
		w.Backends["b"].Replies(says(1000, 100_000))
		got := 0
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			if got++; got%3 == 0 {
				lbtest.Status(429, "Retry-After", "1", "X-Ratelimit-Limit-Requests", "60", "X-Ratelimit-Remaining-Requests", "0")(rw, r)
				return
			}
			says(0, 1000)(rw, r)
		})
		for began := time.Now(); time.Since(began) < 10*time.Minute; time.Sleep(time.Second) {
			w.Post(chat)
		}
		if got > 10*60/10+2 {
			t.Errorf("a got %d requests in 10 minutes although it says every 10 s that none is left, and refuses", got)
		}
	})
}

func TestSlowRepliesSayNothingOfAReadingThatCameLater(t *testing.T) {
	inBubble(t, "a:1 b:1", "", func(t *testing.T, w *world) {
		w.Backends["b"].Replies(says(1000, 100_000))
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			time.Sleep(time.Second)
			says(60, 0)(rw, r)
		})
		for range 30 { // they are sent before the first of them says that nothing is left
			go w.Post(chat)
		}
		time.Sleep(2 * time.Second)
		w.wantAt(chat, "b")
	})
}
