package reach

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

// dialer is a transport that connects, or waits until it is told to stop.
type dialer struct {
	dials    int
	connects bool
}

func (d *dialer) RoundTrip(r *http.Request) (*http.Response, error) {
	d.dials++
	if d.connects {
		httptrace.ContextClientTrace(r.Context()).GotConn(httptrace.GotConnInfo{})
	}
	<-r.Context().Done()
	return nil, errors.New("no answer")
}

// lostPool is a pool of a backend that was lost ten seconds ago, and who looks
// for it.
func lostPool(t *testing.T, d *dialer) (s *Seeker, unload func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	lost := pool.Refusal{Reason: pool.Reason{Class: "unreachable"}, Whole: true, Lost: true, Wait: 10 * time.Second}
	s = &Seeker{
		Context: ctx, Transport: d, Refusal: lost,
		Pool: pool.New([]*pool.Member{pool.NewMember("a", new(pool.Health))}),
		URL:  func(*pool.Member) *url.URL { return &url.URL{Scheme: "http", Host: "a"} },
	}
	t.Cleanup(s.Pool.Close)
	s.Pool.Members[0].Bench(lost, time.Now())
	s.Seek(time.Now())
	synctest.Wait()
	if d.dials != 0 {
		t.Error("a backend is looked for while it is benched")
	}
	time.Sleep(10 * time.Second)
	return s, cancel
}

// wait is how long it takes until the pool may be usable. 0: it is.
func wait(s *Seeker) time.Duration {
	synctest.Wait()
	_, wait := s.Pool.Usable(time.Now())
	return wait
}

func TestALostBackendIsLookedForOnceAtATimeAndThenBenched(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var d dialer
		s, _ := lostPool(t, &d)
		for range 5 {
			s.Seek(time.Now())
			if got := wait(s); got != time.Second || d.dials != 1 {
				t.Errorf("it may be usable in %s, after %d dials", got, d.dials)
			}
			time.Sleep(time.Second)
		}
		time.Sleep(timeout - 5*time.Second)
		if got := wait(s); got != 10*time.Second {
			t.Errorf("after the timeout, it may be usable in %s", got)
		}
		time.Sleep(10 * time.Second)
		d.connects = true
		s.Seek(time.Now())
		if got := wait(s); got != 0 || d.dials != 2 {
			t.Errorf("as soon as it is connected, it may be usable in %s, after %d dials", got, d.dials)
		}
		time.Sleep(timeout)
		if got := wait(s); got != 0 {
			t.Errorf("without an answer, it may be usable in %s", got)
		}
	})
}

func TestAConfigThatIsUnloadedLooksForNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var d dialer
		s, unload := lostPool(t, &d)
		s.Seek(time.Now())
		synctest.Wait()
		unload() // synctest notices a goroutine that stays
		if got := wait(s); got != time.Second {
			t.Errorf("it may be usable in %s", got)
		}
		if got := s.Pool.Seek(time.Now()); len(got) != 1 {
			t.Error("the next config does not look for it")
		}
	})
}
