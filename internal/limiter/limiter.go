// Package limiter counts what callers use, and admits their requests while they
// are within their limits.
//
// A caller may have several limits, each a number of requests or tokens in a
// second, a minute, an hour, a day or a month. Before a request is sent,
// Caller.Try estimates its tokens. If no limit refuses it, all limits are
// charged with the estimate; otherwise none is. When the request is over,
// Settle replaces the estimate with its real cost, once. So requests that run
// at the same time cannot exceed a limit together, which they can if they are
// only charged afterwards.
//
// All windows follow the clock. A day and a month are those of the calendar.
// The shorter ones slide, in 24 parts: the use of the last minute is that of
// the parts of 2.5 s that the last 60 s cover. Of the oldest of these, which
// they cover only in part, the use counts as if it had been spread evenly over
// the part up to the last charge in it, except that at most a 24th of the limit
// is left out. So evenly spread requests can use the whole limit, and a minute
// after a charge, nothing of it counts. In no 60 s is more than 25/24 of a
// limit admitted, also if all requests of a part come at its end. A result is
// rounded up, so a limit below 24 is never exceeded.
//
// With several replicas, each is the only writer of its own use (Report), and
// adds up what it hears of the use of the others (Heard). What it has used
// since its last report that the others know is at most its part of what was
// left then (Share). A larger request waits until they know of it (Claim). So
// all of them together keep a limit, also when they stop hearing each other,
// and when they restart meanwhile: what a process saves names the use that the
// others may not know (Save). The next process goes on with that (Restore)
// until they do (Told).
//
// Nothing here reads the clock, and no method calls another package while it
// holds a lock.
package limiter

import (
	"math/bits"
	"time"
)

// counter counts the use of one limit. Its caller's mutex guards it.
type counter struct {
	// limit is the caller's. Amount 0: the use is only counted.
	limit Limit
	// window is the current one. first are the numbers of the first
	// reservations that the window before and the current one were charged
	// with.
	window
	first [2]uint64
	// own is what this replica was charged with. told is what of it the others
	// know, and sent what they know once they have heard the latest report.
	own, told, sent sums
	// untold is what processes before this one used, as far as the others may
	// not know that.
	untold sums
	// last has when something was last charged in each part: one more than the
	// 24ths of a nanosecond since its beginning. 0: it may have been at its
	// end. nil: the limit does not slide.
	last *[2][parts]int64
	// figures is what is known of other replicas, in the order of their keys
	// and the windows, and others are its sums.
	figures []figure
	others  sums
	// held is what is held back for replicas that have vanished, and joined is
	// when one came, or this one was last apart.
	held   []held
	joined int64
	// lost is what was known of the others when this replica did not hear them
	// any more.
	lost  sums
	debt  debt
	later later
	// wrote reports in which windows this replica was charged at all: the one
	// before, and the current one.
	wrote [2]bool
	// usualPart is the part of the use of all replicas that was this one's
	// when it last heard the others: from 0 to 1.
	usualPart float64
	// then is the number of the tier of requests over the limit. 0: they are
	// refused.
	then uint8
	// marked is the largest of the marks that were reported in this window, in
	// percent.
	marked uint8
	// refused and demoted are how many requests this limit refused or gave
	// another tier.
	refused, demoted uint64
}

// parts is how many parts a window that slides has.
const parts = 24

// sums are the use of two windows: the one before, and the current one.
type sums struct {
	used [2]int64
	// parts are the use of each part of these windows. nil: the counter has no
	// limit that slides, or these sums are empty.
	parts *[2][parts]int64
}

// change adds to the use of a part; those of the current window are numbered
// from 24. If by is negative, it is taken from the part, as far as that has it,
// and then from the latest parts of the window.
func (s *sums) change(part int, by int64) {
	w, i := part/parts, part%parts
	used := max(0, add(s.used[w], by))
	by, s.used[w] = used-s.used[w], used
	if s.parts == nil {
		return
	}
	in := &s.parts[w]
	for next := parts - 1; in[i]+by < 0; i, next = next, next-1 {
		by += in[i]
		in[i] = 0
	}
	in[i] += by
}

// spread adds to the use of some parts of a window, evenly.
func (s *sums) spread(used int64, first, last int) {
	for i := first; i <= last; i++ {
		share := used / int64(last-i+1)
		s.change(i, share)
		used -= share
	}
}

// bound makes older what was used beyond an amount since the sums were others:
// the first part of both windows has it.
func (s *sums) bound(since *sums, amount int64) {
	over := add(s.used[0], s.used[1]) - add(since.used[0], since.used[1]) - amount
	for i := parts - 1; i > 0 && over > 0; i-- {
		older := min(over, max(0, s.parts[0][i]-since.in(i)))
		s.parts[0][i] -= older
		s.parts[0][0] += older
		over -= older
	}
}

// move makes one of the windows the other one, and empties it.
func (s *sums) move(from, to int) {
	s.used[to], s.used[from] = s.used[from], 0
	if s.parts != nil {
		s.parts[to], s.parts[from] = s.parts[from], [parts]int64{}
	}
}

func (s *sums) in(part int) int64 {
	if s.parts == nil {
		return 0
	}
	return s.parts[part/parts][part%parts]
}

// from returns the use of a part of the window before, and of its parts after
// that.
func (s *sums) from(part int) (first, later int64) {
	if s.parts == nil {
		return 0, 0
	}
	for _, used := range s.parts[0][part+1:] {
		later += used
	}
	return s.parts[0][part], later
}

// divide gives the counter parts if its limit slides, and removes them
// otherwise. What others have used keeps them. Sums that only several replicas
// need have none until they are used.
func (m *counter) divide(now int64) {
	if m.calendar() || m.limit.Amount == 0 {
		m.last = nil
	} else if m.last == nil {
		m.last = new([2][parts]int64)
	}
	for _, s := range m.sums() {
		both := s == &m.own || s == &m.others
		switch limited := m.limit.Amount > 0; {
		case m.calendar(), s.used == [2]int64{} && (!limited || !both), !limited && s != &m.others:
			s.parts = nil
		case s.parts == nil:
			m.forgetLast()
			s.divide(m.part(now))
		}
	}
}

// divide makes what was used without parts count as if it had been spread
// evenly over the current window up to this part, and over the second half of
// the window before: rather too long than too short.
func (s *sums) divide(part int) {
	used := s.used
	*s = sums{parts: new([2][parts]int64)}
	s.spread(used[0], parts/2, parts-1)
	s.spread(used[1], parts, part)
}

// part returns the number of the part of a time in one of the two windows.
func (m *counter) part(at int64) int {
	length := m.end - m.start
	return int(max(0, (at-m.start+length)*parts/length)) // a month may be longer than the next one
}

// roll makes the window the one of now. next is the number of the next
// reservation.
func (m *counter) roll(id ID, now int64, location *time.Location, next uint64) {
	if m.holds(now) {
		return
	}
	current := windowAt(id.Unit(), now, location)
	ahead, isMoved := current.index-m.index, m.start == m.end // midnight is at another time
	index := m.index
	m.window = current
	switch ahead {
	case 0:
		m.sumOthers(now)
		return
	case 1:
		if isMoved && m.later.index == current.index {
			m.moveBack()
			break
		}
		m.debt.next(m.calendar())
		m.move(1, 0)
		m.wrote = [2]bool{m.wrote[1], false}
		m.first = [2]uint64{m.first[1], next}
	case -1: // midnight is at another time
		used := m.own.used[1]
		m.later = later{index, used, add(used, m.own.used[0]), m.first[1]}
		m.move(0, 1)
		m.forgetLast()
		m.own.change(m.part(now), used)
		m.wrote = [2]bool{false, m.wrote[0] || m.wrote[1]}
		m.first[1] = m.first[0]
	default:
		m.debt.next(m.calendar())
		m.debt.next(m.calendar())
		m.move(1, 0)
		m.move(1, 0)
		m.wrote = [2]bool{}
		m.first = [2]uint64{next, next}
	}
	m.marked = 0
	m.sumOthers(now)
}

// later is a day or a month that became a part of the one before, when midnight
// was moved: what this replica had used in it, and what was used in both
// together. first is the number of its first reservation.
type later struct {
	index, used, both int64
	first             uint64
}

// moveBack has a day or a month be two again, when midnight was moved back.
// What was used since it was moved is that of the later one.
func (m *counter) moveBack() {
	since := max(0, m.own.used[1]-m.later.both)
	used := [2]int64{max(0, m.own.used[1]-since-m.later.used), min(m.own.used[1], m.later.used+since)}
	m.move(1, 0)
	m.own.used = used
	m.wrote = [2]bool{m.wrote[1], m.wrote[1]}
	m.first = [2]uint64{m.first[1], m.later.first}
}

func (m *counter) charge(amount, now int64) {
	if amount > 0 {
		m.touch(now)
		m.owe(now, amount)
	}
	m.own.change(m.part(now), amount)
	m.wrote[1] = true
}

// touch records that something is charged now.
func (m *counter) touch(now int64) {
	part := m.part(now)
	if m.last == nil {
		return
	}
	last, length := &m.last[part/parts][part%parts], m.end-m.start
	if *last > 0 || m.own.in(part)+m.others.in(part) == 0 {
		*last = max(*last, (now-m.start+length)*parts%length+1)
	}
}

// lasts returns until when something was charged in a part, counted from its
// beginning in 24ths of a nanosecond.
func (m *counter) lasts(part int) int64 {
	if m.last != nil && m.last[part/parts][part%parts] > 0 {
		return m.last[part/parts][part%parts] - 1
	}
	return m.end - m.start
}

// forgetLast makes all parts count to their ends, because what was used was
// moved to others.
func (m *counter) forgetLast() {
	if m.last != nil {
		*m.last = [2][parts]int64{}
	}
}

// moment is when a charge was made: its time by this machine's clock, and the
// number of the latest reservation then.
type moment struct {
	at     int64
	number uint64
}

// refund takes from what the reservation of this number was charged with at a
// time, if its window is kept. A day and a month are found by the number:
// midnight may be at another time since.
func (m *counter) refund(amount int64, number uint64, at int64) {
	if amount <= 0 || number < m.first[0] {
		return
	}
	part := m.part(at)
	if m.calendar() {
		first := 0
		if number >= m.first[1] {
			first = parts
		}
		part = min(max(part, first), first+parts-1)
	}
	m.owe(at, -amount)
	m.own.change(part, -amount)
}

func (m *counter) sums() [6]*sums {
	return [...]*sums{&m.own, &m.told, &m.sent, &m.untold, &m.others, &m.lost}
}

func (m *counter) move(from, to int) {
	for _, s := range m.sums() {
		s.move(from, to)
	}
	if m.last != nil {
		m.last[to], m.last[from] = m.last[from], [parts]int64{}
	}
}

func (m *counter) calendar() bool { return m.limit.Unit.Calendar() }

// oldest returns which part of the window before is the oldest one that counts.
func (m *counter) oldest(now int64) int { return int((now - m.start) * parts / (m.end - m.start)) }

// spent returns how much was used in the window that ends now.
func (m *counter) spent(now int64) int64 {
	used := add(m.own.used[1], m.others.used[1])
	if m.own.parts == nil {
		return used
	}
	oldest, later := m.own.from(m.oldest(now))
	if m.others.used[0] > 0 {
		o, l := m.others.from(m.oldest(now))
		oldest, later = add(oldest, o), add(later, l)
	}
	return add(used, add(m.covered(now, oldest, m.limit.Amount), later))
}

// covered returns how much counts of the use of the oldest part, with a limit
// of so much.
func (m *counter) covered(now, oldest, limit int64) int64 {
	length := m.end - m.start
	lasts, passed := m.lasts(m.oldest(now)), (now-m.start)*parts%length
	if oldest <= 0 || passed >= lasts {
		return 0
	}
	high, low := bits.Mul64(uint64(oldest), uint64(lasts-passed))
	covered, rest := bits.Div64(high, low, uint64(lasts))
	if rest > 0 {
		covered++
	}
	return max(int64(covered), oldest-limit/parts)
}

// wait returns how long it takes until need fits into the limit, if nothing
// else is used. Of what the others do not know, this replica's portion must be
// large enough.
func (m *counter) wait(now, need int64, sharing Sharing) time.Duration {
	wait := m.waitUnheld(now, need, sharing)
	back := m.heldBack(now)
	if back == 0 {
		return wait
	}
	held := time.Duration(m.heldFor(now)) // then there is more room, and perhaps earlier
	if need = add(need, back); need <= m.limit.Amount {
		held = min(held, m.waitUnheld(now, need, sharing))
	}
	return max(wait, held)
}

// waitUnheld is wait as if nothing was held back.
func (m *counter) waitUnheld(now, need int64, sharing Sharing) time.Duration {
	if m.calendar() {
		return time.Duration(m.end - now)
	}
	length := m.end - m.start
	need = min(m.whole(need, sharing), m.limit.Amount)
	repaid, owed := m.repaid(now, need), m.owed(now)
	if need = min(add(need, owed), m.limit.Amount); need < m.limit.Amount {
		repaid = 0 // there will be room for all of the debt
	}
	room := m.limit.Amount - need // without the parts after i
	for i := 2*parts - 1; i >= 0; i-- {
		part := add(m.own.in(i), m.others.in(i))
		if sharing.Replicas > 1 {
			unheard := max(0, m.own.in(i)-m.told.in(i)+m.untold.in(i))
			part = add(part, m.whole(unheard, sharing)-unheard)
		}
		if part <= room {
			room -= part
			continue
		}
		passed := m.lasts(i) // of this part, when it is the oldest one
		if part-room <= m.limit.Amount/parts {
			high, low := bits.Mul64(uint64(room), uint64(m.lasts(i)))
			covered, _ := bits.Div64(high, low, uint64(part))
			passed -= int64(covered)
		}
		return time.Duration(max(0, m.start+(int64(i)*length+passed+parts-1)/parts-now, repaid))
	}
	return time.Duration(repaid)
}

// add adds numbers that are not negative, up to a number that no sum of two
// exceeds.
func add(a, b int64) int64 { return min(a+b, 1<<61) }

// multiply multiplies such a number by a small one.
func multiply(a int64, by int) int64 {
	if a > 1<<61/int64(max(1, by)) {
		return 1 << 61
	}
	return a * int64(max(1, by))
}
