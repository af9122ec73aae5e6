package plainproxy

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

// loaded counts the healths that are in use, by address.
type loaded struct {
	sync.Mutex
	times map[string]int
}

func newLoaded() *loaded { return &loaded{times: make(map[string]int)} }

func (l *loaded) add(dial string, n int) {
	l.Lock()
	defer l.Unlock()
	l.times[dial] += n
}

func (l *loaded) addresses() *Addresses {
	return &Addresses{
		Load:   func(dial string) *pool.Health { l.add(dial, 1); return new(pool.Health) },
		Unload: func(dial string) error { l.add(dial, -1); return nil },
		Forgotten: func(dial string) {
			l.Lock()
			defer l.Unlock()
			delete(l.times, dial)
		},
	}
}

func upstreams(dials ...string) (pool reverseproxy.UpstreamPool) {
	for _, dial := range dials {
		pool = append(pool, &reverseproxy.Upstream{Dial: dial})
	}
	return pool
}

func (l *loaded) want(t *testing.T, want ...string) {
	t.Helper()
	l.Lock()
	defer l.Unlock()
	if got := slices.Sorted(maps.Keys(l.times)); !slices.Equal(got, want) {
		t.Errorf("known are %v, want %v", got, want)
	}
}

func TestAnAddressIsForgottenThatWasNotUsedForAnHour(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLoaded()
		a := l.addresses()
		first := a.Use(upstreams("a", "b", "c", "d"))
		m := pool.NewMember("c", first[2])
		p := pool.New([]*pool.Member{m})
		defer p.Close()
		m.Bench(pool.Refusal{Throttle: true, Whole: true, Wait: 100 * time.Minute}, time.Now())

		a.Use(upstreams("a", "d"))
		time.Sleep(40 * time.Minute)
		second := a.Use(upstreams("a", "e"))
		if second[0] != first[0] {
			t.Error("the health of an address in use is another one")
		}
		time.Sleep(30*time.Minute + time.Second)
		synctest.Wait()
		l.want(t, "a", "c", "d", "e") // c throttles for longer
		time.Sleep(time.Hour)
		synctest.Wait()
		l.want(t, "a", "e") // although no other request came
		if again := a.Use(upstreams("b", "a")); again[0] == first[1] || again[1] != first[0] {
			t.Error("an address that was forgotten has its health from before")
		}
		if err := a.Close(); err != nil {
			t.Error(err)
		}
		for dial, n := range l.times {
			if n != 0 {
				t.Errorf("%s is loaded %d times more than it is given back", dial, n)
			}
		}
		if a.Use(upstreams("f")); l.times["f"] != 0 {
			t.Error("a health was loaded after the end")
		}
	})
}

func TestThousandsOfAddressesThatCameAndWentLeaveNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLoaded()
		a := l.addresses()
		defer a.Close()
		for i := range 4000 {
			a.Use(upstreams(fmt.Sprint(i)))
			time.Sleep(10 * time.Second)
		}
		synctest.Wait()
		if len(l.times) > 500 {
			t.Errorf("%d are known, want those of the last 70 minutes", len(l.times))
		}
	})
}
