package limiter

import (
	"maps"
	"time"
)

// hour counts what a caller has done in the last hour, in twelve parts of five
// minutes. [Caller.Hour] returns the parts, which a replica that ends leaves to
// the others. The caller's mutex guards it. If the clock is set back into the
// part before, the current part goes on; if it is set back further, all parts
// are cleared.
type hour struct {
	// current is the number of the current part. The part of a number is at the
	// number modulo hourParts.
	current int64
	parts   [hourParts]struct{ requests, tokens int64 }
	// refused is nil until a request was refused, which most callers never see.
	refused *[hourParts][refusals]uint32
}

const (
	hourParts  = 12
	partLength = int64(5 * time.Minute)
)

// refusals is how many things refuse requests: the limits, by their ids, and
// those that follow.
const refusals = MaxLimits + 5

// The numbers of what refuses requests besides the limits.
const (
	byMaxRequests = MaxLimits + iota
	// ByModel and ByServiceTier: the request is not certain to be for one that
	// the caller may use.
	ByModel
	ByServiceTier
	// ByDeny: all requests of the caller are refused.
	ByDeny
	// ByReserve: only shares of other tiers are left of the backends.
	ByReserve
)

var refusalNames = [...]string{"max_requests", "model", "service_tier", "deny", "reserve"}

// refusalName returns what refuses requests as operators write it, such as
// tokens/minute.
func refusalName(by int) string {
	if by < MaxLimits {
		return ID(by).String()
	}
	return refusalNames[by-MaxLimits]
}

// at returns the index of the part of a time, after forgetting what is over.
func (h *hour) at(now int64) int64 {
	part := max(0, now/partLength)
	if part == h.current-1 {
		part = h.current
	}
	ahead := part - h.current
	if ahead < 0 || ahead > hourParts {
		ahead = hourParts
	}
	for i := part; i > part-ahead; i-- {
		over := (i + hourParts) % hourParts
		h.parts[over] = struct{ requests, tokens int64 }{}
		if h.refused != nil {
			h.refused[over] = [refusals]uint32{}
		}
	}
	h.current = part
	return part % hourParts
}

// LastHour is what a caller has done in the last hour.
type LastHour struct {
	Requests int64 `json:"requests"`
	Tokens   int64 `json:"tokens"`
	// Refused are the requests that were refused, by what refused them: a limit
	// such as tokens/minute, max_requests, model, service_tier, deny or
	// reserve.
	Refused map[string]uint64 `json:"refused"`
}

// Add adds another replica's last hour. What that says may be anything.
func (l *LastHour) Add(other LastHour) {
	l.Requests += other.Requests
	l.Tokens += other.Tokens
	sum := maps.Clone(l.Refused)
	for name, n := range other.Refused {
		if sum == nil {
			sum = make(map[string]uint64)
		}
		if _, known := sum[name]; known || len(sum) < refusals {
			sum[name] += n
		}
	}
	l.Refused = sum
}

func (h *hour) snapshot(now int64) (sum LastHour) {
	h.at(now)
	for _, part := range h.parts {
		sum.Requests += part.requests
		sum.Tokens = add(sum.Tokens, part.tokens)
	}
	if h.refused == nil {
		return sum
	}
	sum.Refused = make(map[string]uint64)
	for _, part := range h.refused {
		for by, n := range part {
			if n > 0 {
				sum.Refused[refusalName(by)] += uint64(n)
			}
		}
	}
	return sum
}

// HourPart is a part of the last hour of a caller. Refused has the requests
// that were refused, by the number of what refused them.
type HourPart struct {
	Number, Requests, Tokens int64
	Refused                  map[int]uint32
}

// HourTTL is how long a part may count.
const HourTTL = time.Duration((hourParts + 1) * partLength)

// Hour returns the parts of the last hour in which the caller has done
// anything.
func (c *Caller) Hour(now time.Time) (parts []HourPart) {
	c.mu.Lock()
	defer c.mu.Unlock()
	h := &c.hour
	h.at(c.roll(now))
	for number := max(0, h.current-hourParts+1); number <= h.current; number++ {
		i := number % hourParts
		part := HourPart{Number: number, Requests: h.parts[i].requests, Tokens: h.parts[i].tokens}
		if h.refused != nil {
			for by, n := range h.refused[i] {
				if n > 0 {
					if part.Refused == nil {
						part.Refused = make(map[int]uint32)
					}
					part.Refused[by] = n
				}
			}
		}
		if part.Requests != 0 || part.Tokens != 0 || part.Refused != nil {
			parts = append(parts, part)
		}
	}
	return parts
}

// SumHour adds up the parts that are of the last hour. They may be anything.
func SumHour(now time.Time, parts []HourPart) (sum LastHour) {
	current := now.UnixNano() / partLength
	for _, part := range parts {
		// one that has just begun by another clock counts
		if ahead := part.Number - current; ahead > 1 || ahead <= -hourParts || part.Requests < 0 || part.Tokens < 0 {
			continue
		}
		sum.Requests, sum.Tokens = add(sum.Requests, part.Requests), add(sum.Tokens, part.Tokens)
		for by, n := range part.Refused {
			if by < 0 || by >= refusals {
				continue
			}
			if sum.Refused == nil {
				sum.Refused = make(map[string]uint64)
			}
			sum.Refused[refusalName(by)] += uint64(n)
		}
	}
	return sum
}

// add counts requests, and what they have cost.
func (h *hour) add(now, requests, tokens int64) {
	part := &h.parts[h.at(now)]
	part.requests += requests
	part.tokens = add(part.tokens, tokens)
}

// refuse counts a request that was refused.
func (h *hour) refuse(now int64, by int) {
	part := h.at(now)
	if h.refused == nil {
		h.refused = new([hourParts][refusals]uint32)
	}
	h.refused[part][by]++
}

// RefusedBy counts a request that something else than a limit has refused: one
// of the numbers above.
func (c *Caller) RefusedBy(now time.Time, by int) {
	c.mu.Lock()
	c.hour.refuse(c.roll(now), by)
	c.mu.Unlock()
}
