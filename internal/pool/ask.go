package pool

import (
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/pulse"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
)

// Ask is what a pool has to know of a request. It is filled once. Between its attempts, only what its attempts change
// is brought up to date: see [At].
type Ask struct {
	// At is what the request means at each member, by the members' indexes.
	At []At
	// Cost is how much of a rate limit the request takes, in tokens.
	Cost int64
	// Tier is the request's tier.
	Tier quota.Tier
	// Policy, if it is set, chooses among members of one priority. It must not keep the slice, and may return nil for
	// no choice. It does not apply to requests with a key of [Affinity].
	Policy func([]*Member) *Member
	// Affinity is the request's. Pick sets its result.
	Affinity Affinity
	// Steered are the members that the latest pick passed over, because they have no room for the request in their
	// limits and another one has.
	Steered []*Member

	// Once reports whether the request can be sent only once, so that it must not be a probe after a failure. After a
	// throttle it may be: what is refused was not executed.
	Once bool
	// Streamed reports whether its body can be sent only once, so that its client would get a refusal. While another member
	// is ready, it is no probe for a while.
	Streamed bool
	// Kind is the kind of request whose waits count for it.
	Kind pulse.Kind
	// forgives reports whether the request may go to members that have refused it, or that others waited for.
	forgives bool
	shares   shares
	anywhere anywhere
}

// shares are the groups of members of which the latest pick has found whether the request's tier is within its share.
type shares struct {
	at     quota.Instant
	groups [3]quota.Group // 0: none
	within [3]bool
}

// At is what a request means at one member.
type At struct {
	// Model is the member's name for the model that is asked for.
	Model string
	// Tiers are the service tiers that its own is one of there. Their benches count for it.
	Tiers ServiceTiers
	// Takes reports whether the request can be sent to the member, and Elsewhere whether it must not, because the
	// objects that it names are at another account.
	Takes, Elsewhere bool
	// Tried reports whether the request was there, and Refused whether it was refused there the last time, because the
	// member throttles.
	Tried, Refused bool
	// Bar is why the request may not go there now.
	Bar Bar
}

// isFollowed reports whether the wait for its first byte is compared with the usual one. That is the one of the usual
// service tiers: flex may take many minutes, and ultrafast is faster.
func (at *At) isFollowed() bool { return at.Tiers == UsualTiers }

// Bar is why a request may not go to a member to which it could be sent.
type Bar uint8

// The bars.
const (
	// Free: it may.
	Free Bar = iota
	// Spent: it was there.
	Spent
	// Throttled: it was there, and the member throttles.
	Throttled
	// Behind: other requests wait for the member, which came before.
	Behind
	// Unfit: another member is better for it.
	Unfit
)

// at returns what benches are about that count for the request at the member. It returns false if the request cannot be
// sent to the member.
func (r *Ask) at(m *Member) (its Scope, ok bool) {
	at := &r.At[m.Index]
	return Scope{at.Model, at.Tiers}, at.Takes && !at.Elsewhere
}

// modelAt returns the member's name for the requested model, as at does.
func (r *Ask) modelAt(m *Member) (model string, ok bool) {
	its, ok := r.at(m)
	return its.Model, ok
}

func (r *Ask) mayTry(m *Member) bool {
	bar := r.At[m.Index].Bar
	return bar == Free || r.forgives && (bar == Throttled || bar == Behind)
}

// Why is why a request gets no member.
type Why struct {
	// Throttled is the first member that throttles, and Busy reports whether one has no room. Others refuse the
	// request for other reasons.
	Throttled    *Member
	Busy, Others bool
	// Takes reports whether a member could get the request. Elsewhere reports whether one of another account would
	// take it.
	Takes, Elsewhere bool
}

// All reports whether all refuse it for the same reason.
func (w Why) All() bool { return !w.Others && (w.Throttled != nil) != w.Busy }

// Why returns why no member gets the request.
func (p *Pool) Why(r *Ask, now time.Time) (w Why) {
	for _, m := range p.Members {
		switch at := &r.At[m.Index]; {
		case !at.Takes:
			continue
		case at.Elsewhere:
			w.Elsewhere = true
			continue
		case at.Refused, at.Bar == Behind, m.Throttles(r, now):
			if w.Throttled == nil {
				w.Throttled = m
			}
		case !at.Tried && m.Full():
			w.Busy = true
		default:
			w.Others = true
		}
		w.Takes = true
	}
	return w
}
