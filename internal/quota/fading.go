package quota

import (
	"math"
	"sync/atomic"
)

// fading is a sum that fades. To change together, the sum and the instant of
// its latest change are in a single number: the upper half is the sum, as a
// float32, and the lower half the instant in hundredths of a second.
type fading struct{ atomic.Uint64 }

// add adds a cost of an instant. A negative one takes back what was added for
// the same instant.
func (f *fading) add(cost, at, halves int64) {
	for {
		known, now := f.Load(), hundredths(at)
		sum := sumOf(known, at, halves)
		ahead := int32(uint32(known) - now) //nolint:gosec // both may overflow
		if known != 0 && ahead >= 0 && (cost < 0 || ahead < farAhead) {
			now = uint32(known) // that of a later request
			sum += float64(cost) * math.Exp2(-10*float64(ahead)/float64(halves))
		} else {
			sum += float64(cost)
		}
		if f.CompareAndSwap(known, uint64(math.Float32bits(float32(max(0, sum))))<<32|uint64(now)) {
			return
		}
	}
}

// farAhead is a minute in hundredths. A clock that was ahead by more was wrong.
const farAhead = 60 * 100

func (f *fading) sum(at, halves int64) float64 { return sumOf(f.Load(), at, halves) }

// since returns the time since the latest change, in milliseconds.
func (f *fading) since(at int64) int64 { return sinceOf(f.Load(), at) }

func sumOf(packed uint64, at, halves int64) float64 {
	sum := float64(math.Float32frombits(uint32(packed >> 32)))
	if sum == 0 {
		return 0
	}
	return sum * math.Exp2(-float64(sinceOf(packed, at))/float64(halves))
}

// sinceOf is right for 248 days.
func sinceOf(packed uint64, at int64) int64 {
	return 10 * max(0, int64(int32(hundredths(at)-uint32(packed)))) //nolint:gosec // both may overflow
}

func hundredths(at int64) uint32 { return uint32(at / 10) } //nolint:gosec // it may overflow
