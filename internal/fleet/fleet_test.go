package fleet

import (
	"slices"
	"testing"
)

func TestNamesAreUniqueWithinAConfig(t *testing.T) {
	var f Fleet
	for _, c := range []struct{ config, name, want string }{
		{"old", "", "lb"}, {"old", "", "lb_2"}, {"old", "a", "a"}, {"old", "", "lb_3"},
		{"new", "", "lb"}, {"new", "lb_2", "lb_2"}, {"new", "", "lb_3"},
	} {
		if got, err := f.Name(c.config, c.name, "lb"); err != nil || got != c.want {
			t.Errorf("%s: %q became %q, %v, want %q", c.config, c.name, got, err, c.want)
		}
	}
	if _, err := f.Name("old", "a", "lb"); err == nil {
		t.Error("two pools of a config have the same name")
	}
	f.GiveBack("old")
	if got, err := f.Name("old", "a", "lb"); err != nil || got != "a" {
		t.Errorf("a name that was given back: %q, %v", got, err)
	}
}

func TestTheNewestOfANameCounts(t *testing.T) {
	var f Fleet
	old, other, next := &Entry{Name: "lb"}, &Entry{Name: "lb_2"}, &Entry{Name: "lb"}
	f.Add(old)
	f.Add(other)
	f.Add(next)
	if got := f.Entries(); !slices.Equal(got, []*Entry{next, other}) {
		t.Errorf("got %v", got)
	}
	f.Remove(next) // its config could not be loaded
	if got := f.Entries(); !slices.Equal(got, []*Entry{old, other}) {
		t.Errorf("got %v", got)
	}
}
