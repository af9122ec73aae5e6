package fleet

import (
	"slices"
	"testing"
)

func TestNamesAreUniqueWithinAConfig(t *testing.T) {
	var f Fleet
	const one, other = "some options", "others"
	for _, c := range []struct {
		config, name, options string
		ok                    bool
	}{
		{"old", "a", one, true}, {"old", "b", other, true}, {"old", "a", other, false}, {"old", "a", one, true},
		{"new", "a", other, true}, {"new", "b", other, true}, {"new", "b", one, false},
	} {
		if err := f.Claim(c.config, c.name, c.options); (err == nil) != c.ok {
			t.Errorf("%s: the claim of %s ended with %v", c.config, c.name, err)
		}
	}
	f.GiveBack("old")
	if err := f.Claim("old", "a", other); err != nil {
		t.Errorf("a name that was given back: %v", err)
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
