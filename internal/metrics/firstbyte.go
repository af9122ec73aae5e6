package metrics

import (
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// FirstBytes are the requests of a pool that wait for the first byte of a
// backend's reply. Counts of requests that are over say nothing while all
// backends hang: nothing ends then.
//
// Requests are counted by the moment at which their wait began, and by the
// moment from which it is too long, in slots of two seconds. So a wait costs a
// few additions, and no lock, and the age of the oldest is found by a look at
// the slots.
type FirstBytes struct {
	number     atomic.Int64
	began, due slots
}

const (
	slotLength = 2 * time.Second
	// A wait of more than slotLength*numberOfSlots, which is over an hour,
	// counts as a shorter one.
	numberOfSlots = 1 << 11
	// patience is how long no wait is too long.
	patience = time.Minute
	// longestPatience bounds for how long a wait may be usual.
	longestPatience = 30 * time.Minute
)

type slots [numberOfSlots]atomic.Int32

// slotOf numbers the slots of time.
func slotOf(t time.Time) int64 { return int64(t.Sub(epoch) / slotLength) }

// epoch is before any time, and counts by the monotonic clock.
var epoch = time.Now().Add(-2 * time.Hour)

// at returns the count of a slot, whose number may be negative.
func (s *slots) at(slot int64) *atomic.Int32 { return &s[slot&(numberOfSlots-1)] }

// FirstByte is the wait of one request. The zero FirstByte is none.
type FirstByte struct {
	of         *FirstBytes
	began, due int64
}

// Begin records that a request waits from now on. usual is after how long its
// wait is unusual, or 0 if that is not known.
func (f *FirstBytes) Begin(now time.Time, usual time.Duration) FirstByte {
	wait := FirstByte{f, slotOf(now), slotOf(now.Add(min(max(patience, usual), longestPatience)))}
	f.number.Add(1)
	f.began.at(wait.began).Add(1)
	f.due.at(wait.due).Add(1)
	return wait
}

// Waits reports whether the request waits.
func (w *FirstByte) Waits() bool { return w.of != nil }

// End records that the request does not wait any more. Without a wait, it does
// nothing.
func (w *FirstByte) End() {
	if w.of == nil {
		return
	}
	w.of.number.Add(-1)
	w.of.began.at(w.began).Add(-1)
	w.of.due.at(w.due).Add(-1)
	w.of = nil
}

// Waiting says how many requests wait for their first byte, how long the oldest
// of them does, and how many have waited for a minute and for longer than is
// usual.
type Waiting struct {
	Requests      int64   `json:"requests"`
	OldestSeconds float64 `json:"oldest_seconds"`
	Overdue       int64   `json:"overdue"`
}

// Stuck reports whether so many requests wait for too long that it is not a
// slow request. The alert has the same limit.
func (w Waiting) Stuck() bool { return w.Overdue >= 2 }

// At returns what waits now.
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
	// slots that are not over yet, up to the longest patience, are in the
	// future
	for age := int64(1); age < numberOfSlots-int64(longestPatience/slotLength); age++ {
		w.Overdue += int64(f.due.at(current - age).Load())
	}
	return w
}

var (
	waitingFirstDesc = desc("first_byte_waiting", "Requests for inference that wait for the first byte of a backend's reply.", "pool")
	oldestFirstDesc  = desc("first_byte_oldest_seconds", "How long the oldest of them has waited, within two seconds.", "pool")
	overdueFirstDesc = desc("first_byte_overdue", "How many of them have waited for over a minute, and for longer than is usual for such a request.", "pool")
)

// collect collects what waits now.
func (f *FirstBytes) collect(pool string, now time.Time, metrics chan<- prometheus.Metric) {
	w := f.At(now)
	metrics <- prometheus.MustNewConstMetric(waitingFirstDesc, prometheus.GaugeValue, float64(w.Requests), pool)
	metrics <- prometheus.MustNewConstMetric(oldestFirstDesc, prometheus.GaugeValue, w.OldestSeconds, pool)
	metrics <- prometheus.MustNewConstMetric(overdueFirstDesc, prometheus.GaugeValue, float64(w.Overdue), pool)
}
