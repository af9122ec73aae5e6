package backend

import (
	"context"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"slices"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

const (
	// recheckTimeout is the time limit for reaching a backend.
	recheckTimeout = 10 * time.Second
	// maxRecheckError is how much of an error is shown. An error may contain
	// the names of a certificate, or data from a backend.
	maxRecheckError = 256
)

// Rechecker connects in the background to unreachable backends, so that no
// request has to find out that they are reachable again. It is a listener of
// their pool. After Start, it also makes health checks.
type Rechecker struct {
	// Context ends all rechecks and checks when it is done.
	Context   context.Context
	Transport http.RoundTripper
	Backends  []*Backend
}

// Happened implements pool.Listener.
func (c *Rechecker) Happened(e pool.Event) {
	if e.Happening == pool.RecheckDue && c.Context.Err() == nil && e.Member.StartRecheck(time.Now()) {
		go c.recheck(e.Member)
	}
}

// RecheckAll rechecks the unreachable members of a pool, except those that were
// rechecked just before.
func (c *Rechecker) RecheckAll(p *pool.Pool, now time.Time) {
	for _, m := range p.Rechecks(now) {
		go c.recheck(m)
	}
}

func (c *Rechecker) recheck(m *pool.Member) {
	defer m.EndRecheck()
	err := verdict.OwnWords(c.connect(m))
	if err == nil || c.Context.Err() != nil {
		return
	}
	m.StillUnreachable(pool.Refusal{
		Reason: pool.Reason{Class: string(verdict.Unreachable), Cause: verdict.CauseOf(err),
			Error: pool.CutText(err.Error(), maxRecheckError)},
		Whole: true, Unreachable: true,
	}, time.Now())
}

func (c *Rechecker) backendOf(m *pool.Member) *Backend {
	return c.Backends[slices.IndexFunc(c.Backends, func(b *Backend) bool { return b.Name == m.Name })]
}

// connect connects to the member. It records at once that the member was
// reached, or returns an error. The request has no credential, so the answer
// costs nothing.
func (c *Rechecker) connect(m *pool.Member) error {
	at := c.backendOf(m).Origin
	ctx, cancel := context.WithTimeout(withUpstream(c.Context, at), recheckTimeout)
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
	res, err := c.Transport.RoundTrip(r)
	switch {
	case err == nil:
		res.Body.Close()
		m.Reached()
	case connected.Load():
		return nil
	}
	return err
}

// withUpstream adds the placeholders of reverse_proxy that tls_server_name may
// contain. Without them, Caddy's transport panics.
func withUpstream(ctx context.Context, at *url.URL) context.Context {
	repl, dial := caddy.NewReplacer(), openaiapi.DialAddress(at)
	host, port, _ := net.SplitHostPort(dial)
	for name, value := range map[string]string{"address": dial, "hostport": dial, "host": host, "port": port} {
		repl.Set("http.reverse_proxy.upstream."+name, value)
	}
	return context.WithValue(ctx, caddy.ReplacerCtxKey, repl)
}
