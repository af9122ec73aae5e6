// Package reach finds out in the background whether backends can be reached that
// could not be, so that no request has to.
package reach

import (
	"context"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/endpoint"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/showntext"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

const (
	// timeout is how long it may take to reach a backend.
	timeout = 10 * time.Second
	// maxErrorText is how much of an error is shown. It may have the names of a
	// certificate, or what a backend sent.
	maxErrorText = 256
)

// Seeker tries to reach the backends of a pool that are lost, when the pool tells
// it that an attempt is due.
type Seeker struct {
	// Context ends every attempt when it is done.
	Context context.Context
	// Transport makes connections as it does for requests.
	Transport http.RoundTripper
	// URL is where a member is.
	URL func(*pool.Member) *url.URL
	// Class is that of the bench of a backend that cannot be reached.
	Class string
}

// Happened implements pool.Listener.
func (s *Seeker) Happened(e pool.Event) {
	if e.Happening == pool.RecheckDue && s.Context.Err() == nil && e.Member.StartRecheck() {
		go s.look(e.Member)
	}
}

// Seek tries to reach the members of a pool that are lost, and for which an
// attempt is due.
func (s *Seeker) Seek(p *pool.Pool, now time.Time) {
	for _, m := range p.Rechecks(now) {
		go s.look(m)
	}
}

func (s *Seeker) look(m *pool.Member) {
	defer m.EndRecheck()
	err := s.reach(m)
	if err == nil || s.Context.Err() != nil {
		return
	}
	m.StillUnreachable(pool.Refusal{
		Reason: pool.Reason{Class: s.Class, Cause: verdict.CauseOf(err), Error: showntext.Cut(err.Error(), maxErrorText)}, Whole: true, Unreachable: true,
	}, time.Now())
}

// reach connects to the member, which it tells as soon as that is so, or returns
// why it could not. The request has no credential, so whatever the answer is,
// nobody pays for it.
func (s *Seeker) reach(m *pool.Member) error {
	at := s.URL(m)
	ctx, cancel := context.WithTimeout(withPlaceholders(s.Context, at), timeout)
	defer cancel()
	var connected atomic.Bool
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(got httptrace.GotConnInfo) {
		if !got.Reused { // one that was idle may be dead
			connected.Store(true)
			m.Reached()
		}
	}})
	root := url.URL{Scheme: at.Scheme, Host: at.Host, Path: "/"}
	r, err := http.NewRequestWithContext(ctx, http.MethodHead, root.String(), http.NoBody)
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

// withPlaceholders adds those of reverse_proxy that tls_server_name may have, without which Caddy's transport
// panics.
func withPlaceholders(ctx context.Context, at *url.URL) context.Context {
	repl, dial := caddy.NewReplacer(), endpoint.Dial(at)
	host, port, _ := net.SplitHostPort(dial)
	for name, value := range map[string]string{"address": dial, "hostport": dial, "host": host, "port": port} {
		repl.Set("http.reverse_proxy.upstream."+name, value)
	}
	return context.WithValue(ctx, caddy.ReplacerCtxKey, repl)
}
