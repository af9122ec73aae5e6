package limiter

import (
	"encoding/hex"
	"encoding/json"
	"hash/maphash"
	"maps"
	"math/bits"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// Before a restart, a process saves all use that it knows: its own, and that of
// other replicas and of previous processes. After the restart, all of this is
// the use of others, by the ids and versions of its writers. So it does not
// matter what else is known of the same use, from other replicas or from a
// store: for each figure, the latest version counts, once.

// SavedUse is the use of callers that a process knows, by writer.
type SavedUse map[string]*SavedCallers

// SavedCallers is the use of callers at one writer, by name, or by id if this
// process does not know the name.
type SavedCallers struct {
	Named   map[string]SavedFigures `json:"callers,omitempty"`
	Unnamed map[string]SavedFigures `json:"unnamed,omitempty"`
}

// UnmarshalJSON implements json.Unmarshaler. It skips invalid writers.
func (u *SavedUse) UnmarshalJSON(text []byte) error {
	var all map[string]json.RawMessage
	if err := json.Unmarshal(text, &all); err != nil {
		return err
	}
	*u = make(SavedUse, len(all))
	for writer, text := range all {
		var c SavedCallers
		if json.Unmarshal(text, &c) == nil {
			(*u)[writer] = &c
		}
	}
	return nil
}

// SavedFigures are the saved uses of one caller at one writer.
type SavedFigures []Saved

// Saved is the use in a window, as of a version of its writer, in total and in
// each part of the window.
type Saved struct {
	Entry
	Version uint64  `json:"version,omitempty"`
	Parts   []int64 `json:"parts,omitempty"`
	// Untold is how much of Used the other replicas may not know.
	Untold int64 `json:"untold,omitempty"`
}

// UnmarshalJSON implements json.Unmarshaler. It skips invalid figures.
func (s *SavedFigures) UnmarshalJSON(text []byte) error {
	var all []json.RawMessage
	*s = nil
	if json.Unmarshal(text, &all) != nil {
		return nil
	}
	for _, text := range all {
		var f Saved
		if json.Unmarshal(text, &f) == nil {
			*s = append(*s, f)
		}
	}
	return nil
}

// Save returns the known use of all callers in windows of a minute or longer.
func (cs *Limiters) Save(now time.Time) SavedUse {
	cs.mu.RLock()
	all, names := slices.Collect(maps.Values(cs.byID)), make(map[*Limiter]string, len(cs.byName))
	for name, c := range cs.byName {
		names[c] = name
	}
	cs.mu.RUnlock()
	saved := make(SavedUse)
	for _, c := range all {
		name, isNamed := names[c]
		for writer, figures := range c.save(now, cs.writer) {
			callers := saved[writer]
			if callers == nil {
				callers = &SavedCallers{Named: make(map[string]SavedFigures), Unnamed: make(map[string]SavedFigures)}
				saved[writer] = callers
			}
			if isNamed {
				callers.Named[name] = figures
			} else {
				callers.Unnamed[hex.EncodeToString(c.id[:])] = figures
			}
		}
	}
	return saved
}

// Restore adds use that another process has saved, except what is already
// known. The part that other replicas did not know when it was saved counts
// against this replica's part of a limit until Told.
func (cs *Limiters) Restore(now time.Time, saved SavedUse) {
	defer func() { cs.restored.Store(cs.restored.Load() || len(saved) > 0) }()
	for writer, callers := range saved {
		if callers == nil || writer == cs.writer {
			continue
		}
		for name, figures := range callers.Named {
			cs.Get(now, name).restore(now, writer, figures)
		}
		for text, figures := range callers.Unnamed {
			var id ratelimit.CallerID
			if id.UnmarshalText([]byte(text)) != nil {
				continue
			}
			if c := cs.heardOf(now, id); c != nil {
				c.restore(now, writer, figures)
			}
		}
	}
}

// save returns the known use of the caller, by writer. self is the id of this
// replica.
func (c *Limiter) save(now time.Time, self string) map[string]SavedFigures {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.roll(now)
	c.arrived(at)
	saved := make(map[string]SavedFigures)
	add := func(writer string, e Entry, version uint64, in *sums, untold int64) {
		w := int(e.Window - c.counters[e.ID].index + 1)
		if e.ID.Unit() < ratelimit.Minute || w < 0 || w > 1 || e.Over(time.Unix(0, at)) {
			return
		}
		f := Saved{Entry: e, Version: version, Untold: untold}
		if in.parts != nil && in.used[w] > 0 {
			f.Parts = shareOf(in.parts[w][:], e.Used, in.used[w])
		}
		saved[writer] = append(saved[writer], f)
	}
	version := uint64(max(0, now.UnixMicro()))
	for _, e := range c.usage(nil) {
		m := &c.counters[e.ID]
		add(self, e, version, &m.local, max(0, e.Used-m.told.used[e.Window-m.index+1]))
	}
	for i := range c.counters {
		m := &c.counters[i]
		for _, f := range m.figures {
			add(f.replica, Entry{ratelimit.ID(i), f.window, f.used, c.reset}, f.version, &m.others, f.untold)
		}
	}
	return saved
}

// shareOf returns the parts of one user's use, if several users together have
// used all, distributed like parts, and this one has used the amount used.
func shareOf(parts []int64, used, all int64) []int64 {
	shares := make([]int64, len(parts))
	for i, part := range parts {
		high, low := bits.Mul64(uint64(min(part, all)), uint64(min(used, all)))
		share, _ := bits.Div64(high, low, uint64(all))
		shares[i] = int64(share)
	}
	return shares
}

// restore adds the saved use of a writer. If an older release has saved it with
// fewer parts, the use of each counts in the last part that it covers. Without
// parts, it counts as used now or, in the previous window, at the window's end.
func (c *Limiter) restore(now time.Time, writer string, figures SavedFigures) {
	c.mu.Lock()
	at, key := c.roll(now), maphash.String(seed, writer)
	for _, f := range figures {
		if !c.counts(at, f.Entry) {
			continue
		}
		m := &c.counters[f.ID]
		m.roll(f.ID, at, c.location, c.admitted+1)
		m.restore(at, writer, key, f)
		if c.sharing.Apart {
			m.lost.copy(&m.others) // this was used before the others were not heard any more
		}
	}
	crossed := c.crossed(at)
	c.mu.Unlock()
	c.report(crossed)
}

func (m *counter) restore(now int64, writer string, key uint64, f Saved) {
	i, known := m.figureOf(key, f.Window)
	if known && m.figures[i].version == f.Version { // from a file that another process has written
		m.figures[i].untold = min(m.figures[i].untold, f.untold())
		m.addUpUntold()
		return
	}
	owed := m.debt
	m.heard(now, writer, key, f.Version, f.Entry)
	if i, isKnown := m.figureOf(key, f.Window); isKnown && m.figures[i].version == f.Version {
		m.figures[i].parts, m.figures[i].saved, m.figures[i].untold = f.parts(), f.Version, f.untold()
		m.addUpUntold()
		if !known {
			m.debt = owed // it is not known when that was used
			m.age(now, &m.figures[i])
		}
	}
}

// untold returns Untold, limited to the range from 0 to Used.
func (f *Saved) untold() int64 { return min(max(0, f.Untold), max(0, f.Used)) }

// parts returns the use of each part of the window, in the current number of
// parts. It returns nil if that is not known.
func (f *Saved) parts() []int64 {
	if len(f.Parts) == 0 || f.ID.Unit().Calendar() {
		return nil
	}
	uses, left := make([]int64, parts), f.Used
	for i, used := range f.Parts {
		used = min(left, max(0, used))
		left -= used
		uses[min(((i+1)*parts+len(f.Parts)-1)/len(f.Parts), parts)-1] += used
	}
	return uses
}

// age moves use that was just heard to the parts that a previous process has
// saved for it.
func (m *counter) age(now int64, f *figure) {
	w, current := int(f.window-m.index+1), m.part(now)
	if m.others.parts == nil || w > 1 || f.parts == nil {
		return
	}
	if w == 0 {
		current = parts - 1
	}
	m.forgetLast()
	for i, used := range f.parts {
		m.others.change(current, -used)
		m.others.change(min(w*parts+i, current), used)
	}
}

// addUpUntold adds up the use that the other replicas may not know. In each
// figure, that is the latest use.
func (m *counter) addUpUntold() {
	m.untold = sums{}
	for _, f := range m.figures {
		w := int(f.window - m.index + 1)
		if f.untold == 0 || w < 0 || w > 1 {
			continue
		}
		if m.untold.parts == nil && m.others.parts != nil {
			m.untold.parts = new([2][parts]int64)
		}
		left := f.untold
		for i := len(f.parts) - 1; i >= 0; i-- {
			used := min(left, f.parts[i])
			m.untold.change(w*parts+i, used)
			left -= used
		}
		m.untold.change(w*parts+parts-1, left)
	}
}
