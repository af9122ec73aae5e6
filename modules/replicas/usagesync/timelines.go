package usagesync

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/state"
)

// timelineInterval is how often a replica writes the timelines of its callers'
// use, if that has changed: once in each part of a minute's window.
const timelineInterval = 2500 * time.Millisecond

// timelines is a record of when a replica has used sliding limits. A report
// does not contain these times, because the replicas that hear it know when it
// came. Only a replica that starts loads the timelines, so they are stored
// without being sent to others.
type timelines struct {
	Writer string `json:"writer"`
	// Version orders the records of a writer. A caller may be in several of
	// them.
	Version uint64                                    `json:"version"`
	Callers map[ratelimit.CallerID][]limiter.Timeline `json:"callers"`
}

// timelinesGroup returns the group of the timelines of a pool.
func timelinesGroup(digest string) string { return "use-timelines-" + digest }

// sendTimelines adds the timelines to the batch if the use has changed. They
// are only sent together with reports.
func (p *sharedPool) sendTimelines(b *batch, now time.Time) {
	changes := uint64(1) // 0: no timelines were written
	for _, c := range p.chunks {
		for _, m := range c.members {
			n, _ := m.Changes()
			changes += n
		}
	}
	if changes == p.timelinesOf || now.Sub(p.timelinesAt) < timelineInterval {
		return
	}
	p.timelinesOf, p.timelinesAt = changes, now
	writing := timelineWriter{digest: p.digest, writer: p.callers.Writer(), version: p.version}
	for _, c := range p.chunks {
		for _, m := range c.members {
			writing.add(m.ID(), m.Timelines(now))
		}
	}
	b.records = append(b.records, writing.end()...)
}

// timelineWriter writes the timelines of a writer's callers into as few records
// as possible.
type timelineWriter struct {
	digest, writer string
	// ended is part of the keys if the writer has ended, so that the records do
	// not replace those that the writer itself has written.
	ended   string
	version uint64
	records []state.Record
	// text is the encoded callers of the next record. longest is the longest
	// window in it. The store keeps the record for twice this time.
	text    []byte
	longest time.Duration
}

// timelinesRoom is the maximum length of the text of callers in a record,
// without the record's beginning and end.
const timelinesRoom = state.MaxMessage - 128

func (w *timelineWriter) add(id ratelimit.CallerID, all []limiter.Timeline) {
	text, err := json.Marshal(all)
	if len(all) == 0 || err != nil { // numbers can be marshaled
		return
	}
	if len(w.text)+len(text)+40 > timelinesRoom {
		w.next()
	}
	w.longest = max(w.longest, time.Minute)
	if slices.ContainsFunc(all, func(c limiter.Timeline) bool { return c.ID.Unit() == ratelimit.Hour }) {
		w.longest = time.Hour
	}
	if len(w.text) > 0 {
		w.text = append(w.text, ',')
	}
	w.text = append(fmt.Appendf(w.text, `"%x":`, id), text...)
}

// next ends a record. The store keeps it only while its windows count, so that
// records of ended replicas do not fill the group.
func (w *timelineWriter) next() {
	if len(w.text) == 0 {
		return
	}
	w.records = append(w.records, state.Record{
		Group: timelinesGroup(w.digest), Key: fmt.Sprintf("%s %s%d", w.writer, w.ended, len(w.records)),
		Mode:    state.Latest,
		Version: versionText(w.version), TTL: 2 * w.longest, News: []byte{},
		Message: fmt.Appendf(nil, `{"writer":%q,"version":%d,"callers":{%s}}`, w.writer, w.version, w.text),
	})
	w.text, w.longest = nil, 0
}

// end returns all records.
func (w *timelineWriter) end() []state.Record {
	w.next()
	return w.records
}

// timelinesIn returns the timelines in the messages, by caller and by replica.
// It skips invalid messages.
func timelinesIn(messages [][]byte) map[ratelimit.CallerID]map[string][]limiter.Timeline {
	var all []timelines
	for _, message := range messages {
		var c timelines
		if json.Unmarshal(message, &c) == nil {
			all = append(all, c)
		}
	}
	slices.SortFunc(all, func(a, b timelines) int { return cmp.Compare(a.Version, b.Version) })
	found := make(map[ratelimit.CallerID]map[string][]limiter.Timeline)
	for _, c := range all {
		for id, lines := range c.Callers {
			if found[id] == nil {
				found[id] = make(map[string][]limiter.Timeline)
			}
			for i := range lines {
				lines[i].Version = c.Version
			}
			found[id][c.Writer] = lines
		}
	}
	return found
}
