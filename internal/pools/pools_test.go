package pools

import (
	"slices"
	"testing"
	"testing/synctest"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
)

func TestNamesAreUniqueWithinAConfig(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		var s Set
		const one, other = "some options", "others"
		before, unloadOld := caddy.NewContext(caddy.Context{Context: t.Context()})
		after, unloadNew := caddy.NewContext(caddy.Context{Context: t.Context()})
		defer unloadNew()
		for i, c := range []struct {
			config        caddy.Context
			name, options string
			ok            bool
		}{
			{before, "a", one, true}, {before, "b", other, true}, {before, "a", other, false}, {before, "a", one, true},
			{after, "a", other, true}, {after, "b", other, true}, {after, "b", one, false},
		} {
			if err := s.Claim(c.config, c.name, c.options); (err == nil) != c.ok {
				t.Errorf("claim %d of %s ended with %v", i, c.name, err)
			}
		}
		unloadOld()
		synctest.Wait()
		if n := len(s.configs); n != 1 {
			t.Errorf("the names of %d configs are known, want those of one", n)
		}
	})
}

func TestTheNewestOfANameCounts(t *testing.T) {
	var s Set
	old, other, next := &Entry{Name: "lb"}, &Entry{Name: "lb_2"}, &Entry{Name: "lb"}
	s.Add(old)
	s.Add(other)
	s.Add(next)
	if got := s.Entries(); !slices.Equal(got, []*Entry{next, other}) {
		t.Errorf("got %v", got)
	}
	s.Remove(next) // its config could not be loaded
	if got := s.Entries(); !slices.Equal(got, []*Entry{old, other}) {
		t.Errorf("got %v", got)
	}
}
