// Package limits counts the requests and tokens of a deployment, and admits a
// request or returns a [Refusal]. A [Style] makes a 429 of that, with the hints
// in its headers and one of the bodies that providers send.
//
// A pay-as-you-go deployment has fixed windows, as Azure's documentation
// describes: of a minute for tokens, and of 10 s for requests. A request is
// charged with the largest output that it allows, and that charge is never
// corrected. A provisioned deployment has a leaky bucket: each request adds its
// tokens, and the bucket drains at the rate that was bought. It admits any
// request while it is not full, so short bursts may exceed 100 %.
// [Limiter.Settle] corrects its charges.
//
// A [Limiter] gets the time only from its arguments. It is safe for concurrent
// use. It remembers the time that a 429 named, so that [Limiter.Early] can find
// clients that come back too soon.
package limits

import (
	"math"
	"sync"
	"time"
)

// The names of the limits, as the status and the error texts spell them.
const (
	Requests = "requests"
	Tokens   = "tokens"
	PTU      = "ptu"
)

// The windows of the limits. "Manage Azure OpenAI quota" has tokens reset every
// minute, and requests counted over one or ten seconds.
const (
	requestWindow = 10 * time.Second
	tokenWindow   = time.Minute
)

// outputWeight is how many input tokens one output token counts for in a
// bucket.
const outputWeight = 4

// Rules are the limits of every deployment of a simulator. A zero limit is
// none.
type Rules struct {
	RequestsPerMinute int
	TokensPerMinute   int

	Drain    float64 // what a provisioned deployment works off, in input tokens a second
	Capacity float64 // what its bucket holds before it refuses

	Style Style         // of a 429
	Grace time.Duration // how long after a 429 a request may still have been under way
}

// requestsPerWindow spreads the request limit over its windows: 600 a minute
// are 100 in every ten seconds.
func (r Rules) requestsPerWindow() int64 {
	return int64(math.Ceil(float64(r.RequestsPerMinute) * requestWindow.Minutes()))
}

// Cost is the charge for a request on arrival, before tokens are generated.
type Cost struct {
	Prompt int64
	Output int64 // the most that it may generate
}

// Tokens is all of it.
func (c Cost) Tokens() int64 { return c.Prompt + c.Output }

// Refusal says which limit turned a request away, and for how long.
type Refusal struct {
	Limit string
	Wait  time.Duration
}

// window is a fixed window. It opens with the first use that finds none open.
type window struct {
	end  time.Time
	used int64
}

func (w *window) roll(now time.Time, length time.Duration) {
	if !now.Before(w.end) {
		w.end, w.used = now.Add(length), 0
	}
}

// Limiter keeps the limits of one deployment. It never looks at the clock.
type Limiter struct {
	Rules

	mu       sync.Mutex
	requests window
	tokens   window
	level    float64   // of the leaky bucket, in input tokens
	drained  time.Time // when level was last right

	promised time.Time // when the latest promise was made
	opens    time.Time // the time it named
}

// Admit charges a request, or refuses it with a wait that is above zero.
func (l *Limiter) Admit(now time.Time, c Cost) (Refusal, bool) {
	r, ok := l.charge(now, c)
	if !ok && l.Style.NamesWait() {
		l.Promise(now, r.Wait)
	}
	return r, ok
}

func (l *Limiter) charge(now time.Time, c Cost) (Refusal, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.Drain > 0 {
		return l.pour(now, c)
	}
	if l.RequestsPerMinute > 0 {
		l.requests.roll(now, requestWindow)
		// "Unsuccessful requests still count toward the limit", says Azure's
		// quota page, so every request counts, also one that is refused.
		l.requests.used++
		if l.requests.used > l.requestsPerWindow() {
			return Refusal{Limit: Requests, Wait: l.requests.end.Sub(now)}, false
		}
	}
	if l.TokensPerMinute > 0 {
		l.tokens.roll(now, tokenWindow)
		if c.Tokens() > int64(l.TokensPerMinute)-l.tokens.used {
			return Refusal{Limit: Tokens, Wait: l.tokens.end.Sub(now)}, false
		}
		l.tokens.used += c.Tokens()
	}
	return Refusal{}, true
}

// pour adds a request to the leaky bucket. A bucket that is not full takes any
// request: short bursts over 100 % are part of what "Provisioned throughput"
// describes.
func (l *Limiter) pour(now time.Time, c Cost) (Refusal, bool) {
	l.leak(now)
	if l.level >= l.Capacity {
		ms := math.Ceil(1000*(l.level-l.Capacity)/l.Drain) + 1
		return Refusal{Limit: PTU, Wait: time.Duration(ms) * time.Millisecond}, false
	}
	l.level += weight(c.Prompt, c.Output)
	return Refusal{}, true
}

func (l *Limiter) leak(now time.Time) {
	if since := now.Sub(l.drained).Seconds(); since > 0 {
		l.level = max(0, l.level-l.Drain*since)
		l.drained = now
	}
}

func weight(prompt, output int64) float64 { return float64(prompt) + outputWeight*float64(output) }

// Settle replaces a provisioned deployment's estimate with the tokens that were
// really generated. A pay-as-you-go estimate is not corrected.
func (l *Limiter) Settle(now time.Time, c Cost, produced int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.Drain > 0 {
		l.leak(now)
		l.level = max(0, l.level+weight(0, produced-c.Output))
	}
}

// Promise records that callers were told to come back after wait.
func (l *Limiter) Promise(now time.Time, wait time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !now.Before(l.opens) {
		l.promised = now
	}
	if end := now.Add(wait); end.After(l.opens) {
		l.opens = end
	}
}

// Early reports whether a request arrived before the time that was promised. A
// request that may have been in progress when the promise was made is not
// early.
func (l *Limiter) Early(arrived time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !arrived.Before(l.promised.Add(l.Grace)) && arrived.Before(l.opens)
}

// Utilization is the level of a provisioned deployment in percent; it may be
// above 100.
func (l *Limiter) Utilization(now time.Time) float64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.Drain == 0 {
		return 0
	}
	l.leak(now)
	return 100 * l.level / l.Capacity
}
