package callers

import (
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

func TestAStarStandsForAnyCharactersOfABackendsName(t *testing.T) {
	for name, want := range map[string]string{
		"ptu":     "ptu",
		"ptu-*":   "ptu-1 ptu-eu-1",
		"*-1":     "ptu-1 ptu-eu-1",
		"ptu-*-1": "ptu-eu-1",
		"*":       "ptu ptu-1 ptu-eu-1 a.b[1]",
		"a.b[*]":  "a.b[1]",
		"a?b*":    "",
		"p":       "",
	} {
		var got []string
		for _, backend := range []string{"ptu", "ptu-1", "ptu-eu-1", "a.b[1]"} {
			if matches([]string{name}, backend) {
				got = append(got, backend)
			}
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s is the name of %v, want %s", name, got, want)
		}
	}
}

// TestBackendsAreCheckedAsFarAsTheyAreKnown because names and models may be
// known only at load.
func TestBackendsAreCheckedAsFarAsTheyAreKnown(t *testing.T) {
	c := Config{Callers: []Caller{{Name: "alice", Allowance: Allowance{Backends: []string{"ptu"}, Models: []string{"o3"}}}}}
	for want, backends := range map[string][]seam.NamedBackend{
		"":                             nil,
		"no name":                      {{Models: []string{"gpt-4o"}}, {Name: "east", Models: []string{"gpt-4o"}}},
		"no models":                    {{Name: "ptu"}, {Name: "east", Models: []string{"gpt-4o"}}},
		"no backend has the name":      {{Name: "east"}},
		"no backend that it may use":   {{Name: "ptu", Models: []string{"gpt-4o"}}, {Name: "east"}},
		"models of another are not it": {{Name: "ptu", Models: []string{"o3"}}, {Name: "east", Models: []string{"gpt-4o"}}},
	} {
		err := c.Check(true, backends)
		if wrong := strings.HasPrefix(want, "no backend"); wrong != (err != nil) || wrong && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v", want, err)
		}
	}
}
