package openailb

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/openai-lb/caddy-openai-lb/internal/hint"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// healths keeps what is known of every backend through config reloads, and
// shares it between handlers. A key is what the backend is: its base URL and a
// fingerprint of its credential, or a bare dial address.
var healths = caddy.NewUsagePool()

// health is what is known of one backend. Reading it takes no lock.
type health struct {
	// whole is what counts for every model: the account, the way there.
	whole benches
	// models is what counts for one model, by its name at the backend. Only
	// those are in it that were benched once. The map itself never changes.
	models atomic.Pointer[map[string]*benches]

	// inFlight counts requests, by the name of the backend with max_requests.
	inFlight sync.Map

	// key is the digest of the API key that all of this is about.
	key string

	// mu guards the writing of all of it.
	mu sync.Mutex
}

// benches are those of one model, or of a whole backend.
type benches struct {
	// promise is a bench the backend asked for: nobody calls it before its time.
	promise benchSlot
	// suspicion is a bench of our own making: it is called when nobody else is left.
	suspicion benchSlot
	// fails are the failures that count towards a bench.
	fails []time.Time
}

// noBenches stands for those of a model that was never benched.
var noBenches = new(benches)

// maxModels is how many models of a backend are remembered, whatever clients
// name, and maxModelName how many bytes of a name tell them apart.
const (
	maxModels    = 256
	maxModelName = 256
)

// of returns the benches that count for a model.
func (h *health) of(model string) [2]*benches {
	known := [2]*benches{&h.whole, noBenches}
	if models := h.models.Load(); models != nil {
		if b, ok := (*models)[modelKey(model)]; ok {
			known[1] = b
		}
	}
	return known
}

// remember returns the benches of a model, to be written to. h.mu is held.
// If there are too many, it forgets the one whose benches end first, and a
// suspicion before a promise.
func (h *health) remember(model string, now time.Time) *benches {
	key := modelKey(model)
	models := make(map[string]*benches)
	if known := h.models.Load(); known != nil {
		if b, ok := (*known)[key]; ok {
			return b
		}
		maps.Copy(models, *known)
	}
	if len(models) >= maxModels {
		delete(models, slices.MinFunc(slices.Collect(maps.Keys(models)), func(a, b string) int {
			return models[a].compareEnds(models[b], now)
		}))
	}
	b := new(benches)
	models[key] = b
	h.models.Store(&models)
	return b
}

// modelKey bounds what a client can make us remember.
func modelKey(model string) string {
	if len(model) <= maxModelName {
		return model
	}
	return strings.Clone(model[:maxModelName])
}

// Destruct implements caddy.Destructor.
func (*health) Destruct() error { return nil }

// loadHealth returns the health of the backend with this key and counts one
// more user of it; the user gives it back with healths.Delete.
func loadHealth(key string) *health {
	value, _, _ := healths.LoadOrNew(key, func() (caddy.Destructor, error) { return new(health), nil })
	return value.(*health)
}

// startFresh forgets what is known of another API key than the one with this
// digest.
func (h *health) startFresh(key string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.key != "" && h.key != key {
		h.whole.promise.Store(nil)
		h.whole.suspicion.Store(nil)
		h.whole.fails = nil
		h.models.Store(nil)
	}
	h.key = key
}

func (h *health) inFlightOf(backend string) *atomic.Int64 {
	count, _ := h.inFlight.LoadOrStore(backend, new(atomic.Int64))
	return count.(*atomic.Int64)
}

// bench keeps a backend out of use for a time. Only its probe ever changes.
type bench struct {
	class        verdict.Class
	model        string // empty: all of the backend, or no model
	since, until time.Time

	// probe is when the first request after the bench was sent: 1 plus the
	// nanoseconds since until, or 0 if none was.
	probe atomic.Int64
}

// grace is how long the probe may stay unanswered before the rest follow: a
// backend that still throttles refuses at once.
func (b *bench) grace() time.Duration {
	return min(time.Second, b.until.Sub(b.since)/10)
}

// benchState is what a bench means for a request.
type benchState int

const (
	// open: no bench, or one whose time has passed and whose probe is due.
	open benchState = iota
	// probing: the time has passed, and the one request that went first is
	// not yet answered.
	probing
	// benched: not before its time.
	benched
)

type benchSlot struct{ atomic.Pointer[bench] }

// state tells what the slot means at now, and until when.
func (s *benchSlot) state(now time.Time) (benchState, time.Time) {
	b := s.Load()
	if b == nil {
		return open, time.Time{}
	}
	if now.Before(b.until) {
		return benched, b.until
	}
	if probe := b.probe.Load(); probe != 0 && now.Before(b.until.Add(time.Duration(probe-1)+b.grace())) {
		return probing, b.until
	}
	return open, time.Time{}
}

// claim takes the right to send a request at now: to be the probe of a bench
// that has passed, or one of many. It fails if another request is the probe.
// over is the bench that ended by it, if one did: the probe was not refused.
func (s *benchSlot) claim(now time.Time) (ok bool, over *bench) {
	b := s.Load()
	if b == nil {
		return true, nil
	}
	if now.Before(b.until) {
		return false, nil
	}
	if b.probe.CompareAndSwap(0, int64(now.Sub(b.until))+1) {
		return true, nil
	}
	if state, _ := s.state(now); state != open {
		return false, nil
	}
	if s.CompareAndSwap(b, nil) {
		over = b
	}
	return true, over
}

// clear ends a bench that began before an attempt which has now succeeded.
func (s *benchSlot) clear(started time.Time) (over *bench) {
	if b := s.Load(); b != nil && started.After(b.since) && s.CompareAndSwap(b, nil) {
		return b
	}
	return nil
}

// put starts or extends a bench and reports which. A bench only grows: a
// shorter one leaves it as it is.
func (s *benchSlot) put(b *bench) (started bool) {
	current := s.Load()
	running := current != nil && b.since.Before(current.until)
	if running {
		if !b.until.After(current.until) {
			return false
		}
		b.since = current.since
	}
	s.Store(b)
	return !running
}

// slot is where a bench of this class belongs.
func (b *benches) slot(class verdict.Class) *benchSlot {
	if class.Promise() {
		return &b.promise
	}
	return &b.suspicion
}

// returns tells when the benches end.
func (b *benches) returns(now time.Time) time.Time {
	_, promised := b.promise.state(now)
	_, suspected := b.suspicion.state(now)
	if promised.After(suspected) {
		return promised
	}
	return suspected
}

func (b *benches) compareEnds(other *benches, now time.Time) int {
	_, promised := b.promise.state(now)
	_, othersPromise := other.promise.state(now)
	return cmp.Or(promised.Compare(othersPromise), b.returns(now).Compare(other.returns(now)))
}

// scope returns the benches that a class speaks for. h.mu is held.
func (h *health) scope(class verdict.Class, model string, now time.Time) *benches {
	if class.WholeBackend() {
		return &h.whole
	}
	return h.remember(model, now)
}

// failed counts a failure at now and reports whether it is one too many:
// maxFails within duration.
func (h *health) failed(class verdict.Class, model string, now time.Time, maxFails int, duration time.Duration) bool {
	if maxFails == 1 {
		return true
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	b := h.scope(class, model, now)
	recent := slices.DeleteFunc(b.fails, func(at time.Time) bool { return now.Sub(at) >= duration })
	if len(recent)+1 < maxFails {
		b.fails = append(recent, now)
		return false
	}
	b.fails = nil
	return true
}

// claim takes the right to send a request for a model to a member whose
// benches, if any, have passed.
func (m *member) claim(model string, now time.Time) bool {
	for _, b := range m.health.of(model) {
		for _, slot := range []*benchSlot{&b.promise, &b.suspicion} {
			ok, over := slot.claim(now)
			m.logBack(over)
			if !ok {
				return false
			}
		}
	}
	return true
}

// served ends the benches that an attempt, begun at started, has disproved.
func (m *member) served(model string, started time.Time) {
	for _, b := range m.health.of(model) {
		m.logBack(b.promise.clear(started))
		m.logBack(b.suspicion.clear(started))
	}
}

// bench keeps the member out of use from now on, for what a reply means.
func (m *member) bench(class verdict.Class, model string, status int, now time.Time, wait time.Duration, source hint.Source) {
	b := &bench{class: class, since: now, until: now.Add(wait)}
	if !class.WholeBackend() {
		b.model = modelKey(model)
	}
	m.health.mu.Lock()
	started := m.health.scope(class, model, now).slot(class).put(b)
	m.health.mu.Unlock()
	if !started {
		return
	}
	if c := m.logger.Check(b.level(), "backend benched"); c != nil {
		c.Write(zap.String("backend", m.name), b.modelField(), zap.String("class", string(class)), zap.Int("status", status),
			zap.Float64("seconds", wait.Seconds()), zap.String("hint", string(source)))
	}
}

func (m *member) logBack(over *bench) {
	if over == nil {
		return
	}
	if c := m.logger.Check(min(over.level(), zap.InfoLevel), "backend back"); c != nil {
		c.Write(zap.String("backend", m.name), over.modelField(), zap.String("class", string(over.class)),
			zap.Float64("seconds", over.until.Sub(over.since).Seconds()))
	}
}

// modelField names the model that a bench is about, unless it is about all.
func (b *bench) modelField() zap.Field {
	if b.model == "" {
		return zap.Skip()
	}
	return zap.String("model", b.model)
}

// level is the log level for a bench: what a person must mend is an error,
// what failed by itself a warning. A provisioned deployment under full load
// throttles many times a second for some milliseconds, so a throttle of less
// than a second is only for debugging.
func (b *bench) level() zapcore.Level {
	switch b.class {
	case verdict.Credential, verdict.NotPermitted, verdict.NoModel, verdict.Quota:
		return zap.ErrorLevel
	case verdict.Throttled, verdict.Overloaded:
		if b.until.Sub(b.since) < time.Second {
			return zap.DebugLevel
		}
		return zap.InfoLevel
	}
	return zap.WarnLevel
}
