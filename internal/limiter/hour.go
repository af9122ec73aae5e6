package limiter

import (
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// hour counts a caller's requests and tokens of the last hour, in twelve parts
// of five minutes. [Limiter.Hour] returns the parts, so that a replica that
// ends can leave them to the other replicas. The limiter's mutex guards it. If
// the clock is set back into the previous part, the current part goes on. If it
// is set back further, all parts are cleared.
type hour struct {
	// current is the number of the current part. A part is stored at its number
	// modulo hourParts.
	current int64
	parts   [hourParts]struct{ requests, tokens int64 }
	// refused is nil until a request is refused, which is never for most
	// callers.
	refused *[hourParts][refusals]uint32
}

const (
	hourParts  = 12
	partLength = int64(5 * time.Minute)
)

// refusals is the number of things that can refuse a request: the limits, by
// their IDs, and the ones that package ratelimit lists.
const refusals = ratelimit.ByReserve + 1

var refusalNames = [...]string{"max_requests", "model", "service_tier", "deny", "reserve"}

// refusalName returns the name of a number, as operators write it, such as
// tokens/minute.
func refusalName(by int) string {
	if by < ratelimit.MaxLimits {
		return ratelimit.ID(by).String()
	}
	return refusalNames[by-ratelimit.MaxLimits]
}

// at returns the index of the part for a time, and clears the parts that are
// over.
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
		index := (i + hourParts) % hourParts
		h.parts[index] = struct{ requests, tokens int64 }{}
		if h.refused != nil {
			h.refused[index] = [refusals]uint32{}
		}
	}
	h.current = part
	return part % hourParts
}

// bound returns a number that add can add, whatever another replica reports.
func bound(n int64) int64 { return max(0, min(n, 1<<61)) }

func (h *hour) snapshot(now int64) (sum ratelimit.LastHour) {
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

// HourPart is a part of a caller's last hour. Refused counts the refused
// requests by the number of the thing that refused them.
type HourPart struct {
	Number   int64          `json:"number"`
	Requests int64          `json:"requests,omitempty"`
	Tokens   int64          `json:"tokens,omitempty"`
	Refused  map[int]uint32 `json:"refused,omitempty"`
}

// HourTTL is the longest time for which a part may count.
const HourTTL = time.Duration((hourParts + 1) * partLength)

// Hour returns the parts of the last hour in which the caller had any use or
// refusal.
func (c *Limiter) Hour(now time.Time) (parts []HourPart) {
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

// SumHour adds up the parts that belong to the last hour. It ignores invalid
// ones.
func SumHour(now time.Time, parts []HourPart) (sum ratelimit.LastHour) {
	current := now.UnixNano() / partLength
	for _, part := range parts {
		// one that has just begun by another clock counts
		if ahead := part.Number - current; ahead > 1 || ahead <= -hourParts || part.Requests < 0 || part.Tokens < 0 {
			continue
		}
		sum.Requests, sum.Tokens = add(sum.Requests, bound(part.Requests)), add(sum.Tokens, bound(part.Tokens))
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

// add counts requests and the tokens that they cost.
func (h *hour) add(now, requests, tokens int64) {
	part := &h.parts[h.at(now)]
	part.requests += requests
	part.tokens = add(part.tokens, tokens)
}

// refuse counts a refused request.
func (h *hour) refuse(now int64, by int) {
	part := h.at(now)
	if h.refused == nil {
		h.refused = new([hourParts][refusals]uint32)
	}
	h.refused[part][by]++
}

// RefusedBy counts a request that was refused by ByModel, ByServiceTier, ByDeny
// or ByReserve.
func (c *Limiter) RefusedBy(now time.Time, by int) {
	c.mu.Lock()
	c.hour.refuse(c.roll(now), by)
	c.mu.Unlock()
}
