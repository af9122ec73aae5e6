package quota

import "time"

// Cooldown is a period in which a backend gets no requests for a model.
type Cooldown struct {
	// Since is when the cooldown started, and Until is when it ends.
	Since, Until time.Time
	// Throttle reports whether the backend asked for the cooldown, and Named
	// whether it named the time.
	Throttle, Named bool
	// Remote reports whether a request of another replica caused the cooldown.
	Remote bool
}

// CoolDown records that a cooldown has started or grown.
func (m *Meter) CoolDown(c Cooldown, now time.Time) {
	end, at := At(c.Until), At(now)
	if end-At(c.Since) > longCooldown {
		m.ramp.Store(&ramp{begins: end, sent: m.sent.Load()})
	}
	if !c.Throttle {
		return
	}
	m.unexplained.Store(!m.explains(at))
	m.seeThrottle(c.Until)
	if c.Named {
		m.learnLimit(end, at)
		m.drain.throttle(c, end, at, m.allowances[tokens].estimated.Load())
	}
}

// Window returns the length of the windows of the backend's limits, as far as
// it is known, and 0 for a backend that works off requests continuously.
func (m *Meter) Window(now time.Time) (length time.Duration) {
	if m.drain.Load() != nil {
		return 0
	}
	at := At(now)
	if l := m.current(at); l != nil {
		length = l.length
	}
	for i := range m.allowances {
		if a := &m.allowances[i]; int64(at) < a.until.Load() {
			length = max(length, time.Duration(a.window.Load()))
		}
	}
	return length
}

// explains reports whether the backend's own replies agree with a throttle.
// They do unless they say that much is left.
func (m *Meter) explains(now Instant) bool {
	if r := reading(m.readings[utilization].Load()); r.isFresh(fades[utilization], now.millis()) {
		used, _ := r.unpack()
		return float64(used) > usedUp*usedSteps
	}
	a := &m.allowances[tokens]
	return int64(now) >= a.until.Load() || float64(a.left(now)) < (1-usedUp)*float64(a.most.Load())
}

// Disprove records that a cooldown was over before its end, because a request
// was served during it, or an operator ended it. It removes everything that the
// cooldown has taught about its end: that nothing is left until then, that a
// window begins then, and that requests return step by step after that. After
// the cooldown's end, it has no effect.
func (m *Meter) Disprove(c Cooldown, now time.Time) {
	at := At(now)
	if at >= At(c.Until) {
		return
	}
	for known := m.readings[throttle].Load(); ; known = m.readings[throttle].Load() {
		_, until := reading(known).unpack()
		if until <= at.millis() || m.readings[throttle].CompareAndSwap(known, uint64(pack(1, instant(c.Since)))) {
			break
		}
	}
	if l := m.learned.Load(); l != nil && l.began > at {
		m.learned.CompareAndSwap(l, nil)
	}
	if r := m.ramp.Load(); r != nil && r.begins > at {
		m.ramp.CompareAndSwap(r, nil)
	}
}

// IsFull reports whether requests should pass the backend over while another
// one can serve them. That is so while the backend is predicted to refuse them,
// or while it gets its requests back step by step after a long cooldown, as the
// package comment says.
func (m *Meter) IsFull(now Instant) bool {
	if m.drain.isFull(now, m.allowances[tokens].estimated.Load()) {
		return true
	}
	r := m.ramp.Load()
	if r == nil {
		return false
	}
	full, ended := r.isFull(now, m.sent.Load())
	if ended {
		m.ramp.CompareAndSwap(r, nil)
	}
	return full
}
