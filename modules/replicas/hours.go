package replicas

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/state"
)

// LastHours implements seam.ReplicationModule. It uses the counts that each of
// the replicas that have not answered wrote last.
func (Module) LastHours(ctx context.Context,
	answers []string) map[string]map[ratelimit.CallerID]ratelimit.LastHour {
	hours := make(map[string]map[ratelimit.CallerID]ratelimit.LastHour)
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

// keptHours caches the records of the last hour of callers, because a watched
// status page asks for them every two seconds. They are loaded again when other
// replicas answer than before: a replica that ends writes its last record then.
type keptHours struct {
	mu      sync.Mutex
	loaded  time.Time
	groups  []string
	answers []string
	records []state.Kept
}

// hoursInterval is the longest time between two loads. A replica writes its
// hour once a minute.
const hoursInterval = 30 * time.Second

// load returns the records of the groups. answers are the ids of the replicas
// that have answered.
func (k *keptHours) load(ctx context.Context, store state.Store, groups, answers []string) ([]state.Kept, error) {
	answers = slices.Sorted(slices.Values(answers))
	k.mu.Lock()
	defer k.mu.Unlock()
	if time.Since(k.loaded) < hoursInterval && slices.Equal(k.groups, groups) && slices.Equal(k.answers, answers) {
		return k.records, nil
	}
	records, _, err := store.Load(ctx, groups)
	if err != nil {
		return nil, err
	}
	k.loaded, k.groups, k.answers, k.records = time.Now(), groups, answers, records
	return records, nil
}

func (r *Replica) lastHours(ctx context.Context,
	answers []string) map[string]map[ratelimit.CallerID]ratelimit.LastHour {
	groups := r.usage.HoursGroups()
	if len(groups) == 0 || !r.connectivity.isConnected() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	kept, err := r.hours.load(ctx, r.store, groups, answers)
	if err != nil {
		return nil
	}
	writers := r.usage.Writers()
	var others []string // how the ids of those that have answered begin
	for _, p := range r.peers.all() {
		if slices.Contains(answers, p.ID) {
			others = append(others, p.writers...)
		}
	}
	return r.usage.Hours(time.Now(), kept, func(writer string) bool {
		return slices.Contains(writers, writer) ||
			slices.ContainsFunc(others, func(begin string) bool { return strings.HasPrefix(writer, begin) })
	})
}

// callersKey returns a digest of a pool's name for reports about its callers.
func callersKey(pool string) string { return digest("callers of " + pool) }
