package backend

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

const (
	defaultHealthInterval = caddy.Duration(30 * time.Second)
	defaultHealthStatus   = 2 // of any code 2xx

	// causeOfStatus is the cause of a failed check whose reply has an
	// unexpected status.
	causeOfStatus = "health_status"
)

// checkHealthOptions checks the options of health checks.
func (b *Backend) checkHealthOptions() error {
	switch _, err := url.ParseRequestURI(b.HealthURI); {
	case b.HealthURI == "" && b.HealthInterval != 0:
		return errors.New("health_interval requires health_uri")
	case b.HealthURI == "" && b.HealthStatus != 0:
		return errors.New("health_status requires health_uri")
	case b.HealthURI == "":
		return nil
	case err != nil || !strings.HasPrefix(b.HealthURI, "/") || strings.ContainsAny(b.HealthURI, "#{}"):
		return fmt.Errorf("health_uri '%s' is not a path that begins with /, such as /health", b.HealthURI)
	case b.HealthInterval < 0: // in JSON
		return fmt.Errorf("health_interval '%s' is not a duration above 0", time.Duration(b.HealthInterval))
	case b.HealthStatus != 0 && !directive.IsStatus(b.HealthStatus): // in JSON
		return fmt.Errorf("health_status '%d' is not a status code, or the first digit of a class", b.HealthStatus)
	}
	return nil
}

// Start starts the health checks of those members of the pool that have any.
// Each is checked at once, and then at its interval, until the config is
// unloaded.
func (c *Rechecker) Start(p *pool.Pool) {
	for _, m := range p.Members {
		if b := c.backendOf(m); b.HealthURI != "" {
			go c.checkRegularly(m, b)
		}
	}
}

func (c *Rechecker) checkRegularly(m *pool.Member, b *Backend) {
	ticker := time.NewTicker(time.Duration(b.HealthInterval))
	defer ticker.Stop()
	for c.Context.Err() == nil {
		c.checkHealth(m, b)
		select {
		case <-c.Context.Done():
		case <-ticker.C:
		}
	}
}

// checkHealth makes a health check, and records its result. The request has no
// credential, because it is not for the API and must cost nothing.
func (c *Rechecker) checkHealth(m *pool.Member, b *Backend) {
	status, connected, err := c.askHealth(b)
	switch {
	case c.Context.Err() != nil: // which also ended the check
	case err == nil:
		m.PassedCheck()
	default:
		class := verdict.Unreachable
		if connected {
			class = verdict.Failed
		}
		err = verdict.OwnWords(err)
		m.FailedCheck(pool.Reason{Class: string(class), Status: status, Cause: verdict.CauseOf(err),
			Error: pool.CutText(err.Error(), maxRecheckError)})
	}
}

// askHealth sends a health check. It returns the reply's status, or 0 without a
// reply, and an error if the check failed.
func (c *Rechecker) askHealth(b *Backend) (status int, connected bool, err error) {
	ctx, cancel := context.WithTimeout(withUpstream(c.Context, b.Origin), recheckTimeout)
	defer cancel()
	var got atomic.Bool
	ctx = httptrace.WithClientTrace(ctx,
		&httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) { got.Store(true) }})
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, b.Origin.String()+b.HealthURI, http.NoBody)
	if err != nil {
		return 0, false, err
	}
	maps.Copy(r.Header, b.header)
	r.Host = cmp.Or(b.host, r.Host)
	res, err := c.Transport.RoundTrip(r)
	if err != nil {
		return 0, got.Load(), err
	}
	defer res.Body.Close()
	if !caddyhttp.StatusCodeMatches(res.StatusCode, b.HealthStatus) {
		err = &verdict.CauseError{
			Word: causeOfStatus, Text: fmt.Sprintf("the health check was answered with status %d", res.StatusCode),
		}
	}
	return res.StatusCode, true, err
}
