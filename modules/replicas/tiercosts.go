package replicas

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
	"github.com/openai-lb/caddy-openai-lb/state"
)

// backendShare is the use of a model at a backend, by tier.
type backendShare struct {
	Backend string          `json:"backend"`
	Model   string          `json:"model"`
	Costs   quota.TierCosts `json:"costs"`
}

const (
	tierCostsGroup = "tier-costs"
	// maxShares is the maximum number of shares that a replica sends.
	maxShares = 200
	// shareSpace is the number of bytes of a message for shares. The rest is
	// for the other fields.
	shareSpace = state.MaxMessage - 256
)

// tierCosts returns messages with the use by tier at this replica. No replica
// loads these records, because they are sent again as long as they matter.
func (r *Replica) tierCosts(now time.Time) (records []state.Record) {
	shares := r.shares(now)
	for len(shares) > 0 {
		n, size := 0, 0
		for _, s := range shares {
			text, _ := json.Marshal(s)
			if size += len(text) + 1; size > shareSpace {
				break
			}
			n++
		}
		if n == 0 {
			shares = shares[1:]
			continue
		}
		m := r.message(tierCosts, now, now)
		m.Shares, shares = shares[:n], shares[n:]
		records = append(records, state.Record{
			Group: tierCostsGroup, Key: fmt.Sprint(m.From, " ", len(records)), Mode: state.Replace, TTL: lifetime,
			Message: m.text(),
		})
	}
	return records
}

func (r *Replica) shares(now time.Time) (shares []backendShare) {
	seen := make(map[string]bool)
	for _, l := range r.openLinks() {
		for m, backend := range l.backends() {
			if seen[backend] {
				continue
			}
			seen[backend] = true
			for model, costs := range m.TierCosts(now) {
				shares = append(shares, backendShare{backend, model, costs})
			}
		}
	}
	return shares[:min(len(shares), maxShares)]
}

// hearTierCosts adds another replica's use by tier to the meters of the models.
func (r *Replica) hearTierCosts(m message, then time.Time) {
	if m.From == r.peers.self.ID || time.Since(then) >= quota.OthersLast {
		return
	}
	for _, s := range m.Shares {
		if member := r.memberOf(s.Backend, pool.Cooldown{}); member != nil {
			if q := member.Quota(s.Model); q != nil {
				q.Hear(m.From, s.Costs, then)
			}
		}
	}
}
