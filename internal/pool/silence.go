package pool

import (
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/latency"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
)

// Wait follows how long one request waits at a member for the first byte of a
// reply. It implements attempt.Watch. The zero Wait follows nothing.
type Wait struct {
	request *Ask
	moves   Moves
	member  *Member
	// to has a place for the request, which moves there.
	to *Member
	// tracker is nil until it is known that there is such a model.
	tracker *latency.Tracker
	waits   latency.Request
	// lone is after how long the request moves by itself. It is 0 if that is
	// not known.
	lone time.Duration
	// left is the tracker of the silent member that the request has moved from,
	// if it leads other requests, and leads is how long it may wait here until
	// they do not follow.
	left  *latency.Tracker
	leads time.Duration
}

// Moves says whether a request may move from a silent member to one that
// answers.
type Moves struct {
	// Until is how long it may. Zero: it may at any time.
	Until time.Time
	// May reports whether it may, and GivesUp whether it waits no longer if no
	// other member is left: one has refused it because it throttles, so that
	// its client can be told when that returns.
	May, GivesUp bool
}

// unknown is after how long a request looks while it is not known what is
// usual.
const unknown = time.Second

// Begin makes the Wait follow a request that will be sent to the member.
func (w *Wait) Begin(r *Ask, m *Member, moves Moves) {
	*w = Wait{request: r, moves: moves, member: m, left: w.left, leads: w.leads, to: w.to}
	w.waits.Kind = r.Kind
}

// Sent implements attempt.Watch.
func (w *Wait) Sent(now time.Time) time.Duration {
	w.waits = latency.Request{Kind: w.waits.Kind, Sent: now}
	return w.follow(now)
}

// Moved returns the member to which the request moves. It has a place there,
// until Release. It is nil if the request does not move.
func (w *Wait) Moved() (to *Member) {
	to, w.to = w.to, nil
	return to
}

// follow finds the tracker, and what is usual. It returns after how long the
// request looks.
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

// move finds a member that answers, if the request may move, and reports
// whether there is one.
func (w *Wait) move(now time.Time) bool {
	if w.moves.May && (w.moves.Until.IsZero() || !now.After(w.moves.Until)) {
		w.to = w.member.pool.PickAnswering(w.request, w.waits.Threshold, now)
	}
	return w.to != nil
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
		w.member.tell(Event{Happening: happening, Silence: latency.State{Use: w.request.useAt(w.member), Since: c.Since, Slow: c.Happened == latency.BecameSlow}})
	}
}

// silences are the events of changes that a tracker has found out.
var silences = [...]Happening{latency.Nothing: nothing, latency.FellSilent: FellSilent, latency.BecameSlow: BecameSlow, latency.Answered: Answered}

// follow returns the tracker of a use of a member. It is nil while no member
// has served a request for the model: clients can make up models.
func (p *Pool) follow(r *Ask, m *Member, now time.Time) *latency.Tracker {
	if its := m.health.latencies.Of(r.useAt(m)); its != nil {
		return its
	}
	if !p.anywhere(r, now).served {
		return nil
	}
	return m.health.latencies.Make(r.useAt(m))
}

// TooLong returns after how long a request waits longer than is usual at the
// member. It is 0 if that is not known.
func (p *Pool) TooLong(r *Ask, m *Member, now time.Time) time.Duration {
	if !r.At[m.Index].takes() || !p.Watches || r.Kind == latency.Unfollowed {
		return 0
	}
	its := m.health.latencies.Of(r.useAt(m))
	if its == nil {
		return 0
	}
	return p.usual(r, its, now).Threshold()
}

// usual returns what is usual for a request at a member, by the tracker there.
// Until that is known, it is what is usual at all members.
func (p *Pool) usual(r *Ask, its *latency.Tracker, now time.Time) latency.Usual {
	usual := its.Usual(r.Kind)
	if usual.Known() {
		return usual
	}
	return p.anywhere(r, now).usual
}

// anywhere is what all members together showed at a time: whether one of them
// has served a request for the model, and what is usual for the request. If
// none of them shows what is usual for it, that is what is usual for any
// request of the operation with the model, which proves little.
type anywhere struct {
	at     time.Time
	served bool
	usual  latency.Usual
}

// moment is how long that counts. A request that many members refuse one after
// the other does not find it out anew at each of them.
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
		there := m.health.latencies.Of(r.useAt(m))
		if there == nil {
			continue
		}
		if a.usual = a.usual.With(there.Usual(r.Kind)); a.usual.Replies > 0 {
			continue
		}
		if s := there.Slowest(); s.Wait > slowest.Wait {
			slowest = s
		}
	}
	if a.usual.Replies == 0 {
		a.usual, a.usual.Replies = slowest, min(slowest.Replies, 1)
	}
	return a
}

// silence returns the tracker that counts for the request if it is silent, and
// nil otherwise.
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

// CanWait reports whether a client can be told to wait until a member accepts
// the request, because one throttles. A member without budget does not return
// by itself.
func (p *Pool) CanWait(r *Ask, now time.Time) bool {
	return slices.ContainsFunc(p.Members, func(m *Member) bool {
		if bar := r.At[m.Index].Bar; bar == Spent || bar == Unfit {
			return false
		}
		at, _, _, throttles := m.accepts(r, now)
		return throttles && at.Before(now.Add(farAway))
	})
}

// onlyThrottles reports whether a request that waits at a silent member need
// not wait any longer: no other member is ready for it, and one throttles,
// which says when it returns. So no patience and no lead keeps its client from
// that answer.
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

// rankIf returns what a silence of the member means for the request, which may
// be one that is sent once.
func (at *At) rankIf(silence *latency.Tracker, once bool, now time.Time) rank {
	switch {
	case !silence.Due(now):
		return suspect
	case once || !at.isFollowed():
		return unproved
	}
	return open
}

// PickAnswering chooses a member for a request that waits at a silent one, and
// reserves a place at it as Pick does. It must be one that answers, and no
// suspect. threshold is that of the silent member. If there is none, because
// all members are slow, it returns nil. One that has refused the request, or
// that others waited for when it was sent, may be it. Priority, room in the
// limits and weight decide, and no policy: policies may use what belongs to the
// goroutine of the request.
func (p *Pool) PickAnswering(r *Ask, threshold time.Duration, now time.Time) *Member {
	forgiving := *r
	r, forgiving.forgives = &forgiving, true
	for {
		var chosen *Member
		var its *latency.Tracker
		best, total := grade{rank: suspect}, 0.0
		for _, m := range p.Members {
			rank := m.rank(r, now)
			if !r.At[m.Index].isFollowed() || rank >= suspect || rank > best.rank || rank == best.rank && m.Priority > best.priority {
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
			if its := (grade{rank, m.Priority, spent}); its != best {
				best, total = its, 0
			}
			if total += r.share(m); Random()*total < r.share(m) {
				chosen, its = m, follows
			}
		}
		switch {
		case chosen == nil:
			return nil
		case !chosen.place().reserve():
		case its.Claim(now, threshold) && chosen.claim(r, now):
			p.count(chosen, now)
			return chosen
		default:
			chosen.Release()
		}
	}
}
