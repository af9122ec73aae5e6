package replicas

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
)

// LastHours returns what callers have done in the last hour, by pool, at
// replicas of which no answer is among these: they have ended, or cannot be
// heard. What such a replica wrote last counts.
func LastHours(ctx context.Context, answers []string) map[string]map[limiter.CallerID]limiter.LastHour {
	hours := make(map[string]map[limiter.CallerID]limiter.LastHour)
	for _, r := range runningReplicas() {
		for digest, callers := range r.lastHours(ctx, answers) {
			for _, pool := range r.shared().Pools {
				if callersKey(pool) == digest {
					hours[pool] = callers
				}
			}
		}
	}
	return hours
}

func (r *Replica) lastHours(ctx context.Context, answers []string) map[string]map[limiter.CallerID]limiter.LastHour {
	groups := r.tally.HoursGroups()
	if len(groups) == 0 || !r.connectivity.isConnected() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	kept, _, err := r.store.Load(ctx, groups)
	if err != nil {
		return nil
	}
	own := r.tally.Writers()
	var others []string // how the ids of those that have answered begin
	for _, peer := range r.peers.all() {
		if slices.Contains(answers, peer.ID) {
			others = append(others, peer.writers...)
		}
	}
	return r.tally.Hours(time.Now(), kept, func(writer string) bool {
		return slices.Contains(own, writer) || slices.ContainsFunc(others, func(begin string) bool { return strings.HasPrefix(writer, begin) })
	})
}

// callersKey stands for the callers of a pool in reports.
func callersKey(pool string) string { return digest("callers of " + pool) }
