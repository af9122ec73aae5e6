package traffic

import (
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

const (
	// Interval is the time between two samples of a History.
	Interval = 5 * time.Second
	// maxSamples is how many samples are kept: those of five minutes, with the
	// one from which the first interval counts.
	maxSamples = 61
)

// History is what was counted in the last five minutes. It takes samples while
// it has users, by a timer and without a goroutine of its own.
type History struct {
	from prometheus.Gatherer

	mu      sync.Mutex
	users   int
	timer   *time.Timer
	samples []sample // the newest last
}

type sample struct {
	at     time.Time
	counts map[Key]Counts
}

// NewHistory returns the history of what can be gathered there.
func NewHistory(from prometheus.Gatherer) *History { return &History{from: from} }

// Recent is the history of this process.
var Recent = NewHistory(Registry)

// Use begins to take samples, until each user has called Leave. A config that
// replaces another begins before that one leaves, so nothing is lost.
func (h *History) Use() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.users++; h.users == 1 {
		h.take()
		h.timer = time.AfterFunc(Interval, h.tick)
	}
}

// Leave ends what Use began. After the last user, everything is forgotten.
func (h *History) Leave() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.users--; h.users == 0 {
		h.timer.Stop()
		h.samples = nil
	}
}

func (h *History) tick() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.users > 0 {
		h.take()
		h.timer.Reset(Interval)
	}
}

func (h *History) take() {
	counts, _ := Read(h.from) // what cannot be gathered is missing in /metrics, too
	h.samples = append(h.samples, sample{time.Now(), counts})
	if surplus := len(h.samples) - maxSamples; surplus > 0 {
		h.samples = slices.Delete(h.samples, 0, surplus)
	}
}

// Span is what was counted in a span of time.
type Span struct {
	Length time.Duration
	Counts map[Key]Counts
}

// Spans returns what was counted in each interval, the newest last.
func (h *History) Spans() []Span {
	h.mu.Lock()
	defer h.mu.Unlock()
	var spans []Span
	for i := 1; i < len(h.samples); i++ {
		spans = append(spans, between(h.samples[i-1], h.samples[i]))
	}
	return spans
}

func between(before, after sample) Span {
	span := Span{after.at.Sub(before.at), make(map[Key]Counts)}
	for key, counts := range after.counts {
		span.Counts[key] = counts.Minus(before.counts[key])
	}
	return span
}
