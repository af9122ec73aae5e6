package callers

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/state"
)

// An operator sees the use and the refusals of callers in the last hour as a
// sum over all replicas. Each replica counts for itself, and is asked for its
// counts. A replica that has ended cannot be asked, so each replica writes its
// counts to the store, once a minute and when it ends. The replica that asks
// the others reads the counts of those that have not answered.
//
// A record is
//
//	hoursPrefix, and the pool, the writer and the version as in a report
//
// and for each caller
//
//	id       16 bytes
//	parts    their number, as a varint
//
// followed by the parts. Each part has its number, its requests, its tokens and
// the number of things that have refused requests, then the number and the
// count of each of these things, all as varints.

const (
	// hoursPrefix begins all these records. Its last byte is the version of the
	// format. Records of other versions are ignored.
	hoursPrefix = "hrs\x01"
	// hoursPace is how often the records are written.
	hoursPace = time.Minute
)

func hoursGroup(digest string) string { return "hours-" + digest }

// keepHours writes the callers' last hour to the store, if the time pace has
// passed since it was last written.
func (t *Tally) keepHours(ctx context.Context, now time.Time, put func(context.Context, []state.Record) error, pace time.Duration) {
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
	version := uint64(max(0, now.UnixMicro()))
	var body []byte
	write := func() {
		message := append(appendHeader(nil, hoursPrefix, p.digest, p.callers.Writer(), version), body...)
		records = append(records, state.Record{
			Group: hoursGroup(p.digest), Key: fmt.Sprintf("%s %d", p.callers.Writer(), len(records)), Mode: state.Latest, Version: versionText(version),
			TTL: limiter.HourTTL, Message: message, News: []byte{},
		})
		body = nil
	}
	for _, c := range p.callers.From(0) {
		parts := c.Hour(now)
		if len(parts) == 0 {
			continue
		}
		id := c.ID()
		its := appendHour(id[:], parts)
		if len(body) > 0 && maxHeader+len(body)+len(its) > state.MaxMessage {
			write()
		}
		body = append(body, its...)
	}
	if len(body) > 0 {
		write()
	}
	return records
}

func appendHour(text []byte, parts []limiter.HourPart) []byte {
	text = binary.AppendUvarint(slices.Clip(text), uint64(len(parts)))
	for _, part := range parts {
		for _, n := range []int64{part.Number, part.Requests, part.Tokens, int64(len(part.Refused))} {
			text = binary.AppendUvarint(text, uint64(max(0, n)))
		}
		for _, by := range slices.Sorted(maps.Keys(part.Refused)) {
			text = binary.AppendUvarint(binary.AppendUvarint(text, uint64(by)), uint64(part.Refused[by]))
		}
	}
	return text
}

// maxHourParts is the maximum number of parts of a caller in a record, and of
// things that have refused requests in a part.
const maxHourParts = 32

// readHour reads the format that appendHour writes.
func readHour(in *bytes.Reader) (parts []limiter.HourPart, ok bool) {
	failed := false
	number := func(most int64) int64 {
		v, err := binary.ReadUvarint(in)
		failed = failed || err != nil || v > uint64(most)
		return int64(min(v, math.MaxInt64))
	}
	for range number(maxHourParts) {
		if failed {
			break
		}
		part := limiter.HourPart{Number: number(math.MaxInt64), Requests: number(math.MaxInt64), Tokens: number(math.MaxInt64), Refused: make(map[int]uint32)}
		for range number(maxHourParts) {
			if failed {
				break
			}
			by := int(number(maxHourParts))
			part.Refused[by] = uint32(number(math.MaxUint32))
		}
		parts = append(parts, part)
	}
	return parts, !failed
}

// Hours is the last hour of callers at replicas that were not asked, by the
// digest of their pool.
type Hours map[string]map[limiter.CallerID]limiter.LastHour

// HoursGroups returns the groups of the records that Hours reads.
func (t *Tally) HoursGroups() (groups []string) {
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
func (t *Tally) Hours(now time.Time, kept []state.Kept, answered func(writer string) bool) Hours {
	t.mu.Lock()
	now = now.Add(t.ahead)
	t.mu.Unlock()
	// after a record of many callers may come two of fewer, of which the second
	// has another name: of each writer and caller, the latest version counts
	type of struct {
		pool, writer string
		caller       limiter.CallerID
	}
	type hour struct {
		version uint64
		parts   []limiter.HourPart
	}
	latest := make(map[of]hour)
	for _, k := range kept {
		r, body, err := decodeHeader(k.Message, hoursPrefix)
		if err != nil || k.Group != hoursGroup(r.pool) || answered(r.writer) {
			continue
		}
		for in := bytes.NewReader(body); in.Len() > 0; {
			key := of{pool: r.pool, writer: r.writer}
			_, err := io.ReadFull(in, key.caller[:])
			parts, ok := readHour(in)
			if err != nil || !ok {
				break
			}
			if latest[key].parts == nil || latest[key].version < r.version {
				latest[key] = hour{r.version, parts}
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
			hours[key.pool] = make(map[limiter.CallerID]limiter.LastHour)
		}
		before := hours[key.pool][key.caller]
		before.Add(sum)
		hours[key.pool][key.caller] = before
	}
	return hours
}
