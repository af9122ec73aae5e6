package meter

import (
	"encoding/hex"
	"encoding/json"
	"hash/maphash"
	"maps"
	"math/bits"
	"slices"
	"time"
)

// What is saved before a restart is what a process knows: its own use, and that of other replicas and of processes before it. After
// the restart, all of that is the use of others, by the ids of their writers and with their versions. So it does not matter
// what else is known of it, here or in a store of replicas: of each figure, the latest version counts, once.

// SavedUse is what a process knows of the use of callers, by writer.
type SavedUse map[string]*SavedCallers

// SavedCallers are the callers that a writer knows, by name, or by id if this process does not know the name.
type SavedCallers struct {
	Named   map[string]SavedFigures `json:"callers,omitempty"`
	Unnamed map[string]SavedFigures `json:"unnamed,omitempty"`
}

// UnmarshalJSON implements json.Unmarshaler. It leaves out writers that are not valid.
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

// SavedFigures are those of a caller.
type SavedFigures []Saved

// Saved is what was used in a window, of a version of its writer, and in each part of the window.
type Saved struct {
	Entry
	Version uint64  `json:"version,omitempty"`
	Parts   []int64 `json:"parts,omitempty"`
}

// UnmarshalJSON implements json.Unmarshaler. It leaves out figures that are not valid.
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

// Save returns what is known of all callers, in windows of a minute or longer.
func (cs *Callers) Save(now time.Time) SavedUse {
	cs.mu.RLock()
	all, names := slices.Collect(maps.Values(cs.byID)), make(map[*Caller]string, len(cs.byName))
	for name, c := range cs.byName {
		names[c] = name
	}
	cs.mu.RUnlock()
	saved := make(SavedUse)
	for _, c := range all {
		name, isNamed := names[c]
		for writer, figures := range c.save(now, cs.writer) {
			of := saved[writer]
			if of == nil {
				of = &SavedCallers{Named: make(map[string]SavedFigures), Unnamed: make(map[string]SavedFigures)}
				saved[writer] = of
			}
			if isNamed {
				of.Named[name] = figures
			} else {
				of.Unnamed[hex.EncodeToString(c.id[:])] = figures
			}
		}
	}
	return saved
}

// Restore adds what Save returned in another process. Nothing of it counts that is known already.
func (cs *Callers) Restore(now time.Time, saved SavedUse) {
	for writer, callers := range saved {
		if callers == nil || writer == cs.writer {
			continue
		}
		for name, figures := range callers.Named {
			cs.Get(now, name).restore(now, writer, figures)
		}
		for text, figures := range callers.Unnamed {
			var id CallerID
			if id.UnmarshalText([]byte(text)) != nil {
				continue
			}
			if c := cs.heardOf(now, id); c != nil {
				c.restore(now, writer, figures)
			}
		}
	}
}

// save returns what is known of the caller, by writer. own is the id of this replica.
func (c *Caller) save(now time.Time, own string) map[string]SavedFigures {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.roll(now)
	saved := make(map[string]SavedFigures)
	add := func(writer string, e Entry, version uint64, in *sums, w int) {
		if e.ID.Unit() < Minute || w < 0 || w > 1 || e.Over(time.Unix(0, at)) {
			return
		}
		f := Saved{Entry: e, Version: version}
		if in.parts != nil && in.used[w] > 0 {
			f.Parts = shareOf(in.parts[w][:], e.Used, in.used[w])
		}
		saved[writer] = append(saved[writer], f)
	}
	for _, e := range c.usage(nil) {
		m := &c.meters[e.ID]
		add(own, e, uint64(max(0, now.UnixMicro())), &m.own, int(e.Window-m.index+1))
	}
	for i := range c.meters {
		m := &c.meters[i]
		for _, f := range m.figures {
			add(f.replica, Entry{ID(i), f.window, f.used, c.reset}, f.version, &m.others, int(f.window-m.index+1))
		}
	}
	return saved
}

// shareOf returns the parts of one of several whose parts are these together: it has used so much of all.
func shareOf(parts []int64, used, all int64) []int64 {
	shares := make([]int64, len(parts))
	for i, part := range parts {
		high, low := bits.Mul64(uint64(min(part, all)), uint64(min(used, all)))
		share, _ := bits.Div64(high, low, uint64(all))
		shares[i] = int64(share)
	}
	return shares
}

// restore adds what a writer has used, perhaps saved by a release with fewer parts: each counts as the last part of ours in it.
// Without parts, it counts as if it had been used now, or at the end of the window before.
func (c *Caller) restore(now time.Time, writer string, figures SavedFigures) {
	c.mu.Lock()
	at, key := c.roll(now), maphash.String(seed, writer)
	for _, f := range figures {
		if !c.counts(at, f.Entry) {
			continue
		}
		m := &c.meters[f.ID]
		m.roll(f.ID, at, c.location, c.admitted+1)
		if _, known := m.figureOf(key, f.Window); known {
			m.heard(at, writer, key, f.Version, f.Entry)
			continue
		}
		owed := m.debt
		m.heard(at, writer, key, f.Version, f.Entry)
		if _, known := m.figureOf(key, f.Window); known {
			m.debt = owed // it is not known when that was used
			m.age(at, f)
		}
	}
	crossed := c.crossed(at)
	c.mu.Unlock()
	c.report(crossed)
}

// age moves what was heard just now to the parts that a saved figure has.
func (m *meter) age(now int64, f Saved) {
	w, heard := int(f.Window-m.index+1), m.part(now)
	if m.others.parts == nil || w > 1 || len(f.Parts) == 0 {
		return
	}
	if w == 0 {
		heard = parts - 1
	}
	m.forgetLast()
	left := f.Used
	for i, used := range f.Parts {
		used = min(left, max(0, used))
		left -= used
		m.others.change(heard, -used)
		m.others.change(min(w*parts+((i+1)*parts+len(f.Parts)-1)/len(f.Parts)-1, heard), used)
	}
}
