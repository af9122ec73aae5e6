package callers

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/meter"
	"github.com/openai-lb/caddy-openai-lb/state"
)

const (
	// courseInterval is how often a replica writes the courses of its callers' use, if that has changed: once in a part of a minute.
	courseInterval = 2500 * time.Millisecond
	// courseTTL is how long they are kept. The longest window that slides is an hour.
	courseTTL = 2 * time.Hour
)

// courses is a record of when a replica has used limits that slide. Reports do not say that: who hears them knows it. Only a
// replica that starts loads the courses, so they are kept, and not sent.
type courses struct {
	Writer string `json:"writer"`
	// Version orders the records of a writer, in which a caller may be more than once.
	Version uint64                            `json:"version"`
	Callers map[meter.CallerID][]meter.Course `json:"callers"`
}

// coursesOf returns the group that has the courses of a pool.
func coursesOf(digest string) string { return "use-courses-" + digest }

// sendCourses adds the courses, if the use has changed. They go with reports, and never alone.
func (p *sharedPool) sendCourses(b *batch, now time.Time) {
	changes := uint64(1) // a pool without callers has written nothing
	for _, c := range p.chunks {
		for i := range c.members {
			n, _ := c.members[i].Changes()
			changes += n
		}
	}
	if changes == p.written || now.Sub(p.wrote) < courseInterval {
		return
	}
	p.written, p.wrote = changes, now
	const room = state.MaxMessage - 128 // without the beginning and the end
	text, n := []byte(nil), 0
	for _, c := range p.chunks {
		for i := range c.members {
			all := c.members[i].Courses(now)
			if len(all) == 0 {
				continue
			}
			its, err := json.Marshal(all)
			if err != nil {
				continue // never: these are numbers
			}
			if len(text)+len(its)+24 > room {
				b.records, text, n = append(b.records, p.courses(n, text)), nil, n+1
			}
			if len(text) > 0 {
				text = append(text, ',')
			}
			text = append(fmt.Appendf(text, `"%d":`, c.members[i].ID()), its...)
		}
	}
	if len(text) > 0 {
		b.records = append(b.records, p.courses(n, text))
	}
}

// courses returns the record of this number, with the callers that are in the text.
func (p *sharedPool) courses(number int, callers []byte) state.Record {
	return state.Record{
		Group: coursesOf(p.digest), Key: fmt.Sprintf("%s %d", p.callers.Writer(), number), Mode: state.Latest, Version: versionText(p.version), TTL: courseTTL,
		Message: fmt.Appendf(nil, `{"writer":%q,"version":%d,"callers":{%s}}`, p.callers.Writer(), p.version, callers), News: []byte{},
	}
}

// coursesIn returns the courses in these messages, by caller and by replica. One that is not valid is left out.
func coursesIn(messages [][]byte) map[meter.CallerID]map[string][]meter.Course {
	var all []courses
	for _, message := range messages {
		var c courses
		if json.Unmarshal(message, &c) == nil {
			all = append(all, c)
		}
	}
	slices.SortFunc(all, func(a, b courses) int { return cmp.Compare(a.Version, b.Version) })
	found := make(map[meter.CallerID]map[string][]meter.Course)
	for _, c := range all {
		for id, its := range c.Callers {
			if found[id] == nil {
				found[id] = make(map[string][]meter.Course)
			}
			found[id][c.Writer] = its
		}
	}
	return found
}
