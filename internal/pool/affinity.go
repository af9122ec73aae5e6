package pool

import (
	"math"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/quota"
)

// Affinity keeps requests of one key at one member, whose cache contains the
// beginning of their prompts. It only changes the order: priorities, cooldowns
// and limits come first. The zero Affinity stands for a request without a key.
//
// Each key has a home: the member that has the highest random weight for it
// (rendezvous hashing) among all members of the best priority that could serve
// it, whatever their state. If the home is unavailable, or has too many
// requests, the key moves to the next member in this order, and stays there
// until it was idle for ten minutes, or a better priority is back: by then,
// that member has read the prompt. Only keys that moved because of a throttle,
// or because the limits of their home had no room, return before, while the
// member to which they moved got more than its share of the requests of the
// last minute. Otherwise one short throttle would upset the weights. Only
// relocations are remembered: see [Relocations].
type Affinity struct {
	// Key is the same for related requests. 0: the request has no key.
	Key uint64
	// Maker, if it is set, chooses the account for what a caller makes.
	Maker *Maker
	// Result is the result of the latest pick.
	Result Result
}

// Result is whether a request with a key went to the member that caches its
// prompt.
type Result string

const (
	// Hit: it went where the key lives.
	Hit Result = "hit"
	// Move: that member was unavailable, or a better priority is back, or the
	// key returned home. The key now lives where the request went.
	Move Result = "move"
	// Miss: that member had too many requests. The key now lives at the next
	// one.
	Miss Result = "miss"
)

// These limit how uneven keys make the load: a member takes 1.25 times its fair
// share of its tier's requests in flight, rounded up, and one more. While there
// are few, it takes three more than its share. Otherwise sessions would lose
// their caches only because some requests of a member come at the same moment.
const (
	maxOverload = 1.25
	fewMore     = 2
)

// tier is what members that are as good as each other have in common.
type tier struct {
	weights  float64
	inFlight int64
	// lately is how many requests it got in the last minute.
	lately uint64
}

// exceeded reports whether the member got more than its share of the requests
// of the last minute.
func (t *tier) exceeded(r *Ask, m *Member, now time.Time) bool {
	return float64(m.lately.count(now))*t.weights > float64(t.lately)*r.share(m)
}

// place returns the place that a member of the tier has for requests with a
// key.
func (t *tier) place(r *Ask, m *Member) place {
	share := r.share(m) / t.weights * float64(t.inFlight+1)
	limit := int64(math.Ceil(max(maxOverload*share, share+fewMore))) + 1
	if m.MaxRequests > 0 {
		limit = min(limit, m.MaxRequests)
	}
	return place{m, limit}
}

// chooseByKey chooses among the members that are as good as the one chosen: the
// one where the key lives, or else the next in the order of the key that has
// room.
func (p *Pool) chooseByKey(r *Ask, a *Affinity, now time.Time, chosen *Member, best grade) place {
	moved := p.Relocations.get(a.Key, now)
	var t tier
	var home, there, first *Member
	var homeScore, firstScore float64
	for _, m := range p.Members {
		if m.Priority > chosen.Priority {
			break
		}
		score := r.score(m, a.Key)
		if _, serves := r.modelAt(m); serves {
			if m.digest.tag == moved.tag {
				there = m
			}
			if !m.Drained() && (home == nil || m.Priority == home.Priority && score < homeScore) {
				home, homeScore = m, score
			}
		}
		if !p.isOf(best, m, r, now) {
			continue
		}
		t.weights += r.share(m)
		t.inFlight += m.InFlight()
		if moved.fled {
			t.lately += m.lately.count(now)
		}
		if first == nil || score < firstScore {
			first, firstScore = m, score
		}
	}
	if first == nil { // another request just took the last place
		return chosen.place()
	}
	if home == nil { // all are drained
		home = first
	}
	lives := home
	if there != nil {
		lives = there
	}
	in := p.isOf(best, lives, r, now)
	switch {
	case in && moved.fled && p.isOf(best, home, r, now) && t.place(r, home).hasRoom() && t.exceeded(r, lives, now):
		first, in = home, false // it returns
	case in && t.place(r, lives).hasRoom():
		first = lives
	}
	to := t.place(r, first)
	if !to.hasRoom() {
		to = p.nextWithRoom(r, now, to, &t, best)
	}
	switch {
	case to.Member == lives && (moved.tag == 0 || there != nil):
		a.Result = Hit
	case to.Member != lives && (in || lives.Full()):
		a.Result = Miss
	default:
		a.Result = Move
	}
	if to.Member != home {
		p.Relocations.put(a.Key, relocation{tag: to.digest.tag, fled: moved.fled || home.hasThrottle(r) || r.At[home.Index].takes() && (p.isSpent(home, r, quota.At(now)) || home.isPaused(r, now))}, now)
	} else if moved.tag != 0 {
		p.Relocations.forget(a.Key)
	}
	return to
}

// nextWithRoom returns the place of the next member in the order of the key. If
// requests that were faster took all the room, it is the place that there was.
func (p *Pool) nextWithRoom(r *Ask, now time.Time, full place, t *tier, best grade) place {
	var next place
	var nextScore float64
	for m := range p.tier(best, r, now) {
		score, to := r.score(m, r.Affinity.Key), t.place(r, m)
		if to.hasRoom() && (next.Member == nil || score < nextScore) {
			next, nextScore = to, score
		}
	}
	if next.Member == nil {
		return full.Member.place()
	}
	return next
}
