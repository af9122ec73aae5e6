package usagesync

import (
	"bytes"
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/state"
)

// When the store has lost its data, the running replicas write their own
// records again. The use of ended replicas is then known only to the replicas
// that heard it. The use of a replica before its restart, if the store was not
// available then, is known only to the process that replaced it, from its own
// storage. So after a while, each replica checks whether the store has all that
// it knows of other writers, and writes the records that are missing or older
// there. Two replicas with the same knowledge write the same records.

// grace is the time within which running replicas write their records again.
// Each replica waits a little longer, at random, so that most of them find that
// another one has already written the records of ended replicas.
const grace = 2 * time.Second

// found are the versions of the records that the store has, by the pool's
// digest followed by the writer, and by caller.
type found map[string]map[ratelimit.CallerID]uint64

// add adds the versions of a report.
func (f found) add(r report) {
	writer := r.pool + r.writer
	if f[writer] == nil {
		f[writer] = make(map[ratelimit.CallerID]uint64)
	}
	for _, c := range r.callers {
		f[writer][c.id] = max(f[writer][c.id], r.version)
	}
}

// doubt schedules a check of whether the store has all that is known here of
// other writers.
func (t *Syncer) doubt(now time.Time) {
	if t.look.IsZero() {
		t.look = now.Add(grace + rand.N(grace))
	}
}

// restore schedules records of ended replicas that the store does not have.
func (t *Syncer) restore(now time.Time, stored found) {
	for _, p := range t.pools {
		t.ended = append(t.ended, p.lost(now, stored)...)
		p.looked = now
	}
}

// tell sends the use that this replica knows from before a restart to the
// store. It counts this use as known to the other replicas once they have had
// the time to report theirs, too. While this replica is not connected, the wait
// starts again.
func (t *Syncer) tell(now time.Time, connected bool) {
	for _, p := range t.pools {
		switch {
		case !p.callers.Restored():
		case !connected:
			p.looked = time.Time{}
		case p.looked.IsZero():
			t.look = now // at once, because no other replica writes it
		case now.Sub(p.looked) >= settling:
			p.callers.Told()
			p.looked = time.Time{} // what is restored later is looked for anew
		}
	}
}

// leave writes all that is known here of other writers if the store may have
// lost it, because this replica ends. Nothing is in flight here any more.
func (t *Syncer) leave(now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, p := range t.pools {
		p.callers.Leave()
	}
	if !t.look.IsZero() {
		t.restore(now, nil)
	}
}

// lost returns records of the use of other writers that is known here and
// missing in the store.
func (p *sharedPool) lost(now time.Time, stored found) (records []state.Record) {
	for writer, uses := range p.callers.Others(now) {
		if writer == p.callers.Writer() {
			continue
		}
		versions := stored[p.digest+writer]
		uses = slices.DeleteFunc(uses, func(u limiter.OtherUse) bool { return versions[u.Caller] >= u.Version })
		// A record has one version. If it were later than what is known of a
		// caller, it would displace what others know.
		slices.SortFunc(uses, func(a, b limiter.OtherUse) int {
			return cmp.Or(cmp.Compare(a.Version, b.Version), bytes.Compare(a.Caller[:], b.Caller[:]))
		})
		for len(uses) > 0 {
			n := 1
			for n < min(len(uses), maxCallers) && uses[n].Version == uses[0].Version {
				n++
			}
			// the timelines come first: who finds the records finds these
			writing := timelineWriter{
				digest: p.digest, writer: writer, version: uses[0].Version,
				ended: fmt.Sprintf("ended %x ", uses[0].Caller),
			}
			for _, u := range uses[:n] {
				writing.add(u.Caller, u.Timelines)
			}
			records = append(append(records, writing.end()...), p.recordsOf(writer, uses[:n])...)
			uses = uses[n:]
		}
	}
	return records
}

// recordsOf returns records of another replica's use for some callers, all with
// the same version.
func (p *sharedPool) recordsOf(writer string, uses []limiter.OtherUse) []state.Record {
	version := uses[0].Version
	all := make([]callerUse, len(uses))
	for i, u := range uses {
		all[i] = callerUse{id: u.Caller, entries: u.Entries} // nothing is in flight any more
	}
	message := append(appendHeader(nil, p.digest, writer, version), appendBody(nil, all)...)
	if len(message) > state.MaxMessage {
		half := len(uses) / 2
		return append(p.recordsOf(writer, uses[:half]), p.recordsOf(writer, uses[half:])...)
	}
	key := fmt.Sprintf("%s ended %x", writer, uses[0].Caller)
	return []state.Record{
		{Group: groupOf(p.digest), Key: key, Mode: state.Latest, Version: versionText(version), TTL: state.MaxTTL, Message: message},
	}
}
