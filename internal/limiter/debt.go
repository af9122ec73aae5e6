package limiter

import (
	"math/bits"
	"time"
)

// debt is the use beyond a limit. Without it, a caller that exceeds a limit
// again and again would only have to wait until the window is empty. On
// average, it would get more than the limit.
//
// In a sliding window, a debt is paid back at the limit's rate, starting one
// window's length after the last excess. The debt of a day or a month is
// charged to the next one. A debt is bounded, because a backend may report any
// use.
type debt struct {
	// excess is the use beyond the limit. from is when paying back starts, for
	// a sliding window.
	excess, from int64
	// due is the debt that the previous day or month left.
	due int64
}

const (
	// mostSliding and mostCalendar are the largest debts, as multiples of the
	// limit. A single request adds at most mostLearned.
	mostSliding  = 60
	mostCalendar = 1
	// settled is how long replicas must share a limit before one of them owes
	// the others' use beyond it. Replicas that have just connected do not agree
	// on how much was used when, so one of them could otherwise owe what
	// another one used within the limit.
	settled = int64(time.Minute)
	// never is later than all times.
	never = 1 << 62
)

// owe updates the debt before the use changes by the amount by, which may be
// negative. A limit that moves requests to another tier has no debt.
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
	d.excess, d.from = min(m.mostOwed(), add(m.owed(now), excess)), now+m.end-m.start
}

// mostOwed returns the largest debt.
func (m *counter) mostOwed() int64 {
	if m.calendar() {
		return multiply(m.limit.Amount, mostCalendar)
	}
	return multiply(m.limit.Amount, mostSliding)
}

// boundDebt bounds the debt by the limit, which a reload may have lowered.
func (m *counter) boundDebt() {
	m.debt.excess, m.debt.due = min(m.debt.excess, m.mostOwed()), min(m.debt.due, m.mostOwed())
}

// next starts the next day or month.
func (d *debt) next(calendar bool) {
	if calendar {
		d.excess, d.due = 0, d.excess
	}
}

// owed returns how much of the debt is not paid back yet.
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

// use returns how much counts as used now: the use in the window, what is held
// back for vanished replicas, and the debt. An excess that is still in the
// window does not count twice.
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

// repaid returns the time until enough of the debt is paid back to leave room
// for need.
func (m *counter) repaid(now, need int64) int64 {
	excess := m.debt.excess - (m.limit.Amount - need)
	if m.calendar() || excess <= 0 || m.owed(now) == 0 {
		return 0
	}
	high, low := bits.Mul64(uint64(excess), uint64(m.end-m.start))
	takes, _ := bits.Div64(high, low, uint64(m.limit.Amount))
	return max(0, m.debt.from+int64(min(takes, 1<<61))+1-now)
}
