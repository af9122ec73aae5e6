package usagesync

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/state"
)

// An operator sees the use and the refusals of callers in the last hour as a
// sum over all replicas. Each replica counts for itself, and is asked for its
// counts. A replica that has ended cannot be asked, so each replica writes its
// counts to the store, once a minute and when it ends. The replica that asks
// the others reads the counts of those that have not answered.

// hoursRecord is a record of one replica's counts for some callers of a pool.
type hoursRecord struct {
	// Format is the version of the format. Records of other versions are
	// ignored.
	Format int    `json:"format"`
	Pool   string `json:"pool"`
	Writer string `json:"writer"`
	// Version orders the records of a writer.
	Version uint64                                    `json:"version"`
	Callers map[ratelimit.CallerID][]limiter.HourPart `json:"callers"`
}

const (
	hoursFormat = 2
	// hoursPace is how often the records are written.
	hoursPace = time.Minute
	// hoursRoom is the maximum length of the callers in a record, without the
	// record's beginning and end.
	hoursRoom = state.MaxMessage - 192
)

func hoursGroup(digest string) string { return "hours-" + digest }

// keepHours writes the callers' last hour to the store, if the time pace has
// passed since it was last written.
func (t *Syncer) keepHours(ctx context.Context, now time.Time, put func(context.Context, []state.Record) error,
	pace time.Duration) {
	var records []state.Record
	t.mu.Lock()
	if now.Sub(t.hoursAt) >= pace {
		t.hoursAt = now
		for _, p := range t.pools {
			records = append(records, p.hours(now)...)
		}
	}
	t.mu.Unlock()
	if len(records) > 0 {
		_ = put(ctx, records) // the next ones have the same
	}
}

// hours returns the records of the pool's callers.
func (p *sharedPool) hours(now time.Time) (records []state.Record) {
	r := hoursRecord{Format: hoursFormat, Pool: p.digest, Writer: p.callers.Writer(),
		Version: uint64(max(0, now.UnixMicro()))}
	length := 0
	write := func() {
		records = append(records, state.Record{
			Group: hoursGroup(p.digest), Key: fmt.Sprintf("%s %d", r.Writer, len(records)), Mode: state.Latest,
			Version: versionText(r.Version),
			TTL:     limiter.HourTTL, Message: marshal(r), News: []byte{},
		})
		r.Callers, length = nil, 0
	}
	for _, c := range p.callers.From(0) {
		parts := c.Hour(now)
		if len(parts) == 0 {
			continue
		}
		needs := 2*idSize + len(`"":,`) + len(marshal(parts))
		for needs > hoursRoom { // with many reasons for refusals, the oldest parts are left out
			parts = parts[1:]
			needs = 2*idSize + len(`"":,`) + len(marshal(parts))
		}
		if length > 0 && length+needs > hoursRoom {
			write()
		}
		if r.Callers == nil {
			r.Callers = make(map[ratelimit.CallerID][]limiter.HourPart)
		}
		r.Callers[c.ID()], length = parts, length+needs
	}
	if length > 0 {
		write()
	}
	return records
}

// Hours is the last hour of callers at replicas that were not asked, by the
// digest of their pool.
type Hours map[string]map[ratelimit.CallerID]ratelimit.LastHour

// HoursGroups returns the groups of the records that Hours reads.
func (t *Syncer) HoursGroups() (groups []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, p := range t.pools {
		groups = append(groups, hoursGroup(p.digest))
	}
	slices.Sort(groups)
	return slices.Compact(groups)
}

// Hours adds up the records of writers that have not answered. It ignores
// invalid records, because any client of the store may have written them.
func (t *Syncer) Hours(now time.Time, kept []state.Kept, answered func(writer string) bool) Hours {
	t.mu.Lock()
	now = now.Add(t.ahead)
	t.mu.Unlock()
	// after a record of many callers may come two of fewer, of which the second
	// has another name: of each writer and caller, the latest version counts
	type hourKey struct {
		pool, writer string
		caller       ratelimit.CallerID
	}
	type hour struct {
		version uint64
		parts   []limiter.HourPart
	}
	latest := make(map[hourKey]hour)
	for _, k := range kept {
		var r hoursRecord
		if json.Unmarshal(k.Message, &r) != nil || r.Format != hoursFormat || k.Group != hoursGroup(r.Pool) ||
			answered(r.Writer) {
			continue
		}
		for id, parts := range r.Callers {
			key := hourKey{pool: r.Pool, writer: r.Writer, caller: id}
			if latest[key].parts == nil || latest[key].version < r.Version {
				latest[key] = hour{r.Version, parts}
			}
		}
	}
	hours := make(Hours)
	for key, hour := range latest {
		sum := limiter.SumHour(now, hour.parts)
		if sum.Requests == 0 && sum.Tokens == 0 && sum.Refused == nil {
			continue
		}
		if hours[key.pool] == nil {
			hours[key.pool] = make(map[ratelimit.CallerID]ratelimit.LastHour)
		}
		before := hours[key.pool][key.caller]
		before.Add(sum)
		hours[key.pool][key.caller] = before
	}
	return hours
}

// marshal returns the JSON of a value that has only texts and numbers.
func marshal(value any) []byte {
	text, err := json.Marshal(value)
	if err != nil {
		panic(err)
	}
	return text
}
