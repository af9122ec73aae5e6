package announce

import (
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/summary"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// The names of the events.
const (
	Benched      = "openai_lb.benched"
	Recovered    = "openai_lb.recovered"
	AllThrottled = "openai_lb.all_throttled"
)

const (
	// minBench is how long a bench lasts at least to be an event: a provisioned
	// deployment under full load throttles for some milliseconds, many times a
	// second.
	minBench = time.Second
	// allThrottledInterval is how often it is an event that every backend
	// throttles: that may be so for thousands of requests a second.
	allThrottledInterval = time.Minute
	// maxQueue is how many events wait for handlers that are slow.
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

	noModel limiter

	mu sync.Mutex
	// told are the benches of which an event told that they began.
	told map[toldBench]bool
	// throttled is when it was last an event that every backend throttles, and
	// refused how many requests were refused since then.
	throttled time.Time
	refused   int
	queue     []event
	emits     bool // a goroutine is at work
	lost      int
}

type toldBench struct {
	backend, model        string
	throttle, whole, lost bool
}

type event struct {
	name string
	data map[string]any
}

// NewEvents returns the events of a pool, and its log. They come from the module
// that is being provisioned with ctx.
func NewEvents(ctx caddy.Context, pool string) (*Events, error) {
	app, err := ctx.App("events")
	if err != nil {
		return nil, err
	}
	return &Events{Log: NewLog(ctx.Logger(), pool), pool: pool, app: app.(*caddyevents.App), ctx: ctx, since: time.Now()}, nil
}

// Happened implements pool.Listener. What another replica tells is its event.
func (s *Events) Happened(e pool.Event) {
	if e.Remote {
		return
	}
	switch e.Happening {
	case pool.Began, pool.Grew, pool.Turned:
		if isLong(e.Bench) && s.app.ShouldEmit(Benched) && s.noModel.due(e) {
			s.benched(e)
		}
	case pool.Ended:
		s.ended(e)
	}
}

func (s *Events) benched(e pool.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	its := toldOf(e)
	if s.told[its] && e.Happening == pool.Grew {
		return
	}
	if s.told == nil {
		s.told = make(map[toldBench]bool)
	}
	s.told[its] = true
	data := s.data(e)
	data["status"], data["hint"], data["cause"], data["error"] = e.Bench.Status, e.Bench.Hint, e.Bench.Cause, e.Bench.Error
	s.emit(Benched, data)
}

func (s *Events) ended(e pool.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	its := toldOf(e)
	before := e.Bench.Since.Before(s.since) && isLong(e.Bench) && verdict.Class(e.Bench.Class) != verdict.NoModel
	if s.told[its] || before {
		delete(s.told, its)
		s.emit(Recovered, s.data(e))
	}
}

func isLong(b pool.Bench) bool { return b.Until.Sub(b.Since) >= minBench }

func toldOf(e pool.Event) toldBench {
	return toldBench{e.Member.Name, e.Bench.Model, e.Bench.Throttle, e.Bench.Whole, e.Bench.Unreachable}
}

func (s *Events) data(e pool.Event) map[string]any {
	return map[string]any{
		"pool": s.pool, "backend": e.Member.Name, "deployment": e.Bench.Model, "class": e.Bench.Class,
		"seconds": summary.Seconds(e.Bench.Until.Sub(e.Bench.Since)),
	}
}

// AllThrottled takes in that a request was refused because every backend
// throttles.
func (s *Events) AllThrottled() {
	if s == nil || !s.app.ShouldEmit(AllThrottled) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refused++
	now := time.Now()
	if !s.throttled.IsZero() && now.Sub(s.throttled) < allThrottledInterval {
		return
	}
	s.emit(AllThrottled, map[string]any{"pool": s.pool, "requests": s.refused})
	s.throttled, s.refused = now, 0
}

// emit queues an event. The caller holds the lock.
func (s *Events) emit(name string, data map[string]any) {
	if !s.app.ShouldEmit(name) {
		return
	}
	if len(s.queue) >= maxQueue {
		s.lost++
		return
	}
	s.queue = append(s.queue, event{name, data})
	if !s.emits {
		s.emits = true
		go s.work()
	}
}

// work emits what is queued, and ends when there is no more, or the config is
// gone.
func (s *Events) work() {
	for {
		e, ok := s.next()
		if !ok {
			return
		}
		s.tell(e)
	}
}

// tell has the handlers handle an event. One that panics must not end Caddy.
func (s *Events) tell(e event) {
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
	if s.lost > 0 && len(s.queue) < maxQueue {
		s.Warn("events dropped: their handlers are too slow", zap.Int("events", s.lost))
		s.lost = 0
	}
	if len(s.queue) == 0 {
		s.emits = false
		return event{}, false
	}
	e = s.queue[0]
	s.queue = s.queue[1:]
	return e, true
}
