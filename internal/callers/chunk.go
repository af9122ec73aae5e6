package callers

import (
	"fmt"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/state"
)

const (
	// fast is how often a report is sent while a caller is above half of a
	// limit, and slow how often others are, if something has changed.
	fast = 250 * time.Millisecond
	slow = 2 * time.Second
	// refresh is how often a chunk is sent that has not changed. So it does not
	// end in the store, and is there again after the store has lost a part of
	// its data.
	refresh = time.Minute
	// maxCallers is how many callers a chunk has at most, and maxRecent how
	// many a report has of those that have changed since their chunks were
	// sent.
	maxCallers = 120
	maxRecent  = 48
)

// sharedPool is what a tally knows of the callers of a pool.
type sharedPool struct {
	// digest stands for the pool's name.
	digest  string
	callers *limiter.Callers
	// users is how many links share it.
	users  int
	chunks []*chunk
	// known is the number of the last of the callers that are in the chunks.
	known int
	// filling is the index of the chunk that gets new callers.
	filling int
	// seen is when a report of what has changed was sent.
	seen time.Time
	// stale reports whether the store has a report of what has changed that is
	// of another clock.
	stale bool
	// marked reports whether the store has the mark.
	marked bool
	// heard reports whether what other replicas have used has been loaded.
	heard bool
	// looked is when this replica last looked whether the store has all that is
	// known here of other writers.
	looked time.Time
	// coursesAt is when courses were written, and coursesOf how many changes of
	// use there were until then.
	coursesAt time.Time
	coursesOf uint64
	// version is that of the latest report, and back that of the latest one
	// that came back.
	version, back uint64
}

// chunk is some callers of a pool. It is sent as one report, and each replica
// has one record of it in the store. Between two of these, only the callers
// that have changed are sent, those of all chunks in one report.
type chunk struct {
	members []*member
	// due reports whether it has to be sent, although it is the same.
	due  bool
	sent time.Time
}

// member is a caller in a chunk. full is what Changes returned when its chunk
// was sent, and said when it was sent.
type member struct {
	*limiter.Caller
	full, said uint64
}

// recentKey ends the key of a replica's report of what has changed.
const recentKey = " recent"

// markOf returns the group that has a writer's mark. While the mark is there,
// the store has not lost the writer's records: it is loaded once a second,
// which for all records, or the marks of all writers, would be too much.
func markOf(writer string) string { return "use-mark-" + writer }

// markTTL is how long a mark is kept, unless it is renewed: a replica that
// starts again and again leaves few of them.
const markTTL = time.Hour

func groupOf(digest string) string { return "use-" + digest }

// resend makes all chunks be sent with the next flush.
func (p *sharedPool) resend() {
	p.marked = false
	for _, c := range p.chunks {
		c.due = true
	}
}

// batch is what a flush sends.
type batch struct {
	records []state.Record
	pools   []*sharedPool
}

// failed makes all of it be sent again.
func (b *batch) failed() {
	for _, p := range b.pools {
		p.resend()
		p.coursesOf, p.coursesAt = 0, time.Time{}
		for _, c := range p.chunks {
			for _, m := range c.members {
				m.Unreported()
			}
		}
	}
}

// collect adds what is due. pace is how long a report of what has changed waits
// after the one before, if others should know soon. 0: none waits.
func (p *sharedPool) collect(b *batch, now time.Time, pace time.Duration) {
	p.grow()
	records := len(b.records)
	if changed, hurry := p.changed(); changed > 0 && (pace == 0 || now.Sub(p.seen) >= slow-fast/2 || hurry && now.Sub(p.seen) >= pace) {
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
		p.sendCourses(b, now)
		b.pools = append(b.pools, p)
	}
}

// grow puts new callers into chunks, and removes forgotten ones. A caller stays
// in its chunk, so that chunks in which little happens stay so. An empty one is
// filled again.
func (p *sharedPool) grow() {
	for _, c := range p.chunks {
		members := slices.DeleteFunc(c.members, func(m *member) bool { return m.Forgotten() })
		c.due, c.members = c.due || len(members) < len(c.members), members
	}
	for _, caller := range p.callers.From(p.known) {
		if len(p.chunks) == 0 || len(p.chunks[p.filling].members) >= maxCallers {
			if p.filling = slices.IndexFunc(p.chunks, func(c *chunk) bool { return len(c.members) == 0 }); p.filling < 0 {
				p.filling = len(p.chunks)
				p.chunks = append(p.chunks, new(chunk))
			}
		}
		to := p.chunks[p.filling]
		to.members = append(to.members, &member{Caller: caller})
		p.known = caller.Number()
	}
}

// changed returns how many callers have changed since their chunk was sent, or
// 0 if that was sent of all, and whether others should know soon.
func (p *sharedPool) changed() (n int, hurry bool) {
	news := false
	for _, c := range p.chunks {
		for _, m := range c.members {
			changes, hurries := m.Changes()
			if changes != m.full {
				n++
			}
			if changes != m.said {
				news, hurry = true, hurry || hurries
			}
		}
	}
	if !news {
		n = 0
	}
	return n, hurry
}

// sendChanged has the store keep the callers that have changed since their
// chunk was sent: so many. The others get those of them that have changed since
// the last time. If there are too many for a short report, their chunks are
// sent.
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
			use := callerUse{m.ID(), m.Report(now, p.version, nil)}
			if uses = append(uses, use); changes != m.said {
				news = append(news, use)
			}
			m.said = changes
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
		m.said = m.full
		uses[i] = callerUse{m.ID(), m.Report(now, p.version, nil)}
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

// next begins a report. Its version is a time, so that it is greater also than
// those from before a reload.
func (p *sharedPool) next(now time.Time) {
	p.version = max(p.version+1, uint64(max(0, now.UnixMicro())))
}

// record returns a record of this replica. One that is late never replaces a
// newer one. A record is kept as long as the store keeps any: entries of
// windows that are over do not count.
func (p *sharedPool) record(group, chunk string, body []byte) state.Record {
	return state.Record{
		Group: group, Key: p.callers.Writer() + chunk, Mode: state.Latest, Version: versionText(p.version), TTL: state.MaxTTL, Message: p.message(body),
	}
}

func (p *sharedPool) message(body []byte) []byte {
	return append(appendHeader(make([]byte, 0, maxHeader+len(body)), reportPrefix, p.digest, p.callers.Writer(), p.version), body...)
}

// versionText returns the version so that texts compare as versions do.
func versionText(version uint64) string { return fmt.Sprintf("%016x", version) }
