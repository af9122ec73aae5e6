package pool

import (
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/latency"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
)

// Ask is a request in the pool's terms. It belongs to one request, and is not
// safe for concurrent use. It is filled once. Between attempts, only the fields
// that an attempt changes are updated: see [At].
type Ask struct {
	// At holds the meaning of the request at each member, by the members'
	// indexes.
	At []At
	// Weights are the members' weights for the request's model: see
	// [Pool.Weights].
	Weights *Weights
	// Quotas says at which members a quota keeps the request away. It is nil in
	// a pool without quotas.
	Quotas *Quotas
	// Cost is how many tokens of a rate limit the request uses up.
	Cost int64
	// Tier is the caller's tier.
	Tier quota.Tier
	// Demand is that of the request's caller while callers share the members.
	// It is nil unless DemandShare has set it.
	Demand *Demand
	// Policy chooses among members of one priority. It is nil for the choice by
	// weight. It must not keep the slice, and may return nil to leave the
	// choice to the weights. It does not apply to requests with a key: see
	// [Affinity].
	Policy func([]*Member) *Member
	// Affinity is the request's affinity. Pick sets its Result.
	Affinity Affinity
	// Steered lists the members that the latest pick passed over because their
	// limits have no room for the request, while another member's limits have.
	// There are none if the member that the pick drew first has room.
	Steered []*Member

	// Once reports whether the request can be sent only once. While another
	// member is ready, such a request is not used as a probe after a failure,
	// because a failed probe may have been executed. It may be a probe after a
	// throttle: a refused request was not executed.
	Once bool
	// Streamed reports whether the request's body can be sent only once, so
	// that its client would get the refusal of a probe. While another member is
	// ready, the request is not used as a probe in the first 10 s after a
	// cooldown.
	Streamed bool
	// forgives reports whether the request may also go to members that have
	// refused it, and to members for which other requests waited first.
	forgives bool
	// The wait for the first byte is compared with that of requests of the same
	// Kind and Operation. Operation has no trailing slash.
	Kind      latency.Kind
	Operation string
	shares    shares
	anywhere  *anywhere // nil: not found out, as for nearly all requests
}

// Demand is what a request's caller asks for and gets.
type Demand struct {
	use *quota.CallerUse
	// dues are the parts of the members that other callers are due, at the
	// instant of the request's shares.
	dues []float64
	// got is the cost of the request's attempts that counts.
	got int64
}

// Quotas are the quotas of the members, as far as they keep a request away.
type Quotas struct {
	// Over has the quota of each member, by the members' indexes.
	Over []Over
	// taken are the rights that the latest pick has taken: a quota may refuse
	// the request after the pick.
	taken rights
}

// Over is the quota of a member, as far as it keeps a request away. A quota is
// a limit of the operator's. The zero Over keeps no request away.
type Over struct {
	// Until is when the quota has room for the request. IsGuess reports whether
	// that is a guess: there will be room when requests in flight end, and it
	// is not known when they do.
	Until   time.Time
	IsGuess bool
	// AtOnce is for how many requests like this one the quota has room at that
	// time, because it begins anew, and PerSecond is for how many it has room
	// in each second. Both are for this replica.
	AtOnce, PerSecond float64
}

// overUntil returns when the member's quota has room for the request. It is
// zero if there is room now.
func (r *Ask) overUntil(m *Member, now time.Time) (until time.Time) {
	if r.Quotas != nil && now.Before(r.Quotas.Over[m.Index].Until) {
		return r.Quotas.Over[m.Index].Until
	}
	return until
}

// mayHaveRoom returns when the member's quota has room for the request, or when
// it may have room, if that is not known and until comes first.
func (r *Ask) mayHaveRoom(m *Member, now, until time.Time) time.Time {
	at := r.overUntil(m, now)
	if at.After(until) && r.Quotas.Over[m.Index].IsGuess && now.Before(until) {
		return until
	}
	return at
}

// IsOver reports whether the member's quota keeps the request away.
func (r *Ask) IsOver(m *Member, now time.Time) bool { return !r.overUntil(m, now).IsZero() }

// answer is the cached answer to a yes-no question.
type answer uint8

const (
	unasked answer = iota
	yes
	no
)

// shares caches, for one instant, whether the request's tier is within its
// share of a group of members. The answer for a single member is in [At].
type shares struct {
	at       quota.Instant
	groups   [3]quota.Group // 0: none
	isWithin [3]bool
}

// At is the meaning and the history of a request at one member.
type At struct {
	// Model is the member's name for the requested model, as a [ModelKey].
	Model string
	// Tiers is the group of the request's service tier at the member. The
	// cooldowns of this group apply to the request.
	Tiers ServiceTiers
	// Takes reports whether the request can be sent to the member. Elsewhere
	// reports whether it must not be sent there, because the objects that it
	// names are in another account.
	Takes, Elsewhere bool
	// Tried reports whether the request was sent to the member. Refused reports
	// whether the latest attempt there was refused because the member
	// throttles.
	Tried, Refused bool
	// Bar says why the request may not go there now.
	Bar Bar
	// reserved caches whether the rest of the member's limits is reserved for
	// other tiers, at the instant of the request's shares.
	reserved answer
	// general caches the cooldowns of the model's usual service tiers, so that
	// the request looks them up once. It is nil until there are any.
	general *cooldownSet
}

// isFollowed reports whether the request's wait for the first byte is compared
// with the usual wait. Only requests of the usual service tiers are compared:
// flex may take many minutes, and ultrafast is faster.
func (at *At) isFollowed() bool { return at.Tiers == UsualTiers }

// Bar says why a request may not go to a member that could serve it.
type Bar uint8

// These are the reasons, and Free for none. All but Free keep the request away.
const (
	// Free means that the request may go there.
	Free Bar = iota
	// Spent means that the request was already sent there.
	Spent
	// Throttled means that the request was sent there, and the member
	// throttles.
	Throttled
	// Behind means that earlier requests wait for the member.
	Behind
	// Unfit means that another member suits the request better.
	Unfit
)

// useAt returns the model and operation whose latency tracker at the member
// applies to the request.
func (r *Ask) useAt(m *Member) latency.Use {
	return latency.Use{Model: r.At[m.Index].Model, Operation: r.Operation}
}

// modelAt returns the member's name for the requested model. ok is false if the
// request cannot be sent to the member.
func (r *Ask) modelAt(m *Member) (model string, ok bool) {
	at := &r.At[m.Index]
	return at.Model, at.takes()
}

func (at *At) takes() bool { return at.Takes && !at.Elsewhere }

func (r *Ask) mayTry(at *At) bool {
	return at.Bar == Free || r.forgives && (at.Bar == Throttled || at.Bar == Behind)
}

// cooldowns returns the sets of cooldowns that apply to the request at the
// member.
func (r *Ask) cooldowns(m *Member) (sets scopes) {
	at, models := &r.At[m.Index], &m.health.models
	if at.Tiers.meetUsual() {
		if at.general == nil {
			at.general = models.find(Scope{Model: at.Model})
		}
		sets.usual = at.general
		sets.usualOfOperation = models.findOperation(Scope{Model: at.Model, Operation: r.Operation})
	}
	if at.Tiers != UsualTiers {
		sets.group = models.find(Scope{Model: at.Model, Tiers: at.Tiers})
		sets.groupOfOperation = models.findOperation(Scope{at.Model, at.Tiers, r.Operation})
	}
	return sets
}

// slots appends the slots that hold a cooldown of the request at the member,
// throttles first.
func (r *Ask) slots(m *Member, to []*slot) []*slot {
	return m.health.slots(r.cooldowns(m), to)
}

// throttles appends the slots that hold a throttle of the request at the
// member.
func (r *Ask) throttles(m *Member, to []*slot) []*slot {
	return m.health.throttles(r.cooldowns(m), to)
}

// Why describes why no member can get a request now.
type Why struct {
	// Throttled is the first member that throttles. Busy reports whether a
	// member is full, and Others whether a member is barred for any other
	// reason.
	Throttled    *Member
	Busy, Others bool
	// Takes reports whether the request can be sent to any member. Elsewhere
	// reports whether a member of another account could serve it.
	Takes, Elsewhere bool
}

// All reports whether there is only one kind of reason: every member to which
// the request could be sent throttles, or every one is full.
func (w Why) All() bool { return !w.Others && (w.Throttled != nil) != w.Busy }

// Why returns the reasons why no member can get the request now.
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
