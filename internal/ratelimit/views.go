package ratelimit

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"time"
)

// Use is the use of a limit.
type Use struct {
	// Limit is the limit. If its Amount is 0, the use is only counted.
	Limit Limit
	// Allowed is how much this replica may use: all of it, or its share.
	Allowed, Used int64
	// Ends is when the current window ends. Reset is the time until nothing
	// counts as used.
	Ends  time.Time
	Reset time.Duration
	// Refused is how many requests this limit has refused. Demoted is how many
	// it has moved to another tier.
	Refused, Demoted uint64
}

// Ratio returns the used fraction of Allowed. It may be above 1.
func (u *Use) Ratio() float64 { return float64(u.Used) / float64(max(1, u.Allowed)) }

// Left returns how much of Allowed is not used.
func (u *Use) Left() int64 { return max(0, u.Allowed-u.Used) }

// Snapshot is the state of a caller.
type Snapshot struct {
	// Tier is the caller's tier. It is empty if the caller has none.
	Name, Tier string
	// Limits are the caller's limits, by kind and then by unit: those of all
	// models, and then those of each model.
	Limits []Use
	// Today and Month are the tokens used in the current day and month.
	Today, Month int64
	// InFlight is the number of requests in flight here. MaxRequests is their
	// maximum at all replicas, or this replica's part while it does not hear
	// the others. Busy is how many requests were refused because of it.
	InFlight, MaxRequests int
	Busy                  uint64
	// Reserved is the tokens that the requests in flight were charged with.
	Reserved int64
	// Ratio is the usual ratio of a prompt's tokens to its length. Output is
	// the usual output in tokens.
	Ratio, Output float64
	// Estimated is the average number of tokens that the last requests were
	// charged with. Reported is the average that backends counted for them.
	// Both are 0 without such requests.
	Estimated, Reported float64
	// Replicas is the number of replicas if they share the limits without
	// hearing each other. Otherwise it is 0.
	Replicas int
	Hour     LastHour
}

// Crossing reports that the use of a limit has reached a mark for the first
// time in a window.
type Crossing struct {
	Caller string
	Limit  Limit
	// Percent is the mark, 80 or 100. A request that was refused or moved to
	// another tier crosses 100.
	Percent       int
	Used, Allowed int64
}

// LastHour is the use of a caller in the last hour.
type LastHour struct {
	Requests int64 `json:"requests"`
	Tokens   int64 `json:"tokens"`
	// Refused counts the refused requests by the thing that refused them: a
	// limit such as tokens/minute, max_requests, model, service_tier, deny or
	// reserve.
	Refused map[string]uint64 `json:"refused"`
}

// Add adds another replica's last hour, which may contain any names and
// numbers.
func (l *LastHour) Add(other LastHour) {
	l.Requests, l.Tokens = addBounded(l.Requests, other.Requests), addBounded(l.Tokens, other.Tokens)
	sum := maps.Clone(l.Refused)
	for name, n := range other.Refused {
		if sum == nil {
			sum = make(map[string]uint64)
		}
		if _, known := sum[name]; known || len(sum) < maxReasons {
			sum[name] += n
		}
	}
	l.Refused = sum
}

// maxReasons is the number of different things that can refuse a request.
const maxReasons = ByReserve + 1

// addBounded adds a number that another replica reports. The sum is at most
// 1<<61, so that it does not overflow.
func addBounded(n, other int64) int64 { return min(n+max(0, min(other, 1<<61)), 1<<61) }

// CallerID identifies a caller in messages between replicas, which do not
// contain the caller's name. It has 128 bits, so that it is infeasible to find
// two names with the same ID. Within a process, callers are identified by name.
type CallerID [16]byte

// IDOf returns the id of the caller with this name.
func IDOf(name string) CallerID {
	sum := sha256.Sum256([]byte(name))
	return CallerID(sum[:16])
}

// MarshalText implements encoding.TextMarshaler.
func (id CallerID) MarshalText() ([]byte, error) { return hex.AppendEncode(nil, id[:]), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (id *CallerID) UnmarshalText(text []byte) error {
	if hex.DecodedLen(len(text)) != len(id) {
		return fmt.Errorf("%q is not the id of a caller", text)
	}
	_, err := hex.Decode(id[:], text)
	return err
}
