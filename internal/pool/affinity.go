package pool

import (
	"math"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/quota"
)

// Affinity keeps the requests of a session at one member, whose cache contains
// the beginning of their prompts. A session is a Key, which package affinity
// derives from a request. It has nothing to do with API keys. Affinity only
// changes the order among equal members: priorities, cooldowns and limits come
// first. The zero Affinity is that of a request without a key.
//
// Each key has a home: of all members of the best priority that could serve the
// request, in whatever state they are, the one with the highest random weight
// for the key (rendezvous hashing). If the home is unavailable or has too many
// requests, the key moves to the next member in this order. That member reads
// the prompt into its cache, so the key stays there until it is idle for ten
// minutes, or until a better priority is available again.
//
// A key returns earlier if it moved because its home throttled or had no room
// in its limits. It does so only while its current member gets more than its
// share of the last minute's requests. Without this exception, one short
// throttle would upset the weights for a long time. Only keys that are away
// from home need memory: see [Relocations].
type Affinity struct {
	// Key identifies the session. It is 0 if the request belongs to none.
	Key uint64
	// Maker chooses the account for a request that makes an object. It is nil
	// for other requests.
	Maker *Maker
	// Result is the result of the latest pick.
	Result Result
}

// Result says whether a request with a key went to the member that caches its
// prompt.
type Result string

const (
	// Hit means that the request went to the member where the key lives.
	Hit Result = "hit"
	// Move means that the key moved because its member was unavailable, because
	// a better priority is available again, or because it returned home. The
	// key now lives where the request went.
	Move Result = "move"
	// Miss means that the key moved because its member had too many requests.
	// The key now lives where the request went.
	Miss Result = "miss"
)

// These constants limit how unevenly keys may load the members. A member takes
// up to 1.25 times its fair share of its peers' requests in flight, rounded up,
// plus one. Under light load the limit is its share plus three, so that a few
// simultaneous requests do not cost sessions their caches.
const (
	maxOverload = 1.25
	fewMore     = 2
)

// peers sums up the members of one grade, which are equally good choices.
type peers struct {
	weights  float64
	inFlight int64
	// lately is how many requests these members got in the last minute.
	lately uint64
}

// exceeded reports whether the member got more than its share of its peers'
// requests in the last minute.
func (p *peers) exceeded(r *Ask, m *Member, now time.Time) bool {
	return float64(m.lately.count(now))*p.weights > float64(p.lately)*r.share(m)
}

// place returns the member with its limit for requests with a key.
func (p *peers) place(r *Ask, m *Member) place {
	share := r.share(m) / p.weights * float64(p.inFlight+1)
	limit := int64(math.Ceil(max(maxOverload*share, share+fewMore))) + 1
	if m.MaxRequests > 0 {
		limit = min(limit, m.MaxRequests)
	}
	return place{m, limit}
}

// chooseByKey chooses a member for a request with a key, among the members that
// are as good as chosen: the member where the key lives or, if that has no
// room, the next one with room in the key's order.
func (p *Pool) chooseByKey(r *Ask, a *Affinity, now time.Time, chosen *Member, best grade) place {
	moved := p.Relocations.get(a.Key, now)
	var group peers
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
		group.weights += r.share(m)
		group.inFlight += m.InFlight()
		if moved.fled {
			group.lately += m.lately.count(now)
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
	case in && moved.fled && p.isOf(best, home, r, now) && group.place(r, home).hasRoom() &&
		group.exceeded(r, lives, now):
		first, in = home, false // it returns
	case in && group.place(r, lives).hasRoom():
		first = lives
	}
	to := group.place(r, first)
	if !to.hasRoom() {
		to = p.nextWithRoom(r, now, to, &group, best)
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
		p.Relocations.put(a.Key, relocation{tag: to.digest.tag,
			fled: moved.fled || home.hasThrottle(r) || r.IsOver(home, now) ||
				r.At[home.Index].takes() && (p.isSpent(home, r, quota.At(now)) || home.isPaused(r, now))}, now)
	} else if moved.tag != 0 {
		p.Relocations.forget(a.Key)
	}
	return to
}

// nextWithRoom returns the next member with room in the key's order. If
// concurrent requests took all the room, it returns full, with the member's own
// limit.
func (p *Pool) nextWithRoom(r *Ask, now time.Time, full place, group *peers, best grade) place {
	var next place
	var nextScore float64
	for m := range p.peers(best, r, now) {
		score, to := r.score(m, r.Affinity.Key), group.place(r, m)
		if to.hasRoom() && (next.Member == nil || score < nextScore) {
			next, nextScore = to, score
		}
	}
	if next.Member == nil {
		return full.Member.place()
	}
	return next
}
