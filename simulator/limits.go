package simulator

import (
	"math"
	"sync"
	"time"
)

// The names of the limits, as the status and the error texts spell them.
const (
	limitRequests = "requests"
	limitTokens   = "tokens"
	limitPTU      = "ptu"
)

// tokenWindow is the window of the token limit. "Manage Azure OpenAI quota"
// has the counter reset every minute.
const tokenWindow = time.Minute

// maxWait bounds what a refusal says. A request may ask for so many tokens that
// the time to work them off does not fit into a time.Duration.
const maxWait = 365 * 24 * time.Hour

// maxWeight bounds what one request adds to a bucket, so that the settlement
// can take the same off again.
const maxWeight = 1 << 52

// rules are the limits of every deployment of a simulator. A zero limit is none.
type rules struct {
	requestsPerMinute int
	requestWindow     time.Duration
	tokensPerMinute   int

	drain       float64 // what a provisioned deployment works off, in input tokens a second
	capacity    float64 // what its bucket holds before it refuses
	outputRatio float64 // input tokens that one output token weighs

	sized   bool          // a 429 says that a request is above the whole limit
	unnamed bool          // a 429 does not say for how long, or says 0
	grace   time.Duration // how long after a 429 a request may still have been under way
}

// requestsPerWindow spreads the request limit over its windows: 600 a minute
// are 10 in every second.
func (r rules) requestsPerWindow() int64 {
	return int64(math.Ceil(float64(r.requestsPerMinute) * r.requestWindow.Minutes()))
}

// cost is what a request is charged on arrival, before tokens are generated.
type cost struct {
	prompt int64
	output int64 // the most that it may generate
}

func (c cost) tokens() int64 { return c.prompt + c.output }

// refusal says which limit turned a request away, and for how long.
type refusal struct {
	limit    string
	wait     time.Duration
	tooLarge bool // no wait helps: the request is above the whole limit
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

// limiter keeps the limits of one deployment. It never looks at the clock.
type limiter struct {
	rules
	prompts promptCache

	mu       sync.Mutex
	requests window
	tokens   window
	level    float64   // of the leaky bucket, in input tokens
	drained  time.Time // when level was last right

	promised time.Time // when the latest promise was made
	opens    time.Time // the time it named
}

// admit charges a request, or refuses it with a wait that is above zero.
func (l *limiter) admit(now time.Time, c cost) (refusal, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r, ok := l.charge(now, c)
	if !ok && !l.unnamed && !r.tooLarge {
		l.promise(now, r.wait)
	}
	return r, ok
}

func (l *limiter) charge(now time.Time, c cost) (refusal, bool) {
	if l.drain > 0 {
		return l.pour(now, c)
	}
	if l.requestsPerMinute > 0 {
		l.requests.roll(now, l.requestWindow)
		// "Unsuccessful requests still count toward the limit", says Azure's
		// quota page, so every request counts, also one that is refused.
		l.requests.used++
		if l.requests.used > l.requestsPerWindow() {
			return refusal{limit: limitRequests, wait: l.requests.end.Sub(now)}, false
		}
	}
	if l.tokensPerMinute > 0 {
		l.tokens.roll(now, tokenWindow)
		if c.tokens() > int64(l.tokensPerMinute)-l.tokens.used {
			return refusal{limitTokens, l.tokens.end.Sub(now), l.sized && c.tokens() > int64(l.tokensPerMinute)}, false
		}
		l.tokens.used += c.tokens()
	}
	return refusal{}, true
}

// pour adds a request to the leaky bucket. A bucket that is not full takes any
// request: short bursts over 100 % are part of what "Provisioned throughput"
// describes.
func (l *limiter) pour(now time.Time, c cost) (refusal, bool) {
	l.leak(now)
	if l.level >= l.capacity {
		ms := min(math.Ceil(1000*(l.level-l.capacity)/l.drain)+1, float64(maxWait.Milliseconds()))
		return refusal{limit: limitPTU, wait: time.Duration(ms) * time.Millisecond}, false
	}
	l.level += l.weight(c.prompt, c.output)
	return refusal{}, true
}

func (l *limiter) leak(now time.Time) {
	if since := now.Sub(l.drained).Seconds(); since > 0 {
		l.level = max(0, l.level-l.drain*since)
		l.drained = now
	}
}

func (l *limiter) weight(prompt, output int64) float64 {
	return max(-maxWeight, min(float64(prompt)+l.outputRatio*float64(output), maxWeight))
}

// settle replaces a provisioned deployment's estimate with the tokens that were
// really generated. A pay-as-you-go estimate is not corrected.
func (l *limiter) settle(now time.Time, c cost, produced int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.drain > 0 {
		l.leak(now)
		l.level = max(0, l.level+l.weight(0, produced-c.output))
	}
}

// promise records that callers were told to come back after wait.
func (l *limiter) promise(now time.Time, wait time.Duration) {
	if !now.Before(l.opens) {
		l.promised = now
	}
	if end := now.Add(wait); end.After(l.opens) {
		l.opens = end
	}
}

// early reports whether a request arrived before the time that was promised. A
// request that may have been in progress when the promise was made is not early.
func (l *limiter) early(arrived time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !arrived.Before(l.promised.Add(l.grace)) && arrived.Before(l.opens)
}

// meter is one dimension of the `x-ratelimit-*` headers.
type meter struct {
	limit     int
	remaining int64
	reset     time.Duration
	renewal   time.Duration
}

// meters reads the pay-as-you-go limits. A limit that is not set gives a zero
// meter.
func (l *limiter) meters(now time.Time) (requests, tokens meter) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.requestsPerMinute > 0 {
		l.requests.roll(now, l.requestWindow)
		requests = meter{
			limit:     l.requestsPerMinute,
			remaining: max(0, l.requestsPerWindow()-l.requests.used),
			reset:     l.requests.end.Sub(now),
			renewal:   l.requestWindow,
		}
	}
	if l.tokensPerMinute > 0 {
		l.tokens.roll(now, tokenWindow)
		tokens = meter{
			limit:     l.tokensPerMinute,
			remaining: max(0, int64(l.tokensPerMinute)-l.tokens.used),
			reset:     l.tokens.end.Sub(now),
			renewal:   tokenWindow,
		}
	}
	return requests, tokens
}

// utilization is the level of a provisioned deployment in percent; it may be
// above 100.
func (l *limiter) utilization(now time.Time) float64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.drain == 0 {
		return 0
	}
	l.leak(now)
	return 100 * l.level / l.capacity
}
