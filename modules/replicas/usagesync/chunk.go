package usagesync

import (
	"fmt"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/state"
)

const (
	// fast is how often a replica reports while a caller has used more than
	// half of a limit, and slow is how often otherwise, if any use has changed.
	fast = 250 * time.Millisecond
	slow = 2 * time.Second
	// refresh is how often an unchanged chunk is sent, so that it does not
	// expire in the store, and comes back after the store has lost data.
	refresh = time.Minute
	// maxCallers is the maximum number of callers in a chunk. maxRecent is the
	// maximum number of callers in a report of changes.
	maxCallers = 120
	maxRecent  = 48
)

// sharedPool is the state of a pool in a Syncer.
type sharedPool struct {
	// digest is a hash of the pool's name.
	digest  string
	callers *limiter.Limiters
	// users is the number of links that share the pool.
	users  int
	chunks []*chunk
	// known is the greatest number of a caller that is in a chunk.
	known int
	// filling is the index of the chunk that gets new callers.
	filling int
	// seen is when changes were last reported.
	seen time.Time
	// stale reports whether the store's record of recent changes was written by
	// another clock.
	stale bool
	// marked reports whether the store has this replica's mark.
	marked bool
	// heard reports whether the use of other replicas was loaded.
	heard bool
	// looked is when this replica last checked that the store has all use of
	// other writers that is known here.
	looked time.Time
	// timelinesAt is when timelines were last written, and timelinesOf the sum
	// of the callers' changes at that time.
	timelinesAt time.Time
	timelinesOf uint64
	// version is the version of the latest report. back is the version of the
	// latest report that came back from the store.
	version, back uint64
}

// chunk is a group of a pool's callers. Each chunk is sent as one report, and
// the store keeps one record of it for each replica. Between two reports of a
// chunk, the changed callers of all chunks are sent in one report.
type chunk struct {
	members []*member
	// due reports whether the chunk must be sent even if it has not changed.
	due  bool
	sent time.Time
}

// member is a caller in a chunk. full is its number of changes when its chunk
// was last sent. latest is its number of changes when it was last sent at all.
type member struct {
	*limiter.Limiter
	full, latest uint64
}

// use returns the caller's use for a report with this version.
func (m *member) use(now time.Time, version uint64) callerUse {
	use := callerUse{id: m.ID(), entries: m.Report(now, version, nil)}
	use.inFlight, use.hasInFlight = m.ReportInFlight()
	return use
}

// recentKey is the end of the key of a replica's report of changes.
const recentKey = " recent"

// markOf returns the group of a writer's mark. While the store has the mark, it
// has not lost the writer's records. The mark is loaded once a second. To load
// all records that often, or the marks of all writers, would cost too much.
func markOf(writer string) string { return "use-mark-" + writer }

// markTTL is how long the store keeps a mark that is not renewed, so that a
// replica that restarts again and again leaves few marks.
const markTTL = time.Hour

func groupOf(digest string) string { return "use-" + digest }

// resend makes the next flush send all chunks.
func (p *sharedPool) resend() {
	p.marked = false
	for _, c := range p.chunks {
		c.due = true
	}
}

// batch is the content of one flush.
type batch struct {
	records []state.Record
	pools   []*sharedPool
}

// failed makes the next flush send all of the batch again.
func (b *batch) failed() {
	for _, p := range b.pools {
		p.resend()
		p.timelinesOf, p.timelinesAt = 0, time.Time{}
		for _, c := range p.chunks {
			for _, m := range c.members {
				m.Unreported()
			}
		}
	}
}

// collect adds the records that are due to the batch. pace is the shortest time
// between two reports of changes that other replicas should know soon. If it is
// 0, changes are reported immediately.
func (p *sharedPool) collect(b *batch, now time.Time, pace time.Duration) {
	p.grow()
	records := len(b.records)
	if changed, hurry := p.changed(); changed > 0 &&
		(pace == 0 || now.Sub(p.seen) >= slow-fast/2 || hurry && now.Sub(p.seen) >= pace) {
		p.seen = now
		p.sendChanged(b, now, changed)
	}
	i := 0
	for i < len(p.chunks) { // there may be more of them afterwards
		if c := p.chunks[i]; c.due || now.Sub(c.sent) >= refresh {
			p.sendChunk(b, i, now)
		}
		i++
	}
	if p.stale {
		p.stale = false
		p.next(now)
		b.records = append(b.records, p.record(groupOf(p.digest), recentKey, appendBody(nil, nil)))
	}
	if !p.marked {
		p.marked = true
		mark := p.record(markOf(p.callers.Writer()), "", appendBody(nil, nil))
		mark.TTL = markTTL
		b.records = append(b.records, mark)
	}
	if len(b.records) > records {
		p.sendTimelines(b, now)
		b.pools = append(b.pools, p)
	}
}

// grow puts new callers into chunks, and removes forgotten ones. A caller stays
// in its chunk, so that a chunk with few changes stays that way. An empty chunk
// is used for new callers again.
func (p *sharedPool) grow() {
	for _, c := range p.chunks {
		members := slices.DeleteFunc(c.members, func(m *member) bool { return m.Forgotten() })
		c.due, c.members = c.due || len(members) < len(c.members), members
	}
	for _, caller := range p.callers.From(p.known) {
		if len(p.chunks) == 0 || len(p.chunks[p.filling].members) >= maxCallers {
			if p.filling = slices.IndexFunc(p.chunks,
				func(c *chunk) bool { return len(c.members) == 0 }); p.filling < 0 {
				p.filling = len(p.chunks)
				p.chunks = append(p.chunks, new(chunk))
			}
		}
		to := p.chunks[p.filling]
		to.members = append(to.members, &member{Limiter: caller})
		p.known = caller.Number()
	}
}

// changed returns how many callers have changed since their chunk was sent. It
// returns 0 if all changes were already sent. hurry reports whether other
// replicas should know the changes soon.
func (p *sharedPool) changed() (n int, hurry bool) {
	news := false
	for _, c := range p.chunks {
		for _, m := range c.members {
			changes, hurries := m.Changes()
			if changes != m.full {
				n++
			}
			if changes != m.latest {
				news, hurry = true, hurry || hurries
			}
		}
	}
	if !news {
		n = 0
	}
	return n, hurry
}

// sendChanged sends the callers that have changed since their chunk was sent,
// in one report. The store keeps all of them, and other replicas get only those
// that have changed since the last such report. If there are too many, their
// chunks are sent instead. changed is their number.
func (p *sharedPool) sendChanged(b *batch, now time.Time, changed int) {
	short := changed <= maxRecent && (len(p.chunks) > 1 || len(p.chunks[0].members) > maxRecent)
	var uses, news []callerUse
	p.next(now)
	for _, c := range p.chunks {
		for _, m := range c.members {
			changes, _ := m.Changes()
			if changes == m.full {
				continue
			}
			if !short {
				c.due = true
				break
			}
			use := m.use(now, p.version)
			if uses = append(uses, use); changes != m.latest {
				news = append(news, use)
			}
			m.latest = changes
		}
	}
	if short {
		r := p.record(groupOf(p.digest), recentKey, appendBody(nil, uses))
		r.News = p.message(appendBody(nil, news))
		b.records = append(b.records, r)
	}
}

func (p *sharedPool) sendChunk(b *batch, i int, now time.Time) {
	c := p.chunks[i]
	p.next(now)
	uses := make([]callerUse, len(c.members))
	for i, m := range c.members {
		m.full, _ = m.Changes() // what changes now is sent again
		m.latest = m.full
		uses[i] = m.use(now, p.version)
	}
	body := appendBody(nil, uses)
	for maxHeader+len(body) > state.MaxMessage {
		half := len(c.members) / 2
		p.chunks = append(p.chunks, &chunk{members: c.members[half:], due: true})
		c.members, uses = c.members[:half:half], uses[:half]
		body = appendBody(nil, uses)
	}
	c.due, c.sent = false, now
	b.records = append(b.records, p.record(groupOf(p.digest), fmt.Sprintf(" %d", i), body))
}

// next increases the version for a new report. The version is a time, so that
// it is greater than the versions from before a reload.
func (p *sharedPool) next(now time.Time) {
	p.version = max(p.version+1, uint64(max(0, now.UnixMicro())))
}

// record returns a record of this replica. A late record never replaces a newer
// one. The store keeps it as long as it keeps any record. That does no harm,
// because entries of windows that are over do not count.
func (p *sharedPool) record(group, chunk string, body []byte) state.Record {
	return state.Record{
		Group: group, Key: p.callers.Writer() + chunk, Mode: state.Latest, Version: versionText(p.version),
		TTL: state.MaxTTL, Message: p.message(body),
	}
}

func (p *sharedPool) message(body []byte) []byte {
	return append(appendHeader(make([]byte, 0, maxHeader+len(body)), p.digest, p.callers.Writer(), p.version), body...)
}

// versionText returns the version as a text of fixed length, so that texts are
// ordered as versions are.
func versionText(version uint64) string { return fmt.Sprintf("%016x", version) }
