package observe

import (
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// The names of the events.
const (
	cooldownStartedEvent = "openai_lb.cooldown_started"
	cooldownEndedEvent   = "openai_lb.cooldown_ended"
	allThrottledEvent    = "openai_lb.all_throttled"
	nearLimitEvent       = "openai_lb.caller_near_limit"
	atLimitEvent         = "openai_lb.caller_at_limit"
)

const (
	// minCooldown is the shortest cooldown that is an event: a provisioned
	// deployment under full load throttles for some milliseconds, many times a
	// second.
	minCooldown = time.Second
	// allThrottledInterval is the shortest time between two events that every
	// backend throttles: that may be true for thousands of requests a second.
	allThrottledInterval = time.Minute
	// maxQueue is how many events can wait for slow handlers.
	maxQueue = 256
)

// Events emits Caddy's events of a pool. Their handlers may take long, and run
// one after the other in a goroutine that lasts as long as there are events.
type Events struct {
	*Log
	pool string
	app  *caddyevents.App
	ctx  caddy.Context
	// since is when the config was loaded.
	since time.Time

	noModel reportLimiter

	mu sync.Mutex
	// begun are the cooldowns whose beginning was an event.
	begun map[cooldownKey]bool
	// throttled is when it was last an event that every backend throttles, and
	// refused how many requests were refused since then.
	throttled time.Time
	refused   int
	queue     []event
	emits     bool // a goroutine is at work
	dropped   int
}

type cooldownKey struct {
	backend               string
	scope                 pool.Scope
	throttle, whole, lost bool
}

type event struct {
	name string
	data map[string]any
}

// NewEvents returns the events of a pool, and its log. They come from the
// module that is being provisioned with ctx.
func NewEvents(ctx caddy.Context, pool string) (*Events, error) {
	app, err := ctx.App("events")
	if err != nil {
		return nil, err
	}
	return &Events{Log: NewLog(ctx.Logger(), pool), pool: pool, app: app.(*caddyevents.App), ctx: ctx,
		since: time.Now()}, nil
}

// Happened implements pool.Listener. A cooldown that another replica reports is
// an event of that replica.
func (s *Events) Happened(e pool.Event) {
	if e.Remote {
		return
	}
	switch e.Happening {
	case pool.Began, pool.Grew, pool.Turned:
		if isLong(e.Cooldown) && s.app.ShouldEmit(cooldownStartedEvent) && s.noModel.dueNoModel(e) {
			s.started(e)
		}
	case pool.Ended:
		s.ended(e)
	}
}

func (s *Events) started(e pool.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := keyOf(e)
	if s.begun[key] && e.Happening == pool.Grew {
		return
	}
	if s.begun == nil {
		s.begun = make(map[cooldownKey]bool)
	}
	s.begun[key] = true
	data := s.data(e)
	data["status"], data["hint"], data["cause"], data["error"] = e.Cooldown.Status, e.Cooldown.Hint, e.Cooldown.Cause,
		e.Cooldown.Error
	s.emit(cooldownStartedEvent, data)
}

func (s *Events) ended(e pool.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := keyOf(e)
	before := e.Cooldown.Since.Before(s.since) && isLong(e.Cooldown) &&
		verdict.Class(e.Cooldown.Class) != verdict.NoModel
	if s.begun[key] || before {
		delete(s.begun, key)
		s.emit(cooldownEndedEvent, s.data(e))
	}
}

func isLong(c pool.Cooldown) bool { return c.Until.Sub(c.Since) >= minCooldown }

func keyOf(e pool.Event) cooldownKey {
	return cooldownKey{e.Member.Name, e.Cooldown.Scope(), e.Cooldown.Throttle, e.Cooldown.Whole, e.Cooldown.Unreachable}
}

func (s *Events) data(e pool.Event) map[string]any {
	return map[string]any{
		"pool": s.pool, "backend": e.Member.Name, "deployment": e.Cooldown.Model, "operation": e.Cooldown.Operation, "service_tier": e.Cooldown.Tiers.String(), "class": e.Cooldown.Class,
		"seconds": seconds(lengthOf(e)),
	}
}

// AllThrottled records that a request was refused because every backend
// throttles.
func (s *Events) AllThrottled() {
	if s == nil || !s.app.ShouldEmit(allThrottledEvent) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refused++
	now := time.Now()
	if !s.throttled.IsZero() && now.Sub(s.throttled) < allThrottledInterval {
		return
	}
	s.emit(allThrottledEvent, map[string]any{"pool": s.pool, "requests": s.refused})
	s.throttled, s.refused = now, 0
}

// Crossed logs, and emits as an event, that the use of a caller's limit has
// reached a mark. It does nothing for a limit per second, which may reach one
// many times a minute.
func (s *Events) Crossed(x ratelimit.Crossing) {
	if x.Limit.Unit < ratelimit.Minute {
		return
	}
	log, message, name := s.Info, "caller nears its limit", nearLimitEvent
	if x.Percent == 100 {
		log, message, name = s.Warn, "caller reached its limit", atLimitEvent
	}
	kind, limit := x.Limit.Kind.String(), x.Limit.String()
	log(message, zap.String("caller", x.Caller), zap.String("kind", kind), zap.String("limit", limit),
		zap.Int64("used", x.Used), zap.Int64("allowed", x.Allowed))
	s.mu.Lock()
	defer s.mu.Unlock()
	s.emit(name, map[string]any{"pool": s.pool, "caller": x.Caller, "kind": kind, "limit": limit, "used": x.Used,
		"allowed": x.Allowed})
}

// emit queues an event. The caller holds the lock.
func (s *Events) emit(name string, data map[string]any) {
	if !s.app.ShouldEmit(name) {
		return
	}
	if len(s.queue) >= maxQueue {
		s.dropped++
		return
	}
	s.queue = append(s.queue, event{name, data})
	if !s.emits {
		s.emits = true
		go s.work()
	}
}

// work emits the queued events. It ends when the queue is empty, or the config
// is gone.
func (s *Events) work() {
	for {
		e, ok := s.next()
		if !ok {
			return
		}
		s.handle(e)
	}
}

// handle calls the handlers of an event. One that panics must not end Caddy.
func (s *Events) handle(e event) {
	defer func() {
		if panicked := recover(); panicked != nil {
			s.Error("event handler panicked", zap.String("event", e.name), zap.Any("error", panicked), zap.Stack("stack"))
		}
	}()
	s.app.Emit(s.ctx, e.name, e.data)
}

func (s *Events) next() (e event, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctx.Err() != nil {
		s.queue = nil
	}
	if s.dropped > 0 && len(s.queue) < maxQueue {
		s.Warn("events dropped: their handlers are too slow", zap.Int("events", s.dropped))
		s.dropped = 0
	}
	if len(s.queue) == 0 {
		s.emits = false
		return event{}, false
	}
	e = s.queue[0]
	s.queue = s.queue[1:]
	return e, true
}
