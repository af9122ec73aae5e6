// Package quotas tests the options requests and tokens of a backend: what a
// backend gets, and where the other requests go.
package quotas

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

func TestMain(m *testing.M) { lbtest.Main(m) }

const aliceKey = "sk-alice-0123456789"

// world is a balancer with the backends a, b and so on.
type world struct {
	*lbtest.World
	t *testing.T
}

// inBubble runs a test with backends that have these quotas, each with the next
// priority, and with these options. An empty quota is none.
func inBubble(t *testing.T, options string, test func(t *testing.T, w *world), quotas ...string) {
	t.Helper()
	config := "openai_lb {\npool " + lbtest.Unique("quotas") + "\n" + options + "\n"
	for i, quota := range quotas {
		config += fmt.Sprintf("backend http://%c {\nname %[1]c\npriority %d\n%s\n}\n", 'a'+i, i+1, quota)
	}
	lbtest.InBubble(t, config+"}", func(t *testing.T, w *lbtest.World) {
		time.Sleep(time.Until(time.Now().Truncate(time.Hour).Add(time.Hour))) // windows begin here
		test(t, &world{w, t})
	})
}

// uses returns the use of a backend's quotas, as operators see it.
func (w *world) uses(backend string) []ratelimit.Use {
	for _, m := range lbtest.EntryOf(w.Handler.Pool).Pool.Members {
		if m.Name == backend {
			return lbtest.EntryOf(w.Handler.Pool).Quota(m, time.Now())
		}
	}
	return nil
}

// wantUsed checks how much of each quota of a backend is used.
func (w *world) wantUsed(backend string, want ...int64) {
	w.t.Helper()
	var got []int64
	for _, u := range w.uses(backend) {
		got = append(got, u.Used)
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		w.t.Errorf("the use of %s is %d, want %d", backend, got, want)
	}
}

// wantPassedOver checks for how many requests a backend was passed over.
func (w *world) wantPassedOver(backend string, want float64) {
	w.t.Helper()
	if got := lbtest.SumOf(w.t, "quota_passed_over_total", map[string]string{"pool": w.Handler.Pool, "backend": backend}); got != want {
		w.t.Errorf("%s was passed over for %v requests, want %v", backend, got, want)
	}
}

// wantOver checks for the 429 while all backends are over their quotas.
func (w *world) wantOver(got lbtest.Reply, seconds int) {
	w.t.Helper()
	got.WantError(w.t, http.StatusTooManyRequests, "rate_limit_exceeded")
	if wait := got.Header.Get("Retry-After"); wait != strconv.Itoa(seconds) {
		w.t.Errorf("Retry-After is %q, want %d", wait, seconds)
	}
	w.WantNobodyBlamed()
}

// used answers with a chat completion that used these tokens.
func used(prompt, output int) http.HandlerFunc {
	return lbtest.Says(200, `{"id":"chatcmpl-1","choices":[],"usage":`+usage(prompt, output)+`}`)
}

// after gives a reply later.
func after(wait time.Duration, reply http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(wait)
		reply(w, r)
	}
}

func usage(prompt, output int) string {
	return fmt.Sprintf(`{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}`, prompt, output, prompt+output)
}

// prompt returns a chat that is as long as so many tokens, and has these
// further members.
func prompt(tokens int, members string) string {
	body := `{"model":"gpt-4o",` + members + `"messages":[{"role":"user","content":""}]}`
	return strings.Replace(body, `""`, `"`+strings.Repeat("x", 4*tokens-len(body))+`"`, 1)
}

// small is a chat of 50 tokens, and of 10 more at most.
var small = prompt(50, `"max_tokens":10,`)
