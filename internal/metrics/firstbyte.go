package metrics

import (
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// FirstBytes counts the requests of a pool that wait for the first byte of a
// backend's reply. Counts of finished requests do not change while all backends
// hang, because no request finishes.
//
// A request is counted in two rings of slots of two seconds: in one by the
// start of its wait, in the other by the time from which the wait is too long.
// So a wait costs a few atomic additions and no lock, and At finds the age of
// the oldest wait by a look at the slots.
type FirstBytes struct {
	number     atomic.Int64
	began, due slots
}

const (
	slotLength = 2 * time.Second
	// A wait of more than slotLength*numberOfSlots, which is over an hour,
	// counts as a shorter one.
	numberOfSlots = 1 << 11
	// patience is the time before which no wait is too long.
	patience = time.Minute
	// longestPatience limits the time for which a wait may be usual.
	longestPatience = 30 * time.Minute
)

type slots [numberOfSlots]atomic.Int32

// slotOf returns the number of the slot of a time.
func slotOf(t time.Time) int64 { return int64(t.Sub(epoch) / slotLength) }

// epoch is earlier than any time that is counted, and has a monotonic clock
// reading.
var epoch = time.Now().Add(-2 * time.Hour)

// at returns the count of a slot, whose number may be negative.
func (s *slots) at(slot int64) *atomic.Int32 { return &s[slot&(numberOfSlots-1)] }

// FirstByte is the wait of one request. The zero FirstByte does not wait.
type FirstByte struct {
	counts     *FirstBytes
	began, due int64
}

// Begin records that a request waits from now on. usual is the time after which
// the wait is unusually long, or 0 if that is not known.
func (f *FirstBytes) Begin(now time.Time, usual time.Duration) FirstByte {
	wait := FirstByte{f, slotOf(now), slotOf(now.Add(min(max(patience, usual), longestPatience)))}
	f.number.Add(1)
	f.began.at(wait.began).Add(1)
	f.due.at(wait.due).Add(1)
	return wait
}

// Waits reports whether the request waits.
func (w *FirstByte) Waits() bool { return w.counts != nil }

// End ends the wait, if there is one.
func (w *FirstByte) End() {
	if w.counts == nil {
		return
	}
	w.counts.number.Add(-1)
	w.counts.began.at(w.began).Add(-1)
	w.counts.due.at(w.due).Add(-1)
	w.counts = nil
}

// Waiting describes the requests that wait for their first byte: how many there
// are, the age of the oldest wait, and how many have waited for more than a
// minute, and for longer than usual.
type Waiting struct {
	Requests      int64   `json:"requests"`
	OldestSeconds float64 `json:"oldest_seconds"`
	Overdue       int64   `json:"overdue"`
}

// Stuck reports whether so many waits are too long that this is not just one
// slow request. The alert has the same limit.
func (w Waiting) Stuck() bool { return w.Overdue >= 2 }

// At returns the waits at this time.
func (f *FirstBytes) At(now time.Time) (w Waiting) {
	if w.Requests = max(0, f.number.Load()); w.Requests == 0 {
		return w
	}
	current := slotOf(now)
	for age := int64(numberOfSlots - 1); age > 0; age-- {
		if f.began.at(current-age).Load() > 0 {
			w.OldestSeconds = (time.Duration(age) * slotLength).Seconds()
			break
		}
	}
	// Slots up to longestPatience ahead are in the future, so their part of the
	// ring is left out.
	for age := int64(1); age < numberOfSlots-int64(longestPatience/slotLength); age++ {
		w.Overdue += int64(f.due.at(current - age).Load())
	}
	return w
}

var (
	waitingFirstDesc = desc("first_byte_waiting",
		"Requests for inference that wait for the first byte of a backend's reply.", "pool")
	oldestFirstDesc  = desc("first_byte_oldest_seconds", "How long the oldest of them has waited, within two seconds.", "pool")
	overdueFirstDesc = desc("first_byte_overdue",
		"How many of them have waited for over a minute, and for longer than is usual for such a request.", "pool")
)

// collect collects the gauges of the waits.
func (f *FirstBytes) collect(pool string, now time.Time, metrics chan<- prometheus.Metric) {
	w := f.At(now)
	metrics <- prometheus.MustNewConstMetric(waitingFirstDesc, prometheus.GaugeValue, float64(w.Requests), pool)
	metrics <- prometheus.MustNewConstMetric(oldestFirstDesc, prometheus.GaugeValue, w.OldestSeconds, pool)
	metrics <- prometheus.MustNewConstMetric(overdueFirstDesc, prometheus.GaugeValue, float64(w.Overdue), pool)
}
