package openailb

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// Failover says what a reply means for its backend, and how far a request may
// go to get a better one.
type Failover struct {
	// UnhealthyStatus lists the statuses that are judged at all; any other
	// is passed on to the client and benches nobody. A class of statuses is
	// its first digit (5 for 5xx). A status that is listed and means nothing
	// by itself counts as a failure. Default: every status that is known to
	// mean something.
	UnhealthyStatus []int `json:"unhealthy_status,omitempty"`

	// FailDuration is how long a backend is benched after a failure, and how
	// long a failure counts towards max_fails. Default: 10s.
	FailDuration caddy.Duration `json:"fail_duration,omitempty"`

	// MaxFails is how many failures within fail_duration bench a backend.
	// Default: 1.
	MaxFails int `json:"max_fails,omitempty"`

	// RetryAfterDefault is how long a backend rests that throttles without
	// saying for how long. Default: 10s.
	RetryAfterDefault caddy.Duration `json:"retry_after_default,omitempty"`

	// RetryAfterMin is the shortest rest of a backend that throttles.
	// Default: 50ms.
	RetryAfterMin caddy.Duration `json:"retry_after_min,omitempty"`

	// RetryAfterMax is the longest rest of a backend that throttles, however
	// long it asks for, and the rest of one whose quota is used up.
	// Default: 5m.
	RetryAfterMax caddy.Duration `json:"retry_after_max,omitempty"`

	// AllThrottled says what becomes of a request while all backends
	// throttle: `respond` answers 429 with the soonest return, `forward`
	// sends it to the backend that returns soonest and passes the reply on.
	// Default: respond.
	AllThrottled string `json:"all_throttled,omitempty"`

	// RequestBuffers is how many bytes of a request body are kept in memory
	// to be sent to another backend if need be. A longer body streams to one
	// backend. Default: 32 MiB.
	RequestBuffers int64 `json:"request_buffers,omitempty"`

	// ResponseHeaderTimeout is how long a backend may take to begin a reply
	// that is not streamed, which is when it is complete. Default: 10m.
	ResponseHeaderTimeout caddy.Duration `json:"response_header_timeout,omitempty"`

	// StreamFirstEventTimeout is how long a backend may take to begin a reply
	// that is streamed. Default: 60s.
	StreamFirstEventTimeout caddy.Duration `json:"stream_first_event_timeout,omitempty"`

	// StreamIdleTimeout is how long a reply may stall between two reads,
	// before it is broken off. Default: 2m.
	StreamIdleTimeout caddy.Duration `json:"stream_idle_timeout,omitempty"`

	// StreamRequireEnd takes a stream for broken off that ends without
	// [DONE] or response.completed, as some backends that fail end theirs.
	// Default: false.
	StreamRequireEnd bool `json:"stream_require_end,omitempty"`
}

// The values of all_throttled.
const (
	respondThrottled = "respond"
	forwardThrottled = "forward"
)

// configuredWrong is how long a backend rests that a person must mend: a
// credential it refuses, a model it does not have.
const configuredWrong = time.Minute

const defaultRequestBuffers = 32 << 20

func (f *Failover) provision() error {
	for _, d := range []struct {
		name     string
		value    *caddy.Duration
		fallback time.Duration
	}{
		{"fail_duration", &f.FailDuration, 10 * time.Second},
		{"retry_after_default", &f.RetryAfterDefault, 10 * time.Second},
		{"retry_after_min", &f.RetryAfterMin, 50 * time.Millisecond},
		{"retry_after_max", &f.RetryAfterMax, 5 * time.Minute},
		{"response_header_timeout", &f.ResponseHeaderTimeout, 10 * time.Minute},
		{"stream_first_event_timeout", &f.StreamFirstEventTimeout, time.Minute},
		{"stream_idle_timeout", &f.StreamIdleTimeout, 2 * time.Minute},
	} {
		if *d.value < 0 {
			return fmt.Errorf("%s %s: expected a duration above 0", d.name, time.Duration(*d.value))
		}
		if *d.value == 0 {
			*d.value = caddy.Duration(d.fallback)
		}
	}
	if f.RetryAfterMin > f.RetryAfterMax {
		return fmt.Errorf("retry_after_min %s: expected no more than retry_after_max, which is %s",
			time.Duration(f.RetryAfterMin), time.Duration(f.RetryAfterMax))
	}
	if f.MaxFails < 0 {
		return fmt.Errorf("max_fails %d: expected 1 or more", f.MaxFails)
	}
	if f.MaxFails == 0 {
		f.MaxFails = 1
	}
	if f.RequestBuffers < 0 || f.RequestBuffers > maxInt {
		return fmt.Errorf("request_buffers %d: expected 1 to %d bytes", f.RequestBuffers, maxInt)
	}
	if f.RequestBuffers == 0 {
		f.RequestBuffers = defaultRequestBuffers
	}
	for _, status := range f.UnhealthyStatus {
		if !validStatusOrClass(status) {
			return fmt.Errorf("unhealthy_status %d: expected 400 to 599, or 4 or 5 for a class", status)
		}
	}
	switch f.AllThrottled {
	case "", respondThrottled, forwardThrottled:
		return nil
	}
	return fmt.Errorf("all_throttled %q: expected %s or %s", f.AllThrottled, respondThrottled, forwardThrottled)
}

func validStatusOrClass(status int) bool {
	return status == 4 || status == 5 || status >= 400 && status <= 599
}

// parseStatus reads a status like 503 or a class like 5xx.
func parseStatus(word string) (int, error) {
	status, err := strconv.Atoi(strings.TrimSuffix(word, "xx"))
	if err != nil || !validStatusOrClass(status) || (status < 10) != strings.HasSuffix(word, "xx") {
		return 0, fmt.Errorf("%q: expected a status from 400 to 599, 4xx or 5xx", word)
	}
	return status, nil
}

// listed reports whether the status is in unhealthy_status.
func (f *Failover) listed(status int) bool {
	return slices.ContainsFunc(f.UnhealthyStatus, func(s int) bool { return caddyhttp.StatusCodeMatches(status, s) })
}

// wait tells how long a reply benches its member, if it does.
func (f *Failover) wait(ex *exchange, m *member, r *reply, now time.Time) (wait time.Duration, benches bool) {
	hinted := min(max(r.wait, time.Duration(f.RetryAfterMin)), time.Duration(f.RetryAfterMax))
	failDuration := time.Duration(f.FailDuration)
	switch r.class {
	case verdict.Throttled:
		if r.hinted {
			return hinted, true
		}
		return time.Duration(f.RetryAfterDefault), true
	case verdict.Overloaded:
		if r.hinted {
			return hinted, true
		}
		return failDuration, true
	case verdict.Quota:
		return time.Duration(f.RetryAfterMax), true
	case verdict.NotPermitted:
		// of other operations, a credential need know nothing
		if !ex.asked.infers || ex.refusedOnce {
			return 0, false
		}
		ex.refusedOnce = true
		return configuredWrong, true
	case verdict.Credential, verdict.NoModel:
		if r.status == 0 && r.wait > 0 { // there was no credential to be had
			return min(r.wait, configuredWrong), true
		}
		// what every backend refuses may be the request's fault as well
		if r.status != 0 && r.class == verdict.Credential {
			if ex.refusedOnce {
				return 0, false
			}
			ex.refusedOnce = true
		}
		return configuredWrong, true
	case verdict.Failed, verdict.Timeout:
		// what fails everywhere is the request's fault: it counts once
		if ex.suspected {
			return 0, false
		}
		ex.suspected = true
		return failDuration, m.health.failed(r.class, ex.model(m), now, f.MaxFails, failDuration)
	case verdict.Unreachable:
		return failDuration, m.health.failed(r.class, ex.model(m), now, f.MaxFails, failDuration)
	}
	return 0, false
}
