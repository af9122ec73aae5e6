// Package reach finds out in the background whether backends can be reached that
// could not be. While a replica is not ready, it may get no request that would
// find out.
package reach

import (
	"context"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"sync/atomic"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/cause"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

// timeout is how long it may take to reach a backend.
const timeout = 10 * time.Second

// Seeker looks for the backends of a pool.
type Seeker struct {
	// Context ends every attempt when it is done.
	Context context.Context
	Pool    *pool.Pool
	// Transport makes connections as it does for requests.
	Transport http.RoundTripper
	// URL is where a member is.
	URL func(*pool.Member) *url.URL
	// Refusal is that for which a member is benched that is still not reached.
	Refusal pool.Refusal
}

// Seek begins to look for the members that are lost and not benched. Nobody else
// looks for the same ones at that time.
func (s *Seeker) Seek(now time.Time) {
	for _, m := range s.Pool.Seek(now) {
		go s.look(m)
	}
}

func (s *Seeker) look(m *pool.Member) {
	defer m.Sought()
	err := s.reach(m)
	if err == nil || s.Context.Err() != nil {
		return
	}
	refusal := s.Refusal
	refusal.Cause, refusal.Error = cause.Of(err), err.Error()
	m.Bench(refusal, time.Now())
}

// reach connects to the member, which it tells as soon as that is so, or returns
// why it could not. The request has no credential, so whatever the answer is,
// nobody pays for it.
func (s *Seeker) reach(m *pool.Member) error {
	ctx, cancel := context.WithTimeout(s.Context, timeout)
	defer cancel()
	var connected atomic.Bool
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(got httptrace.GotConnInfo) {
		if !got.Reused { // one that was idle may be dead
			connected.Store(true)
			m.Reached()
		}
	}})
	url := url.URL{Scheme: s.URL(m).Scheme, Host: s.URL(m).Host, Path: "/"}
	r, err := http.NewRequestWithContext(ctx, http.MethodHead, url.String(), http.NoBody)
	if err != nil {
		return err
	}
	res, err := s.Transport.RoundTrip(r)
	switch {
	case err == nil:
		res.Body.Close()
		m.Reached()
	case connected.Load():
		return nil
	}
	return err
}
