package replicas

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/state"
)

const (
	// margin is how long before the end of a cooldown the answer to the claim
	// of its probe should arrive, so that it is known when a request comes.
	margin = 50 * time.Millisecond
	// shortest is the shortest cooldown whose probe is claimed. A shorter
	// cooldown is over before waiting for another replica's probe would help.
	shortest = time.Second
)

// claims are the cooldowns whose probes this replica will claim.
type claims struct {
	mu  sync.Mutex
	due map[recordKey]pool.Cooldown
	// first is the end of the earliest planned cooldown when next last looked.
	first time.Time
	// changed is given when a planned cooldown ends before first.
	changed signal
}

func (c *claims) plan(backend string, planned pool.Cooldown) {
	if planned.Until.Sub(planned.Since) < shortest || !shareable(planned) {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.due) < maxEnded {
		c.due[recordKey{backend, cooldownOf(planned, planned.Since).key()}] = planned
	}
	if planned.Until.Before(c.first) {
		c.changed.give()
	}
}

func (c *claims) drop(backend string, planned pool.Cooldown) {
	c.mu.Lock()
	defer c.mu.Unlock()
	key := recordKey{backend, cooldownOf(planned, planned.Since).key()}
	if c.due[key].ID == planned.ID {
		delete(c.due, key)
	}
}

// claim is a claim to the right to send the probe of a cooldown.
type claim struct {
	backend string
	pool.Cooldown
	// ttl is how long the claim is valid.
	ttl time.Duration
}

// lead returns how long before the end of a cooldown its probe is claimed.
func (r *Replica) lead() time.Duration { return min(r.clock.roundTrip()+margin, shortest/2) }

// next removes and returns the claims that are due. A claim is due lead before
// the end of its cooldown. wait is the time until the next claim is due.
func (c *claims) next(now time.Time, lead time.Duration) (due []claim, wait time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	wait, c.first = maxLength, now.Add(maxLength)
	for key, planned := range c.due {
		left := planned.Until.Add(-lead).Sub(now)
		if left < wait {
			wait, c.first = left, planned.Until
		}
		if left <= 0 {
			delete(c.due, key)
		}
		if left <= 0 && now.Before(planned.Until) { // or else probes are on their way
			due = append(due, claim{key.group, planned, lead + planned.Grace()})
		}
	}
	return due, wait
}

func (r *Replica) claim(ctx context.Context) {
	for {
		due, wait := r.claims.next(time.Now(), r.lead())
		if wait > 0 {
			select {
			case <-ctx.Done():
				return
			case <-r.claims.changed:
			case <-time.After(min(wait, interval)): // the store may be farther away by then
			}
			continue
		}
		for some := range slices.Chunk(due, maxBatch) {
			r.claimProbes(ctx, some)
		}
	}
}

// claimProbes claims the right to send the probe of each cooldown. If another
// replica has the right, requests here wait for the result of its probe. If the
// store does not answer, each replica sends a probe.
func (r *Replica) claimProbes(ctx context.Context, due []claim) {
	claims, longest := make([]state.Claim, len(due)), time.Duration(0)
	for i, c := range due {
		claims[i] = state.Claim{Name: idOf(c.Cooldown), TTL: c.ttl}
		longest = max(longest, c.ttl)
	}
	ctx, cancel := context.WithTimeout(ctx, longest)
	defer cancel()
	won, err := r.store.Claim(ctx, claims)
	if err != nil || len(won) != len(due) {
		claimsTotal.WithLabelValues("failed").Add(float64(len(due)))
		return
	}
	now := time.Now()
	for i, c := range due {
		outcome := "lost"
		switch {
		case won[i]:
			outcome = "won"
		case !now.Before(c.Until):
			outcome = "late" // a request may have gone as a probe before the answer
		}
		claimsTotal.WithLabelValues(outcome).Inc()
		if won[i] {
			continue
		}
		if m := r.memberOf(c.backend, c.Cooldown); m != nil {
			m.HearProbe(c.Cooldown, c.Until)
		}
	}
}
