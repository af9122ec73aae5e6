package limiter

import (
	"math/bits"
	"time"
)

// debt is what was used beyond a limit. Without it, a caller that exceeds a
// limit again and again would get more than the limit on average: it would only
// have to wait until the window is empty.
//
// A window that slides pays a debt back at the limit's rate, from a window's
// length after the last excess on. The next day or month begins with it. A debt
// is bounded, because a backend may report any use.
type debt struct {
	// excess is what was used beyond the limit, and from is when it begins to
	// be paid back. A day or a month pays nothing back.
	excess, from int64
	// due is how much the day or the month before has left.
	due int64
}

const (
	// mostSliding and mostCalendar are how many times a limit a debt is at
	// most. No request owes more than mostLearned.
	mostSliding  = 60
	mostCalendar = 1
	// settled is how long replicas share a limit before one owes what others
	// use beyond it. When they have just found each other, they do not agree on
	// what was used and when: then one of them would owe all that another one
	// uses within the limit.
	settled = int64(time.Minute)
	// never is after all times.
	never = 1 << 62
)

// owe records that so much more is used, or less, of a limit without a tier for
// what is over it. Callers change the use afterwards.
func (m *counter) owe(now, by int64) {
	if m.limit.Amount == 0 || m.then > 0 {
		return
	}
	d := &m.debt
	if by <= 0 { // perhaps of a time before the windows
		d.excess = max(0, d.excess+by)
		return
	}
	excess := min(by, mostLearned, add(add(m.spent(now), d.due), by)-m.limit.Amount)
	if excess <= 0 {
		return
	}
	most := multiply(m.limit.Amount, mostSliding)
	if m.calendar() {
		most = multiply(m.limit.Amount, mostCalendar)
	}
	d.excess, d.from = min(most, add(m.owed(now), excess)), now+m.end-m.start
}

// next begins the next day or month.
func (d *debt) next(calendar bool) {
	if calendar {
		d.excess, d.due = 0, d.excess
	}
}

// owed returns how much of the debt is left.
func (m *counter) owed(now int64) int64 {
	d := &m.debt
	if m.calendar() || now <= d.from || d.excess == 0 {
		return d.excess
	}
	length := m.end - m.start
	if (now-d.from)/length >= mostSliding {
		return 0
	}
	high, low := bits.Mul64(uint64(m.limit.Amount), uint64(now-d.from))
	paid, _ := bits.Div64(high, low, uint64(length))
	return max(0, d.excess-int64(min(paid, 1<<61)))
}

// use returns how much counts as used now: what was used in the window, what is
// held back, and the debt. While the window has what was used beyond the limit,
// it does not count twice.
func (m *counter) use(now int64) int64 {
	spent := add(m.spent(now), m.heldBack(now))
	if m.calendar() {
		return add(spent, m.debt.due)
	}
	if owed := m.owed(now); owed > 0 {
		return max(spent, add(min(spent, m.limit.Amount), owed))
	}
	return spent
}

// repaid returns how long it takes until so much room is left besides the debt.
func (m *counter) repaid(now, need int64) int64 {
	over := m.debt.excess - (m.limit.Amount - need)
	if m.calendar() || over <= 0 || m.owed(now) == 0 {
		return 0
	}
	high, low := bits.Mul64(uint64(over), uint64(m.end-m.start))
	takes, _ := bits.Div64(high, low, uint64(m.limit.Amount))
	return max(0, m.debt.from+int64(min(takes, 1<<61))+1-now)
}
