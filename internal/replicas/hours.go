package replicas

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
)

// LastHours returns the last hour of callers, by pool, at the replicas that
// have not answered, because they have ended or cannot be heard. It uses the
// counts that each of them wrote last. answers are the ids of the replicas that
// have answered.
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

// callersKey returns a digest of a pool's name for reports about its callers.
func callersKey(pool string) string { return digest("callers of " + pool) }
