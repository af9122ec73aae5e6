package callers

import (
	"fmt"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

func TestWhatATokenSaysIsForgotten(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		config := Config{Tiers: []Tier{{Name: "gold"}, {Name: "bronze"}}}
		c := New(Options{Config: config, AdmissionConfig: seam.AdmissionConfig{Pool: t.Name(), Logger: zap.NewNop()}})
		defer c.Close()
		for day := range 90 {
			for i := range 100 {
				token := &keys.Identity{Name: fmt.Sprintf("%d of %d", i, day), Tier: "gold", Issued: time.Now()}
				c.Grant(keys.Caller{Name: token.Name, Token: token})
				spend(c, token.Name, 1)
				if c.of(token.Name) == c.blocks.Load().others.usual {
					t.Fatal("it is not in the tier of its token")
				}
			}
			time.Sleep(24 * time.Hour)
		}
		if n := len(c.byToken.Load().placements); n > 400 {
			t.Errorf("it is known what the tokens of %d callers say", n)
		}
		if n := len(c.kept.limiters.All()); n > 3300 {
			t.Errorf("%d callers have limiters", n)
		}
	})
}
