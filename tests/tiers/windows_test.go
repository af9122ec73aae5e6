package tiers

import (
	"fmt"
	"io"
	"math"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/simulator"
)

// window is a limit with windows, as large as a limit by the minute of 525,000
// tokens.
type window struct {
	kind   string
	length time.Duration
	// reset spells the time until the next window. If it is nil, replies have
	// no fields of limits. If it returns "", they have no reset.
	reset func(left time.Duration) string

	// slides reports whether what is used comes back after the length, and not
	// when a window ends.
	slides bool

	mu    sync.Mutex
	end   time.Time
	used  int
	times []time.Time // of what is used, if windows slide
}

func (b *window) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	const each = promptTokens + outputTokens
	most := 525_000 / each * int(b.length) / int(time.Minute)
	b.mu.Lock()
	now := time.Now()
	if !now.Before(b.end) {
		b.end, b.used = now.Truncate(b.length).Add(b.length), 0
	}
	if b.slides {
		for len(b.times) > 0 && !now.Before(b.times[0].Add(b.length)) {
			b.times = b.times[1:]
		}
		b.used = len(b.times)
	}
	isFull := b.used >= most
	if !isFull {
		b.used++
		b.times = append(b.times, now)
	}
	left, wait := most-b.used, b.end.Sub(now)
	if b.slides {
		wait = b.times[0].Add(b.length).Sub(now)
	}
	b.mu.Unlock()
	h, unit := w.Header(), 1
	if b.kind == "Tokens" {
		unit = each
	}
	if b.reset != nil {
		h.Set("X-Ratelimit-Limit-"+b.kind, strconv.Itoa(525_000/each*unit))
		h.Set("X-Ratelimit-Remaining-"+b.kind, strconv.Itoa(left*unit))
		if reset := b.reset(wait); reset != "" {
			h.Set("X-Ratelimit-Reset-"+b.kind, reset)
		}
	}
	if isFull {
		h.Set("Retry-After-Ms", strconv.Itoa(int(math.Ceil(float64(wait)/1e6))))
		lbtest.Says(http.StatusTooManyRequests, `{"error":{"message":"Rate limit reached.","type":"tokens","code":"rate_limit_exceeded"}}`)(w, r)
		return
	}
	time.Sleep(300 * time.Millisecond)
	lbtest.Says(http.StatusOK, fmt.Sprintf(`{"id":"chatcmpl-1","object":"chat.completion","choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}`, promptTokens, outputTokens, each))(w, r)
}

// windows are backends by the fields that their replies have.
var windows = map[string]func() http.Handler{
	"tokens, no reset":     func() http.Handler { return &window{kind: "Tokens", length: time.Minute, reset: nothing} },
	"tokens, a reset of 0": func() http.Handler { return &window{kind: "Tokens", length: time.Minute, reset: zero} }, // Azure's
	"tokens, a duration":   func() http.Handler { return &window{kind: "Tokens", length: time.Minute, reset: duration} },
	"tokens, always 60":    func() http.Handler { return &window{kind: "Tokens", length: time.Minute, reset: always60} },
	"tokens that slide, always 60": func() http.Handler {
		return &window{kind: "Tokens", length: time.Minute, reset: always60, slides: true}
	},
	"tokens that slide, a reset of 0": func() http.Handler { return &window{kind: "Tokens", length: time.Minute, reset: zero, slides: true} },
	"requests, no reset":              func() http.Handler { return &window{kind: "Requests", length: time.Minute, reset: nothing} },
	"requests, seconds":               func() http.Handler { return &window{kind: "Requests", length: time.Minute, reset: seconds} },
	"requests, a duration":            func() http.Handler { return &window{kind: "Requests", length: time.Minute, reset: duration} },
	"requests of 10 s, a reset of 0":  func() http.Handler { return &window{kind: "Requests", length: 10 * time.Second, reset: zero} }, // Azure's
	"no fields":                       func() http.Handler { return &window{length: time.Minute} },
}

func nothing(time.Duration) string       { return "" }
func zero(time.Duration) string          { return "0" }
func always60(time.Duration) string      { return "60" }
func seconds(left time.Duration) string  { return strconv.Itoa(int(math.Ceil(left.Seconds()))) }
func duration(left time.Duration) string { return left.Round(time.Millisecond).String() }

// TestTiersShareWindowsWhateverTheirFieldsSay has three demands: a tier that
// asks for less than its share while the others ask for more than there is,
// half of what there is, and a tier that uses what a better one leaves.
func TestTiersShareWindowsWhateverTheirFieldsSay(t *testing.T) {
	if lbtest.Race {
		t.Skip("it sends thousands of requests, one after the other")
	}
	for name := range windows {
		backends := []simulator.Handler{{Name: name, TokensPerMinute: 525_000}}
		got := ask(t, backends, 9*time.Minute, steadily(.4, 1.5, 1.5))
		gold := between(got["gold"], 180, 540)
		refused := 1 - gold.served/gold.sent
		second := between(got["gold"], 60, 120)
		got = ask(t, backends, 4*time.Minute, steadily(.05, .05, .4))
		half := between(got["bronze"], 120, 240)
		got = ask(t, backends, 4*time.Minute, steadily(.2, 0, 1.5))
		used := between(got["gold"], 120, 240).served + between(got["bronze"], 120, 240).served
		t.Logf("%s: of gold, within its share, %.4f is refused; at half of the demand, bronze gets %.3f of %.3f; of a fifth and all, %.3f is used", name, refused, half.served, half.sent, used)
		most := .015
		if strings.Contains(name, "slide") { // a burst comes back as one
			most = .08
		}
		if refused > most || half.served < half.sent || used < .93 {
			t.Errorf("%s: of gold, within its share, %.4f is refused, want %.3f at most; at half of the demand, bronze gets %.3f of %.3f; of a fifth and all, %.3f is used, want .93", name, refused, most, half.served, half.sent, used)
		}
		// the reading after the first window shows when the second one began
		if isKnown := strings.HasPrefix(name, "tokens,") && !strings.HasSuffix(name, "60"); isKnown && second.served < .95*second.sent {
			t.Errorf("%s: in the second minute, gold gets %.3f of %.3f", name, second.served, second.sent)
		}
	}
}
