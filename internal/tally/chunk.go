package tally

import (
	"bytes"
	"fmt"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/meter"
	"github.com/openai-lb/caddy-openai-lb/state"
)

const (
	// fast is how often a chunk is sent in which a caller is above half of a limit, and slow how often others
	// are, if they have changed.
	fast = 250 * time.Millisecond
	slow = 2 * time.Second
	// refresh is how often a chunk is sent that has not changed. So it does not end in the store, and is
	// there again after the store has lost a part of its data.
	refresh = time.Minute
	// maxCallers is how many callers a chunk has at most.
	maxCallers = 180
)

// pool is what a tally knows of the callers of a pool.
type pool struct {
	// digest stands for the pool's name.
	digest  string
	callers *meter.Callers
	// users is how many links share it.
	users  int
	chunks []*chunk
	// known is how many of the callers are in the chunks.
	known int
	// marked reports whether the store has the mark.
	marked bool
	// heard reports whether what other replicas have used has been loaded.
	heard bool
	// version is that of the latest report.
	version uint64
}

// chunk is some callers of a pool. It is sent as one report, and each replica has one record of it in the store.
type chunk struct {
	callers []*meter.Caller
	// body is what was sent last, and due reports whether it has to be sent again, although it is the same.
	body []byte
	due  bool
	// seen is when the callers' use was last looked at, and sent when it was sent. Both are zero if that must
	// not wait.
	seen, sent time.Time
}

// markGroup has a mark for each writer. While it is there, the store has not lost the writer's records: it is loaded
// once a second, which for all records would be too much.
const markGroup = "use"

func groupOf(digest string) string { return "use-" + digest }

// resend makes all chunks be sent with the next flush.
func (p *pool) resend() {
	p.marked = false
	for _, c := range p.chunks {
		c.due, c.seen = true, time.Time{}
	}
}

// batch is what a flush sends.
type batch struct {
	records []state.Record
	chunks  []*chunk
	marked  []*pool
}

// failed makes all of it be sent again.
func (b *batch) failed() {
	for _, c := range b.chunks {
		c.due = true
	}
	for _, p := range b.marked {
		p.marked = false
	}
}

// collect adds the chunks that are due. all reports whether those are due that have changed, however soon.
func (p *pool) collect(b *batch, now time.Time, all bool) {
	p.grow()
	p.version = max(p.version+1, uint64(max(0, now.UnixMicro())))
	i := 0
	for i < len(p.chunks) { // there may be more of them afterwards
		p.collectChunk(b, i, now, all)
		i++
	}
	if !p.marked && len(p.chunks) > 0 {
		p.marked = true
		b.marked = append(b.marked, p)
		b.records = append(b.records, p.record(markGroup, "", appendBody(nil, nil)))
	}
}

// grow puts new callers into chunks. A caller stays in its chunk, so that chunks in which little happens stay so.
func (p *pool) grow() {
	for _, caller := range p.callers.From(p.known) {
		if last := len(p.chunks) - 1; last < 0 || len(p.chunks[last].callers) >= maxCallers {
			p.chunks = append(p.chunks, new(chunk))
		}
		last := p.chunks[len(p.chunks)-1]
		last.callers = append(last.callers, caller)
		p.known++
	}
}

func (p *pool) collectChunk(b *batch, i int, now time.Time, all bool) {
	c := p.chunks[i]
	uses, hurry := c.use(now)
	if !all && !hurry && now.Sub(c.seen) < slow-fast/2 {
		return
	}
	body := appendBody(nil, uses)
	for header+len(body) > state.MaxMessage {
		half := len(c.callers) / 2
		p.chunks = append(p.chunks, &chunk{callers: c.callers[half:]})
		c.callers, uses = c.callers[:half:half], uses[:half]
		body = appendBody(nil, uses)
	}
	c.seen = now
	if !c.due && bytes.Equal(body, c.body) && now.Sub(c.sent) < refresh {
		return
	}
	c.body, c.due, c.sent = body, false, now
	b.chunks = append(b.chunks, c)
	b.records = append(b.records, p.record(groupOf(p.digest), fmt.Sprintf(" %d", i), body))
}

// use returns what is used for each caller, and whether others should know soon.
func (c *chunk) use(now time.Time) (uses []callerUse, hurry bool) {
	uses = make([]callerUse, len(c.callers))
	for i, caller := range c.callers {
		var hurries bool
		uses[i].id = caller.ID()
		uses[i].entries, hurries = caller.Usage(now, nil)
		hurry = hurry || hurries
	}
	return uses, hurry
}

// record returns a record of this replica. Its version is a time, so that it is greater also than those from before a
// reload, and a record that is late never replaces a newer one. A record is kept as long as the store keeps any: entries
// of windows that are over do not count.
func (p *pool) record(group, chunk string, body []byte) state.Record {
	writer := p.callers.Writer()
	return state.Record{
		Group: group, Key: writer + chunk, Mode: state.Latest, Version: versionText(p.version), TTL: state.MaxTTL,
		Message: append(appendHeader(make([]byte, 0, header+len(body)), p.digest, writer, p.version), body...),
	}
}

// versionText returns the version so that texts compare as versions do.
func versionText(version uint64) string { return fmt.Sprintf("%016x", version) }
