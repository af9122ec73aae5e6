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

// courseInterval is how often a replica writes the courses of its callers' use, if that has changed: once in a part of a minute.
const courseInterval = 2500 * time.Millisecond

// courses is a record of when a replica has used limits that slide. Reports do not say that: who hears them knows it. Only a
// replica that starts loads the courses, so they are kept, and not sent.
type courses struct {
	Writer string `json:"writer"`
	// Version orders the records of a writer, in which a caller may be more than once.
	Version uint64                            `json:"version"`
	Callers map[meter.CallerID][]meter.Course `json:"callers"`
}

// coursesGroup returns the group that has the courses of a pool.
func coursesGroup(digest string) string { return "use-courses-" + digest }

// sendCourses adds the courses, if the use has changed. They go with reports, and never alone.
func (p *sharedPool) sendCourses(b *batch, now time.Time) {
	changes := uint64(1) // 0: no courses were written
	for _, c := range p.chunks {
		for _, m := range c.members {
			n, _ := m.Changes()
			changes += n
		}
	}
	if changes == p.coursesOf || now.Sub(p.coursesAt) < courseInterval {
		return
	}
	p.coursesOf, p.coursesAt = changes, now
	const room = state.MaxMessage - 128 // without the beginning and the end
	var text []byte                     // of the callers in the next record
	longest, number := time.Minute, 0
	add := func() {
		if len(text) > 0 {
			b.records = append(b.records, p.courses(number, text, 2*longest))
		}
		text, longest, number = nil, time.Minute, number+1
	}
	for _, c := range p.chunks {
		for _, m := range c.members {
			all := m.Courses(now)
			its, err := json.Marshal(all)
			if len(all) == 0 || err != nil { // numbers can be marshaled
				continue
			}
			if len(text)+len(its)+40 > room {
				add()
			}
			if slices.ContainsFunc(all, func(c meter.Course) bool { return c.ID.Unit() == meter.Hour }) {
				longest = time.Hour
			}
			if len(text) > 0 {
				text = append(text, ',')
			}
			text = append(fmt.Appendf(text, `"%x":`, m.ID()), its...)
		}
	}
	add()
}

// courses returns the record of this number, with the callers that are in the text. It is kept until its windows do not count any
// more: those of replicas that have ended must not fill the group.
func (p *sharedPool) courses(number int, callers []byte, ttl time.Duration) state.Record {
	return state.Record{
		Group: coursesGroup(p.digest), Key: fmt.Sprintf("%s %d", p.callers.Writer(), number), Mode: state.Latest, Version: versionText(p.version), TTL: ttl,
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
