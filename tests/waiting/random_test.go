package waiting

import (
	"context"
	"math/rand/v2"
	"net/http"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// Two backends that throttle at random, callers of two tiers of which one has a
// limit, and clients that leave: each request is answered in time, with a reply
// or with a 429, and nothing is left in the end.
func TestRandomRequestsWaitNoLongerThanTheyMay(t *testing.T) {
	const web, batch = "sk-web-0123456789ab", "sk-batch-0123456789"
	options := "wait 700ms\nbackend http://a\nbackend http://b {\npriority 2\n}\n" +
		"client_key web " + web + "\nclient_key batch " + batch + "\ncaller web {\ntier interactive\n}\n" +
		"caller batch {\ntier batch\nrequests 8/second\n}\ntier interactive {\nreserve 10%\n}\ntier batch"
	for seed := range uint64(5) {
		inBubbleWith(t, options, func(t *testing.T, w *world) {
			random := rand.New(rand.NewPCG(seed, 3))
			var mu sync.Mutex
			chance := func(n int) int {
				mu.Lock()
				defer mu.Unlock()
				return random.IntN(n)
			}
			const slowest = 200 // ms
			w.AllReply(func(rw http.ResponseWriter, r *http.Request) {
				time.Sleep(time.Duration(chance(slowest)) * time.Millisecond)
				switch chance(4) {
				case 0:
					lbtest.Says(200, `{}`)(rw, r)
				case 1:
					lbtest.Status(500)(rw, r)
				default:
					lbtest.Status(429, "Retry-After-Ms", strconv.Itoa(50+chance(900)))(rw, r)
				}
			})
			for number := range 200 {
				time.Sleep(time.Duration(chance(60)) * time.Millisecond)
				r := w.request(number, []string{web, batch}[chance(2)])
				ctx, leave := r.Context(), context.CancelFunc(func() {})
				if chance(5) == 0 {
					ctx, leave = context.WithTimeout(ctx, time.Duration(chance(900))*time.Millisecond)
				}
				w.wg.Go(func() {
					defer leave()
					begin := time.Now()
					got := w.Send(r.WithContext(ctx))
					switch took := time.Since(begin); {
					case got.Err != nil && ctx.Err() == nil:
						t.Errorf("request %d failed: %v", number, got.Err)
					case got.Err == nil && got.Status != 200 && got.Status != 429 && got.Status != 500:
						t.Errorf("request %d got %d: %s", number, got.Status, got.Body)
					// two attempts before the wait, and two after it
					case took > 700*time.Millisecond+4*slowest*time.Millisecond:
						t.Errorf("request %d took %s", number, took)
					}
				})
			}
			w.wg.Wait()
			time.Sleep(time.Second)
			if got := waits(t, w.Handler.Pool); got != 0 {
				t.Errorf("%v requests wait", got)
			}
			for _, c := range limitsOf(w) {
				if c.InFlight != 0 || c.Reserved != 0 {
					t.Errorf("%s has %d requests in flight and %d tokens reserved", c.Name, c.InFlight, c.Reserved)
				}
			}
		})
	}
}
