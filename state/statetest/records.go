package statetest

import (
	"cmp"
	"maps"
	"time"

	"github.com/openai-lb/caddy-openai-lb/state"
)

type claim struct {
	by    *byte
	until time.Time
}

type kept struct {
	state.Record
	until    time.Time // zero: forever
	finished bool
}

func (k kept) over(now time.Time) bool { return !k.until.IsZero() && !now.Before(k.until) }

func (k kept) outlasts(other kept) bool {
	return !other.until.IsZero() && (k.until.IsZero() || k.until.After(other.until))
}

type entry struct {
	state.Entry
	until time.Time
}

// near reports whether another record is taken for this one.
func (k kept) near(other kept) bool {
	return k.Version != other.Version && !k.finished && !k.until.IsZero() && !other.until.IsZero() &&
		k.until.Sub(other.until).Abs() < other.Near
}

func (m memory) keep(r state.Record, now time.Time) error {
	group := m.contents.groups[r.Group]
	if group == nil {
		group = make(map[string]kept)
		m.contents.groups[r.Group] = group
	}
	next := kept{Record: r, finished: r.Mode == state.Finish}
	if r.TTL > 0 {
		next.until = now.Add(r.TTL)
	}
	maps.DeleteFunc(group, func(_ string, k kept) bool { return k.over(now) })
	before, known := group[r.Key]
	switch {
	case known && r.Mode == state.Extend && before.near(next):
		if before.Version < r.Version {
			next.Record = before.Record
		}
		if before.until.After(next.until) {
			next.until = before.until
		}
	case r.Mode == state.Latest && known && before.Version > r.Version:
		return nil
	case r.Mode == state.Replace, r.Mode == state.Latest:
	case known && before.Version == r.Version:
		next.until, next.finished = before.until, next.finished || before.finished
		if before.finished {
			return nil
		}
	case r.Mode == state.Finish, known && !before.finished && !next.outlasts(before):
		return nil
	}
	if !known && len(group) >= cmp.Or(r.Most, state.MaxRecords) {
		return state.ErrFull
	}
	group[r.Key] = next
	return nil
}

func (m memory) load(groups []string) (loaded []state.Kept, now time.Time, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now = time.Now()
	for _, group := range groups {
		for _, k := range m.contents.groups[group] {
			if k.over(now) {
				continue
			}
			one := state.Kept{Group: group, Key: k.Key, Version: k.Version, Message: k.Message}
			if !k.until.IsZero() {
				one.TTL = k.until.Sub(now)
			}
			loaded = append(loaded, one)
		}
	}
	return loaded, now, m.faults.down
}
