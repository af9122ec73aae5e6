package backend

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

// dialer is a transport that connects, or waits until it is told to stop.
type dialer struct {
	dials    atomic.Int32
	connects atomic.Bool
}

func (d *dialer) RoundTrip(r *http.Request) (*http.Response, error) {
	d.dials.Add(1)
	if d.connects.Load() {
		httptrace.ContextClientTrace(r.Context()).GotConn(httptrace.GotConnInfo{})
	}
	<-r.Context().Done()
	return nil, errors.New("dial tcp: lookup of one of these names: " + strings.Repeat("a.example.com\xff ", 100))
}

// unreachablePool is a pool of a backend that just became unreachable, and its
// rechecker until the config is unloaded.
func unreachablePool(t *testing.T, d *dialer) (p *pool.Pool, c *Rechecker, unload func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	c = &Rechecker{Context: ctx, Transport: d, Backends: []*Backend{{Name: "a", Resolved: Resolved{Origin: &url.URL{Scheme: "http", Host: "a"}}}}}
	p = pool.New([]*pool.Member{pool.NewMember("a", new(pool.Health))}, c)
	t.Cleanup(p.Close)
	p.Members[0].CoolDown(pool.Refusal{Reason: pool.Reason{Class: "unreachable"}, Whole: true, Unreachable: true}, time.Now())
	return p, c, cancel
}

// usable reports whether a backend of the pool may be used.
func usable(p *pool.Pool) bool {
	synctest.Wait()
	usable, _ := p.Usable(time.Now())
	return usable
}

func TestALostBackendIsTriedAtGrowingIntervalsUntilItIsReached(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		var d dialer
		p, _, _ := unreachablePool(t, &d)
		attempts := 0
		for _, seconds := range []int{1, 2, 4, 8, 16, 32, 60, 60} {
			time.Sleep(time.Duration(seconds)*time.Second - time.Millisecond)
			if usable(p); int(d.dials.Load()) != attempts {
				t.Errorf("%d attempts before the pause of %d s is over, want %d", d.dials.Load(), seconds, attempts)
			}
			time.Sleep(time.Millisecond)
			if attempts++; usable(p) || int(d.dials.Load()) != attempts {
				t.Errorf("%d attempts after the pause of %d s, want %d", d.dials.Load(), seconds, attempts)
			}
			time.Sleep(recheckTimeout)
		}
		d.connects.Store(true)
		time.Sleep(time.Minute)
		if !usable(p) {
			t.Error("it is not back when it was reached")
		}
		time.Sleep(time.Hour)
		if usable(p); int(d.dials.Load()) != attempts+1 {
			t.Errorf("%d attempts, want no more than %d", d.dials.Load(), attempts+1)
		}
	})
}

func TestAnErrorIsShownInShort(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		p, _, _ := unreachablePool(t, new(dialer))
		time.Sleep(time.Second + recheckTimeout)
		usable(p)
		if text := p.Snapshot(time.Now())[0].Cooldowns[0].Error; len(text) < 100 || len(text) > maxRecheckError || !utf8.ValidString(text) {
			t.Errorf("the error is %q", text)
		}
	})
}

func TestAReadinessProbeStartsAnAttemptAtOnce(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		var d dialer
		p, c, _ := unreachablePool(t, &d)
		c.RecheckAll(p, time.Now())
		if usable(p); d.dials.Load() != 0 {
			t.Error("it is tried in the moment in which it was lost")
		}
		time.Sleep(time.Second + recheckTimeout + 2*time.Second + recheckTimeout) // two attempts, and the next is due in 4 s
		usable(p)
		time.Sleep(2 * time.Second)
		for range 5 {
			c.RecheckAll(p, time.Now())
			if usable(p); d.dials.Load() != 3 {
				t.Errorf("%d attempts, want one at a time", d.dials.Load())
			}
		}
	})
}

func TestAConfigThatIsUnloadedLeavesLostBackendsToTheNextOne(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		var d dialer
		p, _, unload := unreachablePool(t, &d)
		time.Sleep(time.Second)
		usable(p)
		unload() // synctest notices a goroutine that stays
		if usable(p) || d.dials.Load() != 1 {
			t.Errorf("%d attempts, want 1", d.dials.Load())
		}
		if got := p.Rechecks(time.Now()); len(got) != 1 {
			t.Error("the next config does not try to reach it")
		}
	})
}
