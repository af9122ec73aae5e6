package waiting

import (
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// refillingLimit is a limit of tokens per minute that refills continuously, as
// OpenAI's does.
type refillingLimit struct {
	mu          sync.Mutex
	limit, left float64
	at          time.Time
	calls       int
}

func (b *refillingLimit) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	text, _ := io.ReadAll(r.Body)
	cost := float64(len(text)) / 4
	b.mu.Lock()
	b.calls++
	now := time.Now()
	rate := b.limit / 60
	if !b.at.IsZero() {
		b.left = min(b.limit, b.left+now.Sub(b.at).Seconds()*rate)
	}
	b.at = now
	ok := b.left >= cost
	missing := cost - b.left
	if ok {
		b.left -= cost
	}
	left := b.left
	b.mu.Unlock()
	h := []string{
		"X-Ratelimit-Limit-Tokens", strconv.Itoa(int(b.limit)), "X-Ratelimit-Remaining-Tokens", strconv.Itoa(int(left)),
		"X-Ratelimit-Reset-Tokens", fmt.Sprintf("%.3fs", (b.limit-left)/rate),
	}
	if !ok {
		lbtest.Status(429, append(h, "Retry-After-Ms", strconv.Itoa(int(missing/rate*1000)+1))...)(rw, r)
		return
	}
	lbtest.Says(200, `{}`, h...)(rw, r)
}

func promptOf(tokens int) string {
	return `{"model":"gpt-4o","messages":[{"role":"user","content":"` + strings.Repeat("x", 4*tokens) + `"}]}`
}

// TestSmallRequestsAreNotKeptBackByALargeOne that has gone: the backend accepts
// small ones again after a fraction of a second.
func TestSmallRequestsAreNotKeptBackByALargeOne(t *testing.T) {
	served := map[string]int{}
	sent := 0
	for _, options := range []string{"", "\nwait 2s"} {
		sent = 0
		inBubbleWith(t, "backend http://a"+options, func(t *testing.T, w *world) {
			b := &refillingLimit{limit: 60000, left: 10000}
			w.Serve("a:80", b)
			w.Post(promptOf(1000)) // the balancer knows the limit
			var mu sync.Mutex
			w.wg.Go(func() {
				begin := time.Now()
				got := w.Post(promptOf(10000)) // 9,000 are left
				t.Logf("%q: large got %d after %s", options, got.Status, time.Since(begin))
			})
			for range 100 { // 10 s: 50 tokens each 100 ms is half of what the backend has
				time.Sleep(100 * time.Millisecond)
				sent++
				w.wg.Go(func() {
					if w.Post(promptOf(50)).Status == 200 {
						mu.Lock()
						served[options]++
						mu.Unlock()
					}
				})
			}
			w.wg.Wait()
			t.Logf("%q: %d calls", options, b.calls)
		})
	}
	t.Logf("of %d, %v", sent, served)
	if served["\nwait 2s"] < served[""] {
		t.Errorf("with wait, %d of %d small requests are served, without it %d", served["\nwait 2s"], sent, served[""])
	}
}
