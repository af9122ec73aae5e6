package limiter

import (
	"math/bits"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// counter counts the use of one limit. The caller's mutex guards it.
type counter struct {
	// limit is the configured limit. If its Amount is 0, the use is only
	// counted.
	limit ratelimit.Limit
	// window is the current window. first are the numbers of the first
	// reservations that could be charged to the previous and to the current
	// window.
	window
	first [2]uint64
	// local is the use at this replica. told is the part of it that the other
	// replicas know, and sent is the part that they will know after the latest
	// report.
	local, told, sent sums
	// untold is the use by previous processes of this replica that the other
	// replicas may not know.
	untold sums
	// last is, for each part, the time of the last charge: 24ths of a
	// nanosecond since the part's beginning, plus 1. It is 0 if the charge may
	// have been at the part's end. last is nil if the limit does not slide.
	last *[2][parts]int64
	// figures are the uses of the other replicas, ordered by key and window.
	// others is their sum.
	figures []figure
	others  sums
	// heldParts are held back for vanished replicas. joined is when a replica
	// was last added, or when this replica last heard the others again.
	heldParts []heldPart
	joined    int64
	// lost is the value of others when this replica last stopped hearing the
	// other replicas.
	lost  sums
	debt  debt
	later later
	// charged reports whether this replica had any charge in the previous and
	// in the current window.
	charged [2]bool
	// usualPart is this replica's fraction of the use of all replicas, from 0
	// to 1, when it last heard the others.
	usualPart float64
	// then is the number of the tier of requests over the limit. It is 0 if
	// they are refused.
	then uint8
	// marked is the largest mark that was reported in this window, in percent.
	marked uint8
	// refused is how many requests this limit refused. demoted is how many it
	// moved to another tier.
	refused, demoted uint64
}

// parts is the number of parts of a sliding window.
const parts = 24

// sums are the uses of the previous and of the current window.
type sums struct {
	used [2]int64
	// parts are the uses of each part of these windows. It is nil if the
	// counter's limit does not slide, or if these sums are empty.
	parts *[2][parts]int64
}

// change adds to the use of a part. The parts of the current window have the
// numbers from 24 on. A negative amount is taken from the part as far as
// possible, and the rest from the latest parts of the window.
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

// spread adds to the use of the parts first to last, evenly.
func (s *sums) spread(used int64, first, last int) {
	for i := first; i <= last; i++ {
		share := used / int64(last-i+1)
		s.change(i, share)
		used -= share
	}
}

// bound limits the use that counts as recent: of the use since the sums had the
// values of since, it leaves at most amount in place, and moves the rest to the
// first part of the previous window.
func (s *sums) bound(since *sums, amount int64) {
	excess := add(s.used[0], s.used[1]) - add(since.used[0], since.used[1]) - amount
	for i := parts - 1; i > 0 && excess > 0; i-- {
		older := min(excess, max(0, s.parts[0][i]-since.in(i)))
		s.parts[0][i] -= older
		s.parts[0][0] += older
		excess -= older
	}
}

// move moves the use of one window to the other one, and clears it.
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

// from returns the use of a part of the previous window, and of the parts of
// that window after it.
func (s *sums) from(part int) (first, later int64) {
	if s.parts == nil {
		return 0, 0
	}
	for _, used := range s.parts[0][part+1:] {
		later += used
	}
	return s.parts[0][part], later
}

// divide gives the counter's sums parts if its limit slides, and removes them
// otherwise. others keeps its parts, even without a limit. Sums that only
// several replicas need get parts when they are first used.
func (m *counter) divide(now int64) {
	if m.calendar() || m.limit.Amount == 0 {
		m.last = nil
	} else if m.last == nil {
		m.last = new([2][parts]int64)
	}
	for _, s := range m.sums() {
		both := s == &m.local || s == &m.others
		switch limited := m.limit.Amount > 0; {
		case m.calendar(), s.used == [2]int64{} && (!limited || !both), !limited && s != &m.others:
			s.parts = nil
		case s.parts == nil:
			m.forgetLast()
			s.divide(m.part(now))
		}
	}
}

// divide gives parts to sums without any. The use of the current window is
// spread evenly up to this part, and that of the previous window over its
// second half. So use rather counts for too long than for too short a time.
func (s *sums) divide(part int) {
	used := s.used
	*s = sums{parts: new([2][parts]int64)}
	s.spread(used[0], parts/2, parts-1)
	s.spread(used[1], parts, part)
}

// part returns the number of the part that contains a time in one of the two
// windows.
func (m *counter) part(at int64) int {
	length := m.end - m.start
	return int(max(0, (at-m.start+length)*parts/length)) // a month may be longer than the next one
}

// roll moves the window to now. next is the number of the next reservation.
func (m *counter) roll(id ratelimit.ID, now int64, location *time.Location, next uint64) {
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
		m.charged = [2]bool{m.charged[1], false}
		m.first = [2]uint64{m.first[1], next}
	case -1: // midnight is at another time
		used := m.local.used[1]
		m.later = later{index, used, add(used, m.local.used[0]), m.first[1]}
		m.move(0, 1)
		m.forgetLast()
		m.local.change(m.part(now), used)
		m.charged = [2]bool{false, m.charged[0] || m.charged[1]}
		m.first[1] = m.first[0]
	default:
		m.debt.next(m.calendar())
		m.debt.next(m.calendar())
		m.move(1, 0)
		m.move(1, 0)
		m.charged = [2]bool{}
		m.first = [2]uint64{next, next}
	}
	m.marked = 0
	m.sumOthers(now)
}

// later remembers a day or a month that was merged into the previous one,
// because midnight was moved by a change of the time zone: its own use at this
// replica, and the use of both together. first is the number of its first
// reservation.
type later struct {
	index, used, both int64
	first             uint64
}

// moveBack splits a merged day or month again when midnight was moved back. Use
// since the merge belongs to the later one.
func (m *counter) moveBack() {
	since := max(0, m.local.used[1]-m.later.both)
	used := [2]int64{max(0, m.local.used[1]-since-m.later.used), min(m.local.used[1], m.later.used+since)}
	m.move(1, 0)
	m.local.used = used
	m.charged = [2]bool{m.charged[1], m.charged[1]}
	m.first = [2]uint64{m.first[1], m.later.first}
}

func (m *counter) charge(amount, now int64) {
	if amount > 0 {
		m.touch(now)
		m.owe(now, amount)
	}
	m.local.change(m.part(now), amount)
	m.charged[1] = true
}

// touch records that something is charged now.
func (m *counter) touch(now int64) {
	part := m.part(now)
	if m.last == nil {
		return
	}
	last, length := &m.last[part/parts][part%parts], m.end-m.start
	if *last > 0 || m.local.in(part)+m.others.in(part) == 0 {
		*last = max(*last, (now-m.start+length)*parts%length+1)
	}
}

// lasts returns the time of the last charge in a part, in 24ths of a nanosecond
// since the part's beginning. If that is not known, it returns the part's end.
func (m *counter) lasts(part int) int64 {
	if m.last != nil && m.last[part/parts][part%parts] > 0 {
		return m.last[part/parts][part%parts] - 1
	}
	return m.end - m.start
}

// forgetLast makes the use of all parts count up to their ends, because use was
// moved between parts.
func (m *counter) forgetLast() {
	if m.last != nil {
		*m.last = [2][parts]int64{}
	}
}

// moment is the time of a charge, by the local clock, and the number of the
// latest reservation at that time.
type moment struct {
	at     int64
	number uint64
}

// refund gives back an amount that a reservation was charged with at a time, if
// its window is still counted. Days and months are found by the reservation's
// number, because midnight may have moved since.
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
	m.local.change(part, -amount)
}

func (m *counter) sums() [6]*sums {
	return [...]*sums{&m.local, &m.told, &m.sent, &m.untold, &m.others, &m.lost}
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

// oldest returns the oldest part of the previous window that still counts.
func (m *counter) oldest(now int64) int { return int((now - m.start) * parts / (m.end - m.start)) }

// spent returns the use in the window that ends now.
func (m *counter) spent(now int64) int64 {
	used := add(m.local.used[1], m.others.used[1])
	if m.local.parts == nil {
		return used
	}
	oldest, later := m.local.from(m.oldest(now))
	if m.others.used[0] > 0 {
		o, l := m.others.from(m.oldest(now))
		oldest, later = add(oldest, o), add(later, l)
	}
	return add(used, add(m.covered(now, oldest, m.limit.Amount), later))
}

// covered returns how much of the use of the oldest part counts now.
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

// wait returns the time until need fits into the limit, if nothing else is
// used. If several replicas share the limit, need must fit into this replica's
// portion of what the others do not know to be used.
func (m *counter) wait(now, need int64, sharing Sharing) time.Duration {
	wait := m.waitUnheld(now, need, sharing)
	back := m.heldBack(now)
	if back == 0 {
		return wait
	}
	left := time.Duration(m.heldFor(now)) // then there is more room, and perhaps earlier
	if need = add(need, back); need <= m.limit.Amount {
		left = min(left, m.waitUnheld(now, need, sharing))
	}
	return max(wait, left)
}

// waitUnheld returns the same wait without the use that is held back for
// vanished replicas.
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
		part := add(m.local.in(i), m.others.in(i))
		if sharing.Replicas > 1 {
			unheard := max(0, m.local.in(i)-m.told.in(i)+m.untold.in(i))
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

// add adds two numbers that are not negative. The result is at most 1<<61, so
// that the sum of two results does not overflow.
func add(a, b int64) int64 { return min(a+b, 1<<61) }

// multiply multiplies a number that is not negative by a small one. The result
// is at most 1<<61.
func multiply(a int64, by int) int64 {
	if a > 1<<61/int64(max(1, by)) {
		return 1 << 61
	}
	return a * int64(max(1, by))
}
