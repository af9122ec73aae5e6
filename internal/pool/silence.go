package pool

import (
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/pulse"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
)

// Pulse returns the pulse of a model at the member. It is nil while the member has served no request
// for the model: clients can make up models.
func (m *Member) Pulse(model string, kind pulse.Kind) *pulse.Pulse {
	p := m.health.pulses.Of(ModelKey(model), kind)
	if p == nil && m.health.hasServed(model) {
		return m.health.pulses.Make(ModelKey(model), kind)
	}
	return p
}

// TellSilence reports that a silence of a model began at since, or that it has ended.
func (m *Member) TellSilence(model string, kind pulse.Kind, since time.Time, ended bool) {
	happening := FellSilent
	if ended {
		happening = Answered
	}
	m.tell(Event{Happening: happening, Silence: pulse.State{Model: ModelKey(model), Streamed: kind == pulse.Streamed, Since: since}})
}

// silence returns the pulse that counts for the request if it is silent, and nil otherwise.
func (m *Member) silence(r Request, model string) *pulse.Pulse {
	if m.pool.Silence == 0 || !m.health.pulses.AnySilent() {
		return nil
	}
	if p := m.health.pulses.Of(ModelKey(model), r.PulseKind()); p != nil && p.IsSilent() {
		return p
	}
	return nil
}

// silenceRank returns what a silence of the member means for the request.
func (m *Member) silenceRank(r Request, model string, now time.Time) rank {
	switch p := m.silence(r, model); {
	case p == nil:
		return open
	case !p.Due(now):
		return suspect
	case r.Once():
		return unproved
	}
	return open
}

// PickAnswering chooses a member for a request that waits at a silent one, and reserves a place at it
// as Pick does. It must be one that answers, and no suspect. threshold is that of the silent member.
// If there is none, because all members are slow, it returns nil. Priority, room in the limits and
// weight decide, and no policy: policies may use what belongs to the goroutine of the request.
func (p *Pool) PickAnswering(r Request, threshold time.Duration, now time.Time) *Member {
	for {
		var chosen *Member
		var its *pulse.Pulse
		best, total := grade{rank: suspect}, 0.0
		for _, m := range p.Members {
			rank, model := m.rank(r, r.Cost(), now)
			if rank >= suspect || rank > best.rank || rank == best.rank && m.Priority > best.priority {
				continue
			}
			follows := m.health.pulses.Make(ModelKey(model), r.PulseKind())
			if follows == nil || follows.Answers(now, p.Silence, threshold) == pulse.No {
				continue
			}
			spent := p.isSpent(m, model, r.Cost(), quota.At(now))
			if rank == best.rank && spent && !best.spent {
				continue
			}
			if its := (grade{rank, m.Priority, spent}); its != best {
				best, total = its, 0
			}
			if total += m.share(); Random()*total < m.share() {
				chosen, its = m, follows
			}
		}
		switch {
		case chosen == nil:
			return nil
		case !chosen.place().reserve():
		case its.Claim(now, p.Silence, threshold) && chosen.claim(r, now):
			p.count(chosen, now)
			return chosen
		default:
			chosen.Release()
		}
	}
}
