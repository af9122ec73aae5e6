// Package meter counts what callers use, and admits their requests while they are within their limits.
//
// A caller may have several limits, each a number of requests or tokens in a second, a minute, an hour,
// a day or a month. Before a request is sent, Caller.Admit estimates its tokens. If no limit refuses it,
// all limits are charged with the estimate; otherwise none is. When the request is over, Settle replaces
// the estimate with its real cost, once. So requests that run at the same time cannot exceed a limit
// together, which they can if they are only charged afterwards.
//
// All windows follow the clock. A day and a month are those of the calendar. The shorter ones slide: the
// use of a minute is that of the current minute and, of the minute before, the part that the last 60 s
// still cover, as if it had been spread evenly. A result is rounded up. So a very small limit is reached
// late rather than exceeded.
//
// With several replicas, each is the only writer of its own use (Usage), and adds up what it hears of the
// use of the others (Heard). A replica that hears no others may use its share of each limit (Share).
//
// Nothing here reads the clock, and no method calls another package while it holds a lock.
package meter

import (
	"math/bits"
	"time"
)

// meter is the use of one limit. Its caller's mutex guards it.
type meter struct {
	// limit is the caller's. Amount 0: the use is only counted.
	limit Limit
	// then is the number of the tier of requests over the limit. 0: they are refused.
	then int
	// window is the current one. before is when the one before it began: where that window is not kept,
	// it is when the current one began.
	window
	before int64
	// own is what this replica was charged with, and wrote reports in which windows it was charged at all.
	own   sums
	wrote struct{ current, previous bool }
	// figures is what is known of other replicas, and others are its sums.
	figures []figure
	others  sums
	// lost is the use in this window when the other replicas were lost: of this one, and of all.
	lost struct{ own, all int64 }
	// marked is the largest of the marks that were reported in this window, in percent.
	marked int
	// refused and demoted are how many requests this limit refused or gave another tier.
	refused, demoted uint64
}

// sums are those of the current window and the one before.
type sums struct{ current, previous int64 }

// roll makes the window the one of now.
func (m *meter) roll(id ID, now int64, location *time.Location) {
	if m.holds(now) {
		return
	}
	next := windowAt(id.Unit(), now, location)
	switch ahead := next.index - m.index; ahead {
	case 0: // only midnight is at another time
	case 1:
		m.own = sums{previous: m.own.current}
		m.wrote.previous, m.wrote.current = m.wrote.current, false
		m.before = m.start
	case -1: // the clock was set back
		m.own = sums{current: add(m.own.current, m.own.previous)}
		m.wrote.current, m.wrote.previous = m.wrote.current || m.wrote.previous, false
		m.before = next.start
	default:
		m.own = sums{}
		m.wrote.current, m.wrote.previous = false, false
		m.before = next.start
	}
	if next.index != m.index {
		m.lost.own, m.lost.all, m.marked = 0, 0, 0
	}
	m.window = next
	m.sumOthers()
}

// charge adds to the use of the current window.
func (m *meter) charge(amount int64) {
	m.own.current, m.wrote.current = add(m.own.current, amount), true
}

// refund takes from the window of a time, if it is kept.
func (m *meter) refund(amount, at int64) {
	switch {
	case m.holds(at):
		m.own.current = max(0, m.own.current-amount)
	case m.before <= at && at < m.start:
		m.own.previous = max(0, m.own.previous-amount)
	}
}

// counts returns what counts of the current and the previous window. apart reports whether the other
// replicas do not count.
func (m *meter) counts(apart bool) (current, previous int64) {
	current, previous = m.own.current, m.own.previous
	if !apart {
		current, previous = add(current, m.others.current), add(previous, m.others.previous)
	}
	if m.calendar() {
		previous = 0
	}
	return current, previous
}

func (m *meter) calendar() bool { return m.limit.Unit.Calendar() }

// use returns how much of the limit is used now.
func (m *meter) use(now int64, apart bool) int64 {
	current, previous := m.counts(apart)
	if previous == 0 {
		return current
	}
	length := uint64(m.end - m.start)
	high, low := bits.Mul64(uint64(previous), uint64(m.end-now))
	part, rest := bits.Div64(high, low, length)
	if rest > 0 {
		part++
	}
	return add(current, int64(part))
}

// allowed returns how much this replica may use in the window. replicas is the number of replicas that
// share the limit without hearing each other, or 0.
func (m *meter) allowed(replicas int) int64 {
	if replicas == 0 {
		return m.limit.Amount
	}
	share := max(0, m.limit.Amount-m.lost.all) / int64(replicas)
	if m.lost.all == 0 {
		share = max(1, share) // a very small limit of an idle caller lets one request through
	}
	return m.lost.own + share
}

// wait returns how long it takes until need fits into what is allowed, if nothing else is used.
func (m *meter) wait(now, need, allowed int64, apart bool) time.Duration {
	if m.calendar() {
		return time.Duration(m.end - now)
	}
	current, previous := m.counts(apart)
	length := m.end - m.start
	if room := allowed - need - current; room >= 0 { // in this window, when the previous one counts little enough
		return time.Duration(m.end - now - covered(room, length, previous))
	}
	return time.Duration(m.end - now + length - covered(allowed-need, length, current))
}

// covered returns how much of a window's length may still count if that part of its use fits into room.
func covered(room, length, used int64) int64 {
	if used <= room {
		return length
	}
	high, low := bits.Mul64(uint64(room), uint64(length))
	part, _ := bits.Div64(high, low, uint64(used))
	return int64(part)
}

// reset returns how long it takes until nothing of the limit is used, if nothing else is used.
func (m *meter) reset(now int64, apart bool) time.Duration {
	switch current, previous := m.counts(apart); {
	case current > 0 && !m.calendar():
		return time.Duration(m.end - now + m.end - m.start)
	case current > 0 || previous > 0:
		return time.Duration(m.end - now)
	}
	return 0
}

// add adds numbers that are not negative, up to a number that no sum of two exceeds.
func add(a, b int64) int64 { return min(a+b, 1<<61) }
