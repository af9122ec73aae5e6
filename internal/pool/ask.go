package pool

import (
	"cmp"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/latency"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
)

// Ask is what a pool has to know of a request. It is filled once. Between its
// attempts, only what its attempts change is brought up to date: see [At].
type Ask struct {
	// At is what the request means at each member, by the members' indexes.
	At []At
	// Weights are those of the members, by [Pool.Weights].
	Weights *Weights
	// Cost is how much of a rate limit the request takes, in tokens.
	Cost int64
	// Tier is the request's tier.
	Tier quota.Tier
	// Policy, if it is set, chooses among members of one priority. It must not
	// keep the slice, and may return nil for no choice. It does not apply to
	// requests with a key of [Affinity].
	Policy func([]*Member) *Member
	// Affinity is the request's. Pick sets its result.
	Affinity Affinity
	// Steered are the members that the latest pick passed over, because they
	// have no room for the request in their limits and another one has.
	Steered []*Member

	// Once reports whether the request can be sent only once, so that it must
	// not be a probe after a failure. After a throttle it may be: what is
	// refused was not executed.
	Once bool
	// Streamed reports whether its body can be sent only once, so that its
	// client would get a refusal. While another member is ready, it is no probe
	// for a while.
	Streamed bool
	// Kind is the kind of request whose waits count for it, of those for the
	// same operation, which has no slash at its end.
	Kind      latency.Kind
	Operation string
	// forgives reports whether the request may go to members that have refused
	// it, or that others waited for.
	forgives bool
	shares   shares
	anywhere *anywhere // nil: not found out, as for nearly all requests
}

// answer is the answer to a question, if it is known.
type answer uint8

const (
	unasked answer = iota
	yes
	no
)

// shares are what is known at an instant of the shares of tiers: the groups of
// members of which it was found whether the request's tier is within its share,
// besides what each At has.
type shares struct {
	at     quota.Instant
	groups [3]quota.Group // 0: none
	within [3]bool
}

// At is what a request means at one member.
type At struct {
	// Model is the member's name for the model that is asked for, as a
	// [ModelKey].
	Model string
	// Tiers are the service tiers that its own is one of there. Their cooldowns
	// count for it.
	Tiers ServiceTiers
	// Takes reports whether the request can be sent to the member, and
	// Elsewhere whether it must not, because the objects that it names are at
	// another account.
	Takes, Elsewhere bool
	// Tried reports whether the request was there, and Refused whether it was
	// refused there the last time, because the member throttles.
	Tried, Refused bool
	// Bar is why the request may not go there now.
	Bar Bar
	// reserved reports whether only shares of other tiers were left of the
	// member, at the instant of the request's shares.
	reserved answer
	// general are the cooldowns of the model's usual service tiers. They are
	// nil until there are any, and stay the same then, so that the request
	// looks them up once.
	general *cooldownSet
}

// isFollowed reports whether the wait for its first byte is compared with the
// usual one. That is the one of the usual service tiers: flex may take many
// minutes, and ultrafast is faster.
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

// useAt returns the member's use whose tracker counts for the request.
func (r *Ask) useAt(m *Member) latency.Use {
	return latency.Use{Model: r.At[m.Index].Model, Operation: r.Operation}
}

// modelAt returns the member's name for the requested model. It returns false
// if the request cannot be sent to the member.
func (r *Ask) modelAt(m *Member) (model string, ok bool) {
	at := &r.At[m.Index]
	return at.Model, at.takes()
}

func (at *At) takes() bool { return at.Takes && !at.Elsewhere }

func (r *Ask) mayTry(at *At) bool {
	return at.Bar == Free || r.forgives && (at.Bar == Throttled || at.Bar == Behind)
}

// slots returns all slots of cooldowns that count for the request at the
// member, those of throttles first.
func (r *Ask) slots(m *Member) [9]*slot {
	at, models := &r.At[m.Index], &m.health.models
	sets := scopes{noCooldowns, noCooldowns, noCooldowns, noCooldowns}
	if at.Tiers.meetUsual() {
		if at.general == nil {
			at.general = models.find(Scope{Model: at.Model})
		}
		sets.usual = cmp.Or(at.general, noCooldowns)
		sets.usualOfOperation = m.health.ofOperation(Scope{Model: at.Model, Operation: r.Operation})
	}
	if at.Tiers != UsualTiers {
		sets.own = cmp.Or(models.find(Scope{Model: at.Model, Tiers: at.Tiers}), noCooldowns)
		sets.ownOfOperation = m.health.ofOperation(Scope{at.Model, at.Tiers, r.Operation})
	}
	return m.health.slots(sets)
}

func (r *Ask) throttles(m *Member) [3]*slot {
	all := r.slots(m)
	return [3]*slot(all[:3])
}

// Why is why a request gets no member.
type Why struct {
	// Throttled is the first member that throttles, and Busy reports whether
	// one has no room. Others refuse the request for other reasons.
	Throttled    *Member
	Busy, Others bool
	// Takes reports whether a member could get the request. Elsewhere reports
	// whether one of another account would take it.
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
