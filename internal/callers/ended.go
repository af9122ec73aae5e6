package callers

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/meter"
	"github.com/openai-lb/caddy-openai-lb/state"
)

// When the store has lost its data, the living replicas write their own records again. What the ended ones used is only
// known to those that heard it. Each of these looks, after a while, of which writers the store has no record, and
// writes what it knows of them. Two that know the same write the same records.

// grace is within which time living replicas have written their records again. Each replica waits a little longer, so
// that most find that another one has written those of ended replicas.
const grace = 2 * time.Second

// doubt makes this replica look whether the store has lost records of replicas that have ended.
func (t *Tally) doubt(now time.Time) {
	if t.look.IsZero() {
		t.look = now.Add(grace + rand.N(grace))
	}
}

// restore writes what the store has not got of replicas that have ended. The writers are those of the records that it has,
// with the pool before.
func (t *Tally) restore(now time.Time, writers map[string]bool) {
	for _, p := range t.pools {
		t.ended = append(t.ended, p.lost(now, writers)...)
	}
}

// leave writes all that is known, if the store may have lost it, because this replica ends.
func (t *Tally) leave(now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.look.IsZero() {
		t.restore(now, nil)
	}
}

// lost returns records of the writers that have none in the store: found are those that have, with the pool before.
func (p *sharedPool) lost(now time.Time, found map[string]bool) (records []state.Record) {
	for writer, uses := range p.callers.Others(now) {
		if writer == p.callers.Writer() || found[p.digest+writer] {
			continue
		}
		slices.SortFunc(uses, func(a, b meter.OtherUse) int { return bytes.Compare(a.Caller[:], b.Caller[:]) })
		for some := range slices.Chunk(uses, maxCallers) {
			records = append(records, p.recordsOf(writer, some)...)
		}
	}
	return records
}

// recordsOf returns records of what another replica has used for some callers.
func (p *sharedPool) recordsOf(writer string, uses []meter.OtherUse) []state.Record {
	var version uint64
	all := make([]callerUse, len(uses))
	for i, u := range uses {
		all[i] = callerUse{u.Caller, u.Entries}
		version = max(version, u.Version)
	}
	message := append(appendHeader(nil, p.digest, writer, version), appendBody(nil, all)...)
	if len(message) > state.MaxMessage {
		half := len(uses) / 2
		return append(p.recordsOf(writer, uses[:half]), p.recordsOf(writer, uses[half:])...)
	}
	key := fmt.Sprintf("%s ended %x", writer, uses[0].Caller)
	return []state.Record{{Group: groupOf(p.digest), Key: key, Mode: state.Latest, Version: versionText(version), TTL: state.MaxTTL, Message: message}}
}
