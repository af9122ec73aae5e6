package observe

import (
	"math"
	"strings"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/openai-lb/caddy-openai-lb/internal/usage"
)

// Summary describes a request and its reply, in placeholders and in the access
// log. Both have the same names.
type Summary struct {
	Pool, Caller, Model string
	// Backend is the one that answered, or the last one that was tried.
	Backend string
	// Class is the class of the answer.
	Class string
	// Limit is the limit of the caller that refused the request, or empty.
	// LimitAllowed is how much of it may be used, LimitUsed how much was, and
	// LimitRequested how much the request needs.
	Limit                                   string
	LimitAllowed, LimitUsed, LimitRequested int64
	// Affinity is why the backend was chosen, and AffinityResult whether that
	// was where the request belongs: hit, move or miss.
	Affinity, AffinityResult string
	// Attempts are the backends that were tried, in this order.
	Attempts []Tried
	// Waited is how long it has waited until a backend, or a limit of its
	// caller, accepted it.
	Waited time.Duration
	// FirstByte is the time to the first byte of the reply's body, or 0 if
	// there is none yet.
	FirstByte time.Duration
	// Tokens are known once the reply is over, if it reported them.
	Tokens usage.Tokens
	// TierRequested and TierServed are the service tiers of the request and its
	// reply, by a name of openaiapi.TierName.
	TierRequested, TierServed string
	// Tier is the number of the request's tier, or 0.
	Tier int
	// Estimated reports whether a count of Tokens is an estimate.
	Estimated bool
	// Aborted reports whether the reply was aborted, and Duration is how long
	// the request took then. Caddy logs a duration of 0 for it.
	Aborted  bool
	Duration time.Duration
}

// Tried is a backend that was tried, and the class of its reply.
type Tried struct{ Backend, Class string }

// PlaceholderPrefix is the prefix of every placeholder.
const PlaceholderPrefix = "http.openai_lb."

// fields are all values by their names, in the order of the log. One that is
// not known has no type.
func (s *Summary) fields() [24]zap.Field {
	return [...]zap.Field{
		text("pool", s.Pool), text("model", s.Model), text("backend", s.Backend), text("class", s.Class),
		text("limit", s.Limit),
		known(s.Limit != "", zap.Int64("limit_allowed", s.LimitAllowed)),
		known(s.Limit != "", zap.Int64("limit_used", s.LimitUsed)),
		known(s.Limit != "", zap.Int64("limit_requested", s.LimitRequested)),
		text(affinityField, s.Affinity), text("affinity_result", s.AffinityResult),
		text("tier_requested", s.TierRequested), text("tier_served", s.TierServed),
		known(s.Tier > 0, zap.Int("tier", s.Tier)),
		zap.Int("attempts", len(s.Attempts)), text("classes", s.classes()),
		known(s.Waited > 0, zap.Float64("waited", seconds(s.Waited))),
		known(s.FirstByte > 0, zap.Float64("time_to_first_byte", seconds(s.FirstByte))),
		known(s.Tokens.Known(), zap.Int64("tokens_input", s.Tokens.Input)),
		known(s.Tokens.Known(), zap.Int64("tokens_cached", s.Tokens.Cached)),
		known(s.Tokens.Known(), zap.Int64("tokens_output", s.Tokens.Output)),
		known(s.Tokens.Known(), zap.Int64("tokens_reasoning", s.Tokens.Reasoning)),
		known(s.Estimated, zap.Bool("tokens_estimated", true)),
		known(s.Aborted, zap.Float64("aborted_after", seconds(s.Duration))),
		text(callerField, s.Caller),
	}
}

const (
	callerField   = "caller" // which the log does not have here
	affinityField = "affinity"
	// noAffinity is affinity.None. That package imports packages which are
	// observed.
	noAffinity = "none"
)

func known(isKnown bool, f zap.Field) zap.Field {
	if !isKnown {
		f.Type = zapcore.SkipType
	}
	return f
}

func text(name, value string) zap.Field { return known(value != "", zap.String(name, value)) }

// Placeholder returns the value of a placeholder. It is empty if it is not
// known.
func (s *Summary) Placeholder(key string) (value any, ok bool) {
	name := strings.TrimPrefix(key, PlaceholderPrefix)
	for _, f := range s.fields() {
		switch {
		case f.Key != name:
			continue
		case f.Type == zapcore.Int64Type:
			return f.Integer, true
		case f.Type == zapcore.Float64Type:
			return math.Float64frombits(uint64(f.Integer)), true //nolint:gosec // as zap has it
		case f.Type == zapcore.BoolType:
			return true, true
		}
		return f.String, true
	}
	return nil, false
}

// classes returns the class of each attempt: ptu=throttled,east=served.
func (s *Summary) classes() string {
	classes := make([]string, len(s.Attempts))
	for i, a := range s.Attempts {
		classes[i] = a.Backend + "=" + a.Class
	}
	return strings.Join(classes, ",")
}

// MarshalLogObject implements zapcore.ObjectMarshaler. Values that are not
// known are left out.
func (s *Summary) MarshalLogObject(enc zapcore.ObjectEncoder) error {
	for _, f := range s.fields() {
		if f.Key != callerField && (f.Key != affinityField || f.String != noAffinity) {
			f.AddTo(enc)
		}
	}
	return nil
}

// seconds returns a duration as it is logged: in seconds, to the millisecond.
func seconds(d time.Duration) float64 { return math.Round(d.Seconds()*1000) / 1000 }
