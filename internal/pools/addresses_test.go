package pools

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

func upstreams(dials ...string) (pool reverseproxy.UpstreamPool) {
	for _, dial := range dials {
		pool = append(pool, &reverseproxy.Upstream{Dial: dial})
	}
	return pool
}

// wantKnown checks which addresses are known, of which each has a health in
// use.
func (a *Addresses) wantKnown(t *testing.T, want ...string) {
	t.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	if got := slices.Sorted(maps.Keys(a.known)); !slices.Equal(got, want) {
		t.Errorf("known are %v, want %v", got, want)
	}
	for _, dial := range []string{"a", "b", "c", "d", "e", "f"} {
		if uses, _ := healths.References(dial); uses > 0 != slices.Contains(want, dial) || uses > 1 {
			t.Errorf("%s has %d uses", dial, uses)
		}
	}
}

func TestAnAddressIsForgottenThatWasNotUsedForAnHour(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		a := &Addresses{Forgotten: func(string) {}}
		first := a.Use(upstreams("a", "b", "c", "d"))
		m := pool.NewMember("c", first[2])
		p := pool.New([]*pool.Member{m})
		defer p.Close()
		m.CoolDown(pool.Refusal{Throttle: true, Whole: true, Wait: 100 * time.Minute}, time.Now())

		a.Use(upstreams("a", "d"))
		time.Sleep(40 * time.Minute)
		second := a.Use(upstreams("a", "e"))
		if second[0] != first[0] {
			t.Error("the health of an address in use is another one")
		}
		time.Sleep(30*time.Minute + time.Second)
		synctest.Wait()
		a.wantKnown(t, "a", "c", "d", "e") // c throttles for longer
		time.Sleep(time.Hour)
		synctest.Wait()
		a.wantKnown(t, "a", "e") // although no other request came
		if again := a.Use(upstreams("b", "a")); again[0] == first[1] || again[1] != first[0] {
			t.Error("an address that was forgotten has its health from before")
		}
		if err := a.Close(); err != nil {
			t.Error(err)
		}
		a.wantKnown(t)
		a.Use(upstreams("f"))
		a.wantKnown(t) // no health is loaded after the end
	})
}

func TestThousandsOfAddressesThatCameAndWentLeaveNothing(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		a := &Addresses{Forgotten: func(string) {}}
		defer a.Close()
		for i := range 4000 {
			a.Use(upstreams(fmt.Sprint(i)))
			time.Sleep(10 * time.Second)
		}
		synctest.Wait()
		if len(a.known) > 500 {
			t.Errorf("%d are known, want those of the last 70 minutes", len(a.known))
		}
	})
}
