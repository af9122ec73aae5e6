package callers

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
)

// TestForgottenCallersAreNotSent has a thousand new callers each month, of
// which all other replicas forget the ones before, too.
func TestForgottenCallersAreNotSent(t *testing.T) {
	from, to := tokenLimiters(t, "1M/minute"), tokenLimiters(t, "1M/minute")
	var a, b Tally
	a.Share(digest, from)
	b.Share(digest, to)
	for month := range 5 {
		now := someTime.AddDate(0, month, 0)
		for i := range 1000 {
			spend(from, now, fmt.Sprintf("%d of %d", i, month), 7)
		}
		spend(from, now, "stays", 7)
		for _, r := range a.sent(now) {
			if err := b.Hear(r.Message, now); err != nil {
				t.Fatal(err)
			}
		}
		members := 0
		for _, c := range a.pools[0].chunks {
			members += len(c.members)
		}
		if all := len(from.All()); members != all || all > 1001 || len(a.pools[0].chunks) > 12 {
			t.Errorf("in month %d %d members are in %d chunks, of %d callers", month, members, len(a.pools[0].chunks), all)
		}
		for _, name := range []string{"stays", fmt.Sprintf("999 of %d", month)} {
			if used := tokensUsed(to, now, name); used != 7 {
				t.Errorf("in month %d %s has used %d elsewhere", month, name, used)
			}
		}
	}
}

func TestWhatATokenSaysIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		config := Config{Tiers: []Tier{{Name: "gold"}, {Name: "bronze"}}}
		c := New(Options{Config: config, Pool: t.Name(), Logger: zap.NewNop()})
		defer c.Close()
		for day := range 90 {
			for i := range 100 {
				token := &keys.Identity{Name: fmt.Sprintf("%d of %d", i, day), Tier: "gold", Issued: time.Now()}
				c.PlaceByToken(token)
				a, _ := c.Admit(time.Now(), token.Name, limiter.Estimate{Prompt: 1})
				a.Settle(time.Now(), limiter.Cost{Requests: 1, Prompt: 1})
				if c.of(token.Name) == c.blocks.Load().others.usual {
					t.Fatal("it is not in the tier of its token")
				}
			}
			time.Sleep(24 * time.Hour)
		}
		if n := len(c.byToken.Load().said); n > 400 {
			t.Errorf("it is known what the tokens of %d callers say", n)
		}
		if n := len(c.kept.limiters.All()); n > 3300 {
			t.Errorf("%d callers have limiters", n)
		}
	})
}
