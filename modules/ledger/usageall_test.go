package ledger

import (
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

func TestPagesAreThoseOfAllPoolsExceptOfAnotherEngine(t *testing.T) {
	shared := seam.SharedPools{Pools: []string{"llm"}, Elsewhere: []string{"secret"}}
	for pool, want := range map[string]bool{"llm": true, "renamed": true, "secret": false} {
		if ofEngine(shared, pool) != want {
			t.Errorf("%s: got %v", pool, !want)
		}
	}
}

func TestAQuestionAboutPagesNamesAPeriod(t *testing.T) {
	for days, want := range map[string]bool{"2026-11": true, "2026-11-25": true, "": false, "2026": false, "2026-11-": false} {
		if _, err := listPages(t.Context(), days, seam.SharedPools{}); (err == nil) != want {
			t.Errorf("%q: got %v", days, err)
		}
	}
}
