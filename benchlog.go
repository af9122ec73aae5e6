package openailb

import (
	"sync"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// benchLog logs when a backend is benched and when it is back.
type benchLog struct {
	balancer *balancer

	mu sync.Mutex
	// noModel is when it was last logged that a backend lacks a model.
	noModel map[*pool.Member]time.Time
}

// noModelInterval is how often it is logged that a backend lacks a model:
// clients can make up any number of models.
const noModelInterval = time.Minute

// Happened implements pool.Listener.
func (l *benchLog) Happened(e pool.Event) {
	level := benchLevel(e.Bench)
	switch e.Happening {
	case pool.Began:
		if e.Bench.Class == string(verdict.NoModel) && !l.dueNoModel(e) {
			return
		}
		if c := l.balancer.logger.Check(level, "backend benched"); c != nil {
			c.Write(append(l.fields(e), zap.Int("status", e.Bench.Status), zap.String("hint", e.Bench.Hint))...)
		}
	case pool.Ended:
		if c := l.balancer.logger.Check(min(level, zap.InfoLevel), "backend back"); c != nil {
			c.Write(l.fields(e)...)
		}
	}
}

// dueNoModel reports whether it is time to log that a backend lacks a model.
func (l *benchLog) dueNoModel(e pool.Event) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if last, ok := l.noModel[e.Member]; ok && e.Bench.Since.Sub(last) < noModelInterval {
		return false
	}
	if l.noModel == nil {
		l.noModel = make(map[*pool.Member]time.Time)
	}
	l.noModel[e.Member] = e.Bench.Since
	return true
}

func (l *benchLog) fields(e pool.Event) []zap.Field {
	model := zap.Skip()
	if e.Bench.Model != "" {
		model = zap.String("model", e.Bench.Model)
	}
	return []zap.Field{zap.String("pool", l.balancer.Name), zap.String("backend", e.Member.Name), model, zap.String("class", e.Bench.Class),
		zap.Float64("seconds", e.Bench.Until.Sub(e.Bench.Since).Seconds())}
}

// benchLevel is the log level for a bench. It is an error if somebody has to
// change a configuration, and a warning if the backend failed. A throttle of
// less than a second is only for debugging: a provisioned deployment under full
// load throttles for some milliseconds, many times a second.
func benchLevel(b pool.Bench) zapcore.Level {
	switch verdict.Class(b.Class) {
	case verdict.Credential, verdict.NotPermitted, verdict.NoModel, verdict.Quota:
		return zap.ErrorLevel
	case verdict.Throttled, verdict.Overloaded:
		if b.Until.Sub(b.Since) < time.Second {
			return zap.DebugLevel
		}
		return zap.InfoLevel
	}
	return zap.WarnLevel
}
