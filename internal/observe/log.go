// Package observe reports to people and to other programs what happens to
// backends and requests. It decides nothing: a build that reported nothing
// would serve the same requests in the same way.
//
// There are four kinds of report:
//
//   - About backends: [Log] and [Events] listen to a pool. Log writes a line
//     when a cooldown starts or ends, and when an operator gives an order.
//     Events emits the same as events of Caddy, which users can handle with
//     their own commands (TestEventsReportCooldowns).
//   - About one request: a [Summary] becomes placeholders and fields of the
//     access log (TestTheAccessLogSaysWhatBecameOfARequest). A [Span] is the
//     trace of one attempt, and costs nothing without tracing
//     (TestWithoutARecordedSpanThereIsNone).
//   - About the configuration: a [Trail] writes an audit log of changed options
//     and keys (TestALineForEachKeyThatChanges), and WarnOfSites finds sites
//     that anyone can use.
//   - About everything else that Caddy logs: [LogEncoder] is the log format
//     openai_lb, which hides keys wherever SDKs put them
//     (TestALogHoldsNoKeyWhereverItWasPut).
//
// What thousands of requests meet in the same second is reported once, with a
// count or after a pause. No report contains a key (TestNoKeyIsEverShown).
package observe

import (
	"maps"
	"sync"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// Log is the log of a pool. Its lines have the pool's name. It records the
// beginnings and ends of cooldowns, and the orders of operators.
type Log struct {
	*zap.Logger
	// Audit is for what operators order and change.
	Audit          *zap.Logger
	noModel, loops reportLimiter
}

// NewLog returns the log of the pool of this name.
func NewLog(logger *zap.Logger, pool string) *Log {
	return &Log{Logger: logger.With(zap.String("pool", pool)), Audit: AuditLogger(logger, pool)}
}

// Happened implements pool.Listener.
func (l *Log) Happened(e pool.Event) {
	switch level := levelOf(e.Cooldown); e.Happening {
	case pool.Began, pool.Turned:
		if !l.noModel.dueNoModel(e) {
			return
		}
		if c := l.Check(level, "cooldown started"); c != nil {
			c.Write(append(fields(e), zap.Int("status", e.Cooldown.Status), zap.String("hint", e.Cooldown.Hint),
				optional("cause", e.Cooldown.Cause), optional("error", e.Cooldown.Error), nextOf(e.Cooldown))...)
		}
	case pool.Ended:
		if c := l.Check(min(level, zap.InfoLevel), "cooldown ended"); c != nil {
			c.Write(fields(e)...)
		}
	case pool.FellSilent:
		l.Warn("backend silent",
			append(silenceFields(e), zap.String("next", verdict.RemedyOf(verdict.Silent, "").Next))...)
	case pool.BecameSlow:
		l.Warn("backend slow", silenceFields(e)...)
	case pool.Answered:
		l.Info("backend answers again",
			append(silenceFields(e), zap.Float64("seconds", seconds(time.Since(e.Silence.Since))))...)
	case pool.CheckFailed:
		l.Warn("backend fails its health checks", zap.String("backend", e.Member.Name),
			zap.String("class", e.Reason.Class),
			zap.Int("status", e.Reason.Status), optional("cause", e.Reason.Cause), optional("error", e.Reason.Error))
	case pool.CheckPassed:
		l.Info("backend passes its health checks", zap.String("backend", e.Member.Name))
	case pool.Drained:
		l.Audit.Info("backend drained", orderFields(e)...)
	case pool.Resumed:
		l.Audit.Info("backend resumed", orderFields(e)...)
	case pool.WasReset:
		l.Audit.Info("backend reset", orderFields(e)...)
	}
}

func fields(e pool.Event) []zap.Field {
	return []zap.Field{zap.String("backend", e.Member.Name), optional("deployment", e.Cooldown.Model),
		optional("operation", e.Cooldown.Operation), optional("service_tier", e.Cooldown.Tiers.String()),
		zap.String("class", e.Cooldown.Class), zap.Float64("seconds", seconds(lengthOf(e))), elsewhereField(e)}
}

// lengthOf returns how long the event's cooldown lasts or, if it has ended, has
// lasted. A served request or an operator may end it early.
func lengthOf(e pool.Event) time.Duration {
	if e.Happening == pool.Ended {
		return time.Since(e.Cooldown.Since)
	}
	return e.Cooldown.Until.Sub(e.Cooldown.Since)
}

func silenceFields(e pool.Event) []zap.Field {
	return []zap.Field{zap.String("backend", e.Member.Name), optional("deployment", e.Silence.Model),
		optional("operation", e.Silence.Operation)}
}

func orderFields(e pool.Event) []zap.Field {
	return []zap.Field{zap.String("backend", e.Member.Name), optional("by", e.Order.By),
		optional("reason", e.Order.Reason), elsewhereField(e)}
}

func elsewhereField(e pool.Event) zap.Field {
	if e.Remote {
		return zap.Bool("elsewhere", true)
	}
	return zap.Skip()
}

// nextOf returns the next step for an operator, if the cooldown lasts until it
// is taken.
func nextOf(c pool.Cooldown) zap.Field {
	if remedy := verdict.RemedyOf(verdict.Class(c.Class), c.Cause); remedy.NeedsOperator {
		return zap.String("next", remedy.Next)
	}
	return zap.Skip()
}

func optional(key, value string) zap.Field {
	if value == "" {
		return zap.Skip()
	}
	return zap.String(key, value)
}

// levelOf returns the log level for a cooldown. It is an error if an operator
// has to change a configuration, and a warning if the backend failed. A
// throttle of less than a second is only for debugging: a provisioned
// deployment under full load throttles for some milliseconds, many times a
// second.
func levelOf(c pool.Cooldown) zapcore.Level {
	switch class := verdict.Class(c.Class); {
	case verdict.RemedyOf(class, c.Cause).NeedsOperator:
		return zap.ErrorLevel
	case class == verdict.Throttled, class == verdict.Overloaded:
		if c.Until.Sub(c.Since) < time.Second {
			return zap.DebugLevel
		}
		return zap.InfoLevel
	}
	return zap.WarnLevel
}

// Looped reports that the requests to a backend come back to the balancer, so
// that its URL is wrong.
func (l *Log) Looped(backend string, now time.Time) {
	if l.loops.due(backend, now) {
		l.Error("backend leads back to the load balancer",
			zap.String("backend", backend), zap.String("class", string(verdict.Loop)))
	}
}

// reportLimiter limits how often a fault of a backend is reported that each
// request may meet.
type reportLimiter struct {
	mu   sync.Mutex
	last map[string]time.Time // by the name of the backend
}

// reportInterval is the shortest time between two such reports of a backend.
const reportInterval = time.Minute

func (l *reportLimiter) due(backend string, now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if last, ok := l.last[backend]; ok && now.Sub(last) < reportInterval {
		return false
	}
	maps.DeleteFunc(l.last, func(_ string, last time.Time) bool { return now.Sub(last) >= reportInterval })
	if l.last == nil {
		l.last = make(map[string]time.Time)
	}
	l.last[backend] = now
	return true
}

// dueNoModel reports whether an event is logged: clients can make up any number
// of models that a backend lacks.
func (l *reportLimiter) dueNoModel(e pool.Event) bool {
	return e.Cooldown.Class != string(verdict.NoModel) || l.due(e.Member.Name, e.Cooldown.Since)
}
