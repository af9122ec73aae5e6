package waiting

import (
	"net/http"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

const twoShares = "client_key gold sk-gold-0123456789ab\nclient_key bronze sk-bronze-0123456789\ncaller gold {\ntier gold\n}\ncaller bronze {\ntier bronze\n}\n" +
	"tier gold {\nreserve 50%\n}\ntier bronze {\nreserve 50%\n}"

// TestANewRequestOfAWorseTierDoesNotOvertake begins with cooldowns of both
// backends. gold is beyond its share of a, whose cooldown stays in force, and
// within its share of b.
func TestANewRequestOfAWorseTierDoesNotOvertake(t *testing.T) {
	const gold, bronze = "sk-gold-0123456789ab", "sk-bronze-0123456789"
	inBubbleWith(t, "wait 2s\nbackend http://a\nbackend http://b {\npriority 2\n}\n"+twoShares, func(t *testing.T, w *world) {
		minute := []string{"X-Ratelimit-Limit-Tokens", "1000000", "X-Ratelimit-Remaining-Tokens", "999000"}
		ok := func(rw http.ResponseWriter, r *http.Request) {
			time.Sleep(200 * time.Millisecond)
			lbtest.Says(200, `{"id":"chatcmpl-1","usage":{"prompt_tokens":10,"completion_tokens":10,"total_tokens":20}}`, minute...)(rw, r)
		}
		w.throttle("a", 4*time.Second)
		w.Backends["b"].Replies(ok)
		for range 12 {
			w.Send(w.request(-1, bronze)).WantServed(t, "b") // b gave to bronze
		}
		time.Sleep(6 * time.Second)
		w.Backends["a"].Replies(lbtest.Says(200, `{"id":"chatcmpl-1"}`))
		for range 5 {
			w.Send(w.request(-2, gold)).WantServed(t, "a") // a gave to gold
		}
		w.Send(w.request(-1, bronze))
		until := time.Now().Add(1500 * time.Millisecond)
		w.Backends["a"].Replies(lbtest.Status(429, "Retry-After-Ms", "60000"))
		w.Backends["b"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			if left := time.Until(until); left > 0 {
				lbtest.Status(429, "Retry-After-Ms", strconv.FormatInt(left.Milliseconds(), 10))(rw, r)
				return
			}
			ok(rw, r)
		})
		w.Backends["b"].Forget()
		served := func(got lbtest.Reply, took time.Duration) {
			if got.Status != http.StatusOK {
				t.Errorf("got %d after %s", got.Status, took)
			}
		}
		for number := range 6 { // they wait
			w.ask(number, gold, served)
			time.Sleep(time.Millisecond)
		}
		time.Sleep(time.Until(until) + 5*time.Millisecond)
		for number := range 6 { // they come after the cooldown
			w.ask(100+number, bronze, served)
			time.Sleep(5 * time.Millisecond)
		}
		w.wg.Wait()
		got := w.numbers("b")
		if begin := slices.IndexFunc(got, func(n int) bool { return n >= 100 }); begin != 7 || len(got) != 13 {
			t.Errorf("b got %v, want all of gold's first", got)
		}
	})
}
