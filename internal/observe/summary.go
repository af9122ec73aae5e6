package observe

import (
	"math"
	"strings"
	"time"

	"go.uber.org/zap/zapcore"

	"github.com/openai-lb/caddy-openai-lb/internal/usage"
)

// Summary describes a request and its reply, in placeholders and in the access log. Both
// have the same names.
type Summary struct {
	Pool, Caller, Model string
	// Backend is the one that answered, or the last one that was tried.
	Backend string
	// Class is the class of the answer.
	Class string
	// Limit is the limit of the caller that refused the request, or empty.
	Limit string
	// Affinity is why the backend was chosen, and AffinityResult whether that
	// was where the request belongs: hit, move or miss.
	Affinity, AffinityResult string
	// Attempts are the backends that were tried, in this order.
	Attempts []Tried
	// Waited is how long it has waited until a backend, or a limit of its caller, accepted it.
	Waited time.Duration
	// FirstByte is the time to the first byte of the reply's body, or 0 if there is
	// none yet.
	FirstByte time.Duration
	// Tokens are known once the reply is over, if it reported them.
	Tokens usage.Tokens
	// TierRequested and TierServed are the service tiers of the request and its reply, by a name of
	// openaiapi.TierName.
	TierRequested, TierServed string
	// Tier is the number of the request's tier, or 0.
	Tier int
	// Estimated reports whether a count of Tokens is an estimate.
	Estimated bool
	// Aborted reports whether the reply was aborted, and Duration is how long the
	// request took then. Caddy logs a duration of 0 for it.
	Aborted  bool
	Duration time.Duration
}

// Tried is a backend that was tried, and the class of its reply.
type Tried struct{ Backend, Class string }

// PlaceholderPrefix is the prefix of every placeholder.
const PlaceholderPrefix = "http.openai_lb."

// Placeholder returns the value of a placeholder.
func (s *Summary) Placeholder(key string) (value any, ok bool) {
	switch strings.TrimPrefix(key, PlaceholderPrefix) {
	case "pool":
		return s.Pool, true
	case "caller":
		return s.Caller, true
	case "tier":
		return valueIf(s.Tier > 0, s.Tier), true
	case "tier_requested":
		return s.TierRequested, true
	case "tier_served":
		return s.TierServed, true
	case "model":
		return s.Model, true
	case "backend":
		return s.Backend, true
	case "class":
		return s.Class, true
	case "limit":
		return s.Limit, true
	case "affinity":
		return s.Affinity, true
	case "affinity_result":
		return s.AffinityResult, true
	case "attempts":
		return len(s.Attempts), true
	case "classes":
		return s.classes(), true
	case "waited":
		return valueIf(s.Waited > 0, seconds(s.Waited)), true
	case "time_to_first_byte":
		return valueIf(s.FirstByte != 0, seconds(s.FirstByte)), true
	case "aborted_after":
		return valueIf(s.Aborted, seconds(s.Duration)), true
	case "tokens_estimated":
		return valueIf(s.Estimated, true), true
	case "tokens_input":
		return valueIf(s.Tokens.Known(), s.Tokens.Input), true
	case "tokens_cached":
		return valueIf(s.Tokens.Known(), s.Tokens.Cached), true
	case "tokens_output":
		return valueIf(s.Tokens.Known(), s.Tokens.Output), true
	case "tokens_reasoning":
		return valueIf(s.Tokens.Known(), s.Tokens.Reasoning), true
	}
	return nil, false
}

// valueIf returns the value of a placeholder, or an empty text if it is not known.
func valueIf(known bool, value any) any {
	if !known {
		return ""
	}
	return value
}

// classes returns the class of each attempt: ptu=throttled,east=served.
func (s *Summary) classes() string {
	var b strings.Builder
	for i, a := range s.Attempts {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(a.Backend)
		b.WriteByte('=')
		b.WriteString(a.Class)
	}
	return b.String()
}

// noAffinity is affinity.None. That package imports packages which are observed.
const noAffinity = "none"

// MarshalLogObject implements zapcore.ObjectMarshaler. Empty values are left out.
func (s *Summary) MarshalLogObject(enc zapcore.ObjectEncoder) error {
	why := s.Affinity
	if why == noAffinity {
		why = ""
	}
	for _, field := range []struct{ name, value string }{
		{"pool", s.Pool}, {"model", s.Model}, {"backend", s.Backend}, {"class", s.Class}, {"limit", s.Limit}, {"affinity", why}, {"affinity_result", s.AffinityResult},
		{"tier_requested", s.TierRequested}, {"tier_served", s.TierServed},
	} {
		if field.value != "" {
			enc.AddString(field.name, field.value)
		}
	}
	if s.Tier > 0 {
		enc.AddInt("tier", s.Tier)
	}
	enc.AddInt("attempts", len(s.Attempts))
	if len(s.Attempts) > 0 {
		enc.AddString("classes", s.classes())
	}
	if s.Waited > 0 {
		enc.AddFloat64("waited", seconds(s.Waited))
	}
	if s.FirstByte > 0 {
		enc.AddFloat64("time_to_first_byte", seconds(s.FirstByte))
	}
	if t := s.Tokens; t.Known() {
		enc.AddInt64("tokens_input", t.Input)
		enc.AddInt64("tokens_cached", t.Cached)
		enc.AddInt64("tokens_output", t.Output)
		enc.AddInt64("tokens_reasoning", t.Reasoning)
		if s.Estimated {
			enc.AddBool("tokens_estimated", true)
		}
	}
	if s.Aborted {
		enc.AddFloat64("aborted_after", seconds(s.Duration))
	}
	return nil
}

// seconds returns a duration as it is logged: in seconds, to the millisecond.
func seconds(d time.Duration) float64 { return math.Round(d.Seconds()*1000) / 1000 }
