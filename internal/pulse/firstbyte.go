package pulse

import (
	"math"
	"sync/atomic"
	"time"
)

// FirstByte is how long the first byte of a backend's streams takes: a moving average that rises to a
// longer time at once, and falls slowly (peak-EWMA). The zero FirstByte is unknown.
type FirstByte struct {
	average atomic.Int64 // in nanoseconds
	heard   atomic.Int64 // when the last one came, in nanoseconds since began. 0: never
}

const (
	// memory is for how long a time counts: it then has a weight of 1/e.
	memory = 10 * time.Second
	// forgotten is after how long without a first byte a backend is unknown again, so that one that
	// was slow is tried.
	forgotten = 30 * time.Second
)

// Took records the first byte of a stream that was served.
func (f *FirstByte) Took(took time.Duration, now time.Time) {
	at := nanos(now)
	before, average := f.heard.Swap(at), f.average.Load()
	if next := int64(took); before != 0 && next < average {
		old := math.Exp(-float64(max(0, at-before)) / float64(memory))
		f.average.Store(next + int64(old*float64(average-next)))
	} else {
		f.average.Store(next)
	}
}

// At returns the average. It returns 0 if it is unknown.
func (f *FirstByte) At(now time.Time) time.Duration {
	if heard := f.heard.Load(); heard == 0 || nanos(now)-heard >= int64(forgotten) {
		return 0
	}
	return time.Duration(max(1, f.average.Load()))
}

// Choice is a backend to choose from.
type Choice struct {
	Weight   float64
	InFlight int64
	// FirstByte is the average, or 0 if it is unknown or does not count.
	FirstByte time.Duration
}

// Choose draws two of the choices by weight, and returns the one with the shorter average, multiplied
// by its requests in flight and one more. With two choices for each request, requests that come
// together do not all go to one backend. An unknown average counts as the shortest one. random returns
// numbers from 0 up to but not including 1.
func Choose(choices []Choice, random func() float64) int {
	shortest := time.Duration(math.MaxInt64)
	for _, c := range choices {
		if c.FirstByte > 0 {
			shortest = min(shortest, c.FirstByte)
		}
	}
	cost := func(c Choice) float64 {
		if c.FirstByte > 0 {
			return float64(c.FirstByte) * float64(c.InFlight+1)
		}
		return float64(shortest) * float64(c.InFlight+1)
	}
	first := draw(choices, -1, random)
	if len(choices) == 1 {
		return first
	}
	if second := draw(choices, first, random); cost(choices[second]) < cost(choices[first]) {
		return second
	}
	return first
}

// draw draws one of the choices by weight, but not the one that is excluded.
func draw(choices []Choice, excluded int, random func() float64) (drawn int) {
	total := 0.0
	for i, c := range choices {
		if i == excluded {
			continue
		}
		if total += c.Weight; random()*total < c.Weight {
			drawn = i
		}
	}
	return drawn
}
