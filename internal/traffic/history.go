package traffic

import (
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

const (
	// Interval is how long a Span of a History lasts.
	Interval = 5 * time.Second
	// maxSpans is how many spans are kept: those of five minutes.
	maxSpans = 60
)

// History is what was counted in the last five minutes. It reads the metrics
// while it has users, by a timer and without a goroutine of its own.
type History struct {
	from prometheus.Gatherer

	mu    sync.Mutex
	users int
	timer *time.Timer
	// total is what was counted until at.
	total map[Key]Counts
	at    time.Time
	spans []Span // the newest last
}

// Span is what was counted in a span of time. Without a key, that is nothing.
type Span struct {
	Length time.Duration
	Counts map[Key]Counts
}

// NewHistory returns the history of what can be gathered there.
func NewHistory(from prometheus.Gatherer) *History { return &History{from: from} }

// Recent is the history of this process.
var Recent = NewHistory(Registry)

// Use begins to read, until each user has called Leave. A config that replaces
// another begins before that one leaves, so nothing is lost.
func (h *History) Use() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.users++; h.users == 1 {
		h.read()
		h.timer = time.AfterFunc(Interval, h.tick)
	}
}

// Leave ends what Use began. After the last user, everything is forgotten.
func (h *History) Leave() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.users--; h.users == 0 {
		h.timer.Stop()
		h.total, h.spans = nil, nil
	}
}

func (h *History) tick() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.users == 0 {
		return
	}
	before, at := h.total, h.at
	h.read()
	span := Span{h.at.Sub(at), make(map[Key]Counts)}
	for key, counts := range h.total {
		if more := counts.Minus(before[key]); !more.isZero() {
			span.Counts[key] = more
		}
	}
	h.spans = append(h.spans, span)
	h.spans = slices.Delete(h.spans, 0, max(0, len(h.spans)-maxSpans))
	h.timer.Reset(Interval)
}

func (h *History) read() {
	h.total, _ = Read(h.from) // what cannot be gathered is missing in /metrics, too
	h.at = time.Now()
}

// Spans returns what was counted in each span of time, the newest last.
func (h *History) Spans() []Span {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.spans)
}

// Sum adds up what was counted in all spans.
func Sum(spans []Span) (total map[Key]Counts, length time.Duration) {
	total = make(map[Key]Counts)
	for _, span := range spans {
		length += span.Length
		for key, counts := range span.Counts {
			total[key] = total[key].Plus(counts)
		}
	}
	return total, length
}
