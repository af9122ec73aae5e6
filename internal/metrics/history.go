package metrics

import (
	"maps"
	"slices"
	"sync"
	"time"
)

const (
	// SpanLength is the length of a Span of a History.
	SpanLength = 5 * time.Second
	// maxSpans is how many spans are kept: five minutes.
	maxSpans = 60
)

// History has the counts of the last five minutes. While it has users, a timer
// reads the metrics; it has no goroutine.
type History struct {
	totals func() map[Key]Counts

	mu    sync.Mutex
	users int
	timer *time.Timer
	// total has the counts until at.
	total map[Key]Counts
	at    time.Time
	spans []Span // the newest last
}

// Span has the counts of a period of time. A key without counts is missing.
type Span struct {
	Length time.Duration
	Counts map[Key]Counts
}

// Recent is the history of this process.
var Recent = &History{totals: Totals}

// Use starts the timer for a user. The timer stops when each user has called
// Leave. A new config calls Use before the old one calls Leave, so the history
// survives.
func (h *History) Use() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.users++; h.users == 1 {
		h.read()
		h.timer = time.AfterFunc(SpanLength, h.tick)
	}
}

// Leave ends a Use. After the last user, the history is cleared.
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
	h.timer.Reset(SpanLength)
}

// forget removes a pool from the totals, so that its counts start again at 0.
func (h *History) forget(pool string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	maps.DeleteFunc(h.total, func(key Key, _ Counts) bool { return key.Pool == pool })
}

func (h *History) read() {
	h.total, h.at = h.totals(), time.Now()
}

// Spans returns the spans, the newest last.
func (h *History) Spans() []Span {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.spans)
}

// Sum adds up the counts of all spans.
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
