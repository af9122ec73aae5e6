package pool

import (
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/latency"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
)

// Wait tracks how long one request waits at a member for the first byte of a
// reply, and decides when the request moves to another member. It implements
// attempt.Watch. The zero Wait tracks nothing.
type Wait struct {
	request *Ask
	moves   Moves
	member  *Member
	// moved is where the request moves. It is nil if it does not move.
	moved *Moving
	// tracker is nil until a member is known to serve the model.
	tracker *latency.Tracker
	waits   latency.Wait
	// lone is the wait after which the request moves even if no other request
	// waits too long. It is 0 if that is not known.
	lone time.Duration
	// left is the tracker of the silent member from which the request has
	// moved, if the request leads other requests. They follow if the request
	// gets its first byte here within the time leads.
	left  *latency.Tracker
	leads time.Duration
}

// Moves says whether a request may move from a silent member to another one.
type Moves struct {
	// Until is the last time at which the request may move. It is zero if there
	// is no such limit.
	Until time.Time
	// May reports whether the request may move at all. GivesUp reports whether
	// the request stops waiting if it can move to no member: a member has
	// refused it because of a throttle, so its client can be told when that
	// member returns.
	May, GivesUp bool
}

// Moving is the move of a request from a silent member to another one.
type Moving struct {
	// To is the member to which it moves. A place is reserved there.
	To *Member
	// taken are the rights that the pick of that member has taken.
	taken rights
}

// Undo gives back the place and the rights, for a request that does not move.
func (m *Moving) Undo() {
	m.taken.giveBack()
	m.To.Release()
}

// unknown is how often a request checks its wait while the usual wait is not
// known.
const unknown = time.Second

// Begin starts to track a request that will be sent to the member.
func (w *Wait) Begin(r *Ask, m *Member, moves Moves) {
	*w = Wait{request: r, moves: moves, member: m, left: w.left, leads: w.leads, moved: w.moved}
	w.waits.Kind = r.Kind
}

// Sent implements attempt.Watch.
func (w *Wait) Sent(now time.Time) time.Duration {
	w.waits = latency.Wait{Kind: w.waits.Kind, Sent: now}
	return w.follow(now)
}

// Moved returns where the request moves, or nil if it does not move. The place
// there is reserved until Release or Undo.
func (w *Wait) Moved() (moved *Moving) {
	moved, w.moved = w.moved, nil
	return moved
}

// follow updates the tracker and the thresholds. It returns the time until the
// request should check its wait.
func (w *Wait) follow(now time.Time) time.Duration {
	p, followed := w.member.pool, w.tracker != nil
	if !followed {
		w.tracker = p.follow(w.request, w.member, now)
	}
	if w.tracker == nil {
		return unknown
	}
	usual := p.usual(w.request, w.tracker, now)
	w.waits.Threshold, w.lone = usual.Threshold(), usual.LoneThreshold()
	if followed {
		return 0
	}
	if again := w.tracker.Sent(&w.waits); usual.Known() {
		return again
	}
	return unknown // the threshold may be much shorter by then
}

// Unsent implements attempt.Watch.
func (w *Wait) Unsent() {
	if w.tracker != nil {
		w.tracker.Unsent()
		w.tracker = nil
	}
}

// Late implements attempt.Watch.
func (w *Wait) Late(now time.Time) time.Duration {
	if again := w.follow(now); w.tracker == nil {
		return again
	}
	found := w.tracker.Look(&w.waits, now)
	w.tell(found.Change)
	if found.Silent && w.member.pool.onlyThrottles(w.request, w.member, now) {
		return 0
	}
	if found.Moves && w.tracker.Lead(&w.waits, now) {
		if w.move(now) {
			w.left, w.leads = w.tracker, w.waits.Threshold
			return 0
		}
		if w.tracker.Stay(); w.moves.GivesUp {
			return 0
		}
	}
	if !found.Silent && w.lone > 0 && now.Sub(w.waits.Sent) >= w.lone && w.move(now) {
		return 0
	}
	return found.Again
}

// move reserves a place at a member that answers, if the request may move. It
// reports whether it found one.
func (w *Wait) move(now time.Time) bool {
	if w.moves.May && (w.moves.Until.IsZero() || !now.After(w.moves.Until)) {
		w.moved = w.member.pool.PickAnswering(w.request, w.waits.Threshold, now)
	}
	return w.moved != nil
}

// Heard implements attempt.Watch.
func (w *Wait) Heard(now time.Time) {
	if w.left != nil && now.Sub(w.waits.Sent) <= w.leads {
		w.left.Follow()
	}
	w.left = nil
	if w.tracker != nil {
		w.tell(w.tracker.Heard(&w.waits, now))
	}
}

// Left implements attempt.Watch.
func (w *Wait) Left(now time.Time) {
	if w.tracker != nil {
		w.tell(w.tracker.Left(&w.waits, now, w.member.pool.usual(w.request, w.tracker, now).Longest))
	}
}

// Served implements attempt.Watch.
func (w *Wait) Served() {
	if w.tracker != nil {
		w.tracker.Served(&w.waits)
	}
}

func (w *Wait) tell(c latency.Change) {
	if happening := silences[c.Happened]; happening != nothing {
		w.member.tell(Event{Happening: happening, Silence: latency.State{
			Use: w.request.useAt(w.member), Since: c.Since, Slow: c.Happened == latency.BecameSlow,
		}})
	}
}

// silences maps the changes that a tracker reports to events.
var silences = [...]Happening{latency.Nothing: nothing, latency.FellSilent: FellSilent, latency.BecameSlow: BecameSlow,
	latency.Answered: Answered}

// follow returns the tracker for the request at the member. It returns nil
// while no member has served the model, because clients can make up names.
func (p *Pool) follow(r *Ask, m *Member, now time.Time) *latency.Tracker {
	if tracker := m.health.latencies.Of(r.useAt(m)); tracker != nil {
		return tracker
	}
	if !p.anywhere(r, now).served {
		return nil
	}
	return m.health.latencies.Make(r.useAt(m))
}

// TooLong returns the wait for the first byte that is unusually long for the
// request at the member. It returns 0 if that is not known.
func (p *Pool) TooLong(r *Ask, m *Member, now time.Time) time.Duration {
	if !r.At[m.Index].takes() || !p.Watches || r.Kind == latency.Unfollowed {
		return 0
	}
	tracker := m.health.latencies.Of(r.useAt(m))
	if tracker == nil {
		return 0
	}
	return p.usual(r, tracker, now).Threshold()
}

// usual returns the usual wait for the request at the tracker's member. Until
// that is known, it is the usual wait at all members.
func (p *Pool) usual(r *Ask, tracker *latency.Tracker, now time.Time) latency.Usual {
	usual := tracker.Usual(r.Kind)
	if usual.Known() {
		return usual
	}
	return p.anywhere(r, now).usual
}

// anywhere summarizes all members at one time: whether any of them has served
// the requested model, and the usual wait for the request. If no member knows
// the latter, it is the longest usual wait of any kind of request for the same
// operation and model, with the weight of one reply.
type anywhere struct {
	at     time.Time
	served bool
	usual  latency.Usual
}

// moment is how long a summary is reused, so that a request that many members
// refuse in turn does not compute it at each of them.
const moment = 100 * time.Millisecond

func (p *Pool) anywhere(r *Ask, now time.Time) *anywhere {
	if r.anywhere != nil && now.Sub(r.anywhere.at) <= moment {
		return r.anywhere
	}
	a := &anywhere{at: now}
	r.anywhere = a
	var slowest latency.Usual
	for _, m := range p.Members {
		model, ok := r.modelAt(m)
		if !ok {
			continue
		}
		a.served = a.served || m.health.hasServed(model)
		tracker := m.health.latencies.Of(r.useAt(m))
		if tracker == nil {
			continue
		}
		if a.usual = a.usual.With(tracker.Usual(r.Kind)); a.usual.Replies > 0 {
			continue
		}
		if s := tracker.Slowest(); s.Wait > slowest.Wait {
			slowest = s
		}
	}
	if a.usual.Replies == 0 {
		a.usual, a.usual.Replies = slowest, min(slowest.Replies, 1)
	}
	return a
}

// silence returns the tracker that applies to the request at the member if it
// is silent or slow, and nil otherwise.
func (m *Member) silence(r *Ask) *latency.Tracker {
	if !m.health.latencies.AnySilent() || !m.pool.Watches || r.Kind == latency.Unfollowed {
		return nil
	}
	if p := m.health.latencies.Of(r.useAt(m)); p != nil && p.IsSilent() {
		return p
	}
	return nil
}

// IsSilent reports whether the member is silent or slow for the request.
func (m *Member) IsSilent(r *Ask) bool {
	return r.At[m.Index].takes() && m.silence(r) != nil
}

// CanWait reports whether a member throttles, so that the client can be told
// how long to wait. A member with a used-up budget does not count, because it
// does not return on its own.
func (p *Pool) CanWait(r *Ask, now time.Time) bool {
	return slices.ContainsFunc(p.Members, func(m *Member) bool {
		if bar := r.At[m.Index].Bar; bar == Spent || bar == Unfit {
			return false
		}
		return m.Throttles(r, now) && !m.lacksBudget(now)
	})
}

// onlyThrottles reports whether a request at a silent member need not wait any
// longer: no other member is ready for it, but one throttles, so that the
// client can be told when to retry. This takes precedence over patience and
// over the request that leads.
func (p *Pool) onlyThrottles(r *Ask, silent *Member, now time.Time) bool {
	forgiving := *r
	forgiving.forgives = true
	for _, m := range p.Members {
		if m == silent || m.IsSilent(&forgiving) {
			continue
		}
		if r.At[m.Index].isFollowed() && m.rank(&forgiving, now) < suspect {
			return false
		}
	}
	return p.CanWait(&forgiving, now)
}

// rankIf returns the rank that the member's silence causes for the request.
// once reports whether the request can be sent only once.
func (at *At) rankIf(silence *latency.Tracker, once bool, now time.Time) rank {
	switch {
	case !silence.Due(now):
		return suspect
	case once || !at.isFollowed():
		return unproved
	}
	return open
}

// claimAnswering reserves the right to move the request to the member. If it
// fails, the caller gives back what it has taken so far.
func (m *Member) claimAnswering(r *Ask, tracker *latency.Tracker, threshold time.Duration, now time.Time,
	taken *rights) bool {
	undo, ok := tracker.Claim(now, threshold)
	if !ok {
		return false
	}
	taken.add(undo)
	return m.claim(r, now, taken)
}

// PickAnswering chooses a member for a request that waits at a silent one, and
// reserves a place at it as Pick does. threshold is the request's threshold at
// the silent member. The new member must answer in time and must not be a
// suspect. It may be a member that has refused the request before, or for which
// other requests waited first. Priority, room in the limits and weight decide.
// Policies do not, because they may use data that belongs to the request's
// goroutine. PickAnswering returns nil if there is no such member.
func (p *Pool) PickAnswering(r *Ask, threshold time.Duration, now time.Time) *Moving {
	forgiving := *r
	r, forgiving.forgives = &forgiving, true
	for {
		var chosen *Member
		var tracker *latency.Tracker
		var taken rights
		best, total := grade{rank: suspect}, 0.0
		for _, m := range p.Members {
			rank := m.rank(r, now)
			if !r.At[m.Index].isFollowed() || rank >= suspect || rank > best.rank ||
				rank == best.rank && m.Priority > best.priority {
				continue
			}
			follows := m.health.latencies.Make(r.useAt(m))
			if follows == nil || follows.Answers(now, threshold) == latency.No {
				continue
			}
			spent := p.isSpent(m, r, quota.At(now))
			if rank == best.rank && spent && !best.spent {
				continue
			}
			if g := (grade{rank, m.Priority, spent}); g != best {
				best, total = g, 0
			}
			if total += r.share(m); Random()*total < r.share(m) {
				chosen, tracker = m, follows
			}
		}
		switch {
		case chosen == nil:
			return nil
		case !chosen.place().reserve():
		case chosen.claimAnswering(r, tracker, threshold, now, &taken):
			p.count(chosen, now)
			return &Moving{chosen, taken}
		default:
			taken.giveBack()
			chosen.Release()
		}
	}
}
