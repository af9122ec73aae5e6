package quota

import (
	"math"
	"time"
)

// Returning describes how many requests of the same cost a backend that
// throttles is expected to accept from when it accepts the first one until a
// later time.
type Returning struct {
	// Requests is how many they are, and Every is how long after one the next
	// one may be sent. It is 0 if the backend accepts all of them at once.
	Requests float64
	Every    time.Duration
	// Unknown reports whether no limit is known.
	Unknown bool
}

// Returning returns what the backend accepts in a time after the end of a
// cooldown: whole windows of its limits, or what refills or is worked off. The
// limits that a backend names are divided by the number of replicas. What was
// learned is this replica's own part. A backend of which no limit is known
// accepts one request.
func (m *Meter) Returning(cost int64, length time.Duration, replicas int) Returning {
	cost = max(1, min(cost, highestCost))
	r := Returning{Requests: math.Inf(1)}
	for i, each := range [limits]int64{requests: 1, tokens: cost} {
		r.atMost(m.allowances[i].returning(float64(each)*float64(max(1, replicas)), windows[i], length))
	}
	if math.IsInf(r.Requests, 1) {
		return m.learnedReturning(float64(cost), length)
	}
	return r
}

func (m *Meter) learnedReturning(each float64, length time.Duration) Returning {
	if d := m.drain.Load(); d != nil && d.rate > 0 {
		return atRate(d.rate/each, length)
	} else if l := m.learned.Load(); d == nil && l != nil && l.most > 0 {
		return inWindows(l.most/each, l.length, length)
	}
	return Returning{Requests: 1, Unknown: true}
}

func (r *Returning) atMost(other Returning) {
	r.Requests, r.Every = min(r.Requests, other.Requests), max(r.Every, other.Every)
}

// inWindows is for a limit of so many requests in each window.
func inWindows(most float64, window, length time.Duration) Returning {
	return Returning{Requests: most * (1 + math.Floor(float64(length)/float64(window)))}
}

// atRate is for a limit that grows by so many requests in a nanosecond. A rate
// is only estimated, and a call that comes too early costs no more than a 429.
// At exactly the rate, the backend would never be full: a rate that is too low
// would stay so, and no tier would leave the others their shares. So requests
// follow at twice the rate.
func atRate(rate float64, length time.Duration) Returning {
	return Returning{Requests: 1 + rate*float64(length), Every: time.Duration(min(1/rate/2, float64(time.Minute)))}
}

// returning is for requests that need each of the limit. Requests is infinite
// if the limit is not known.
func (a *allowance) returning(each float64, longest, length time.Duration) Returning {
	limit, window := float64(a.limit.Load()), time.Duration(a.window.Load())
	switch {
	case limit == 0:
		return Returning{Requests: math.Inf(1)}
	case a.refill.Load() != 0:
		return atRate(limit/float64(time.Minute)/each, length)
	case window == 0:
		window = longest
	}
	most := float64(a.most.Load())
	if most == 0 { // not known: see read
		most = limit * window.Minutes()
	}
	return inWindows(most/each, window, length)
}
