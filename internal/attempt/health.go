package attempt

import (
	"cmp"
	"errors"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// PassiveHealth configures what the balancer learns from replies: which replies
// start a cooldown, and how long it lasts.
type PassiveHealth struct {
	// FailDuration is how long a backend stays a suspect after a failure, and
	// how long a cooldown lasts if a 429 names no time. Default: 10s.
	//
	//	fail_duration <duration>
	FailDuration caddy.Duration `json:"fail_duration,omitempty"`

	// RetryAfterMax is the longest cooldown of a backend that throttles or has
	// no budget left, and the cooldown without budget if the reply names no
	// time. Default: 5m.
	//
	//	retry_after_max <duration>
	RetryAfterMax caddy.Duration `json:"retry_after_max,omitempty"`

	// Silence is whether requests avoid silent backends, and those that wait
	// there move to other backends. Default: on.
	//
	//	silence off
	Silence *bool `json:"silence,omitempty"`

	// QuotaSteering is whether backends without room in their rate limits are
	// passed over. Default: on.
	//
	//	quota_steering off
	QuotaSteering *bool `json:"quota_steering,omitempty"`
}

// shortestThrottle is the shortest cooldown of a backend that throttles.
const shortestThrottle = 50 * time.Millisecond

// misconfigured is the cooldown of a backend whose configuration seems wrong:
// it refuses its credential, or lacks the model.
const misconfigured = time.Minute

// Provision checks the options and sets their defaults.
func (p *PassiveHealth) Provision() error {
	for _, d := range []struct {
		name     string
		value    *caddy.Duration
		fallback time.Duration
	}{
		{"fail_duration", &p.FailDuration, 10 * time.Second},
		{"retry_after_max", &p.RetryAfterMax, 5 * time.Minute},
	} {
		if err := directive.DefaultDuration(d.name, d.value, d.fallback); err != nil {
			return err
		}
	}
	return nil
}

// Directives returns the options in a Caddyfile.
func (p *PassiveHealth) Directives() directive.Options {
	return directive.Options{
		"fail_duration":   directive.Duration(&p.FailDuration),
		"retry_after_max": directive.Duration(&p.RetryAfterMax),
		"silence":         directive.Off(&p.Silence),
		"quota_steering":  directive.Off(&p.QuotaSteering),
	}.Check(func() error {
		checked := *p
		return checked.Provision()
	})
}

// Cooldown describes the cooldown that a reply starts.
type Cooldown struct {
	// Wait is the length of the cooldown. Longest is the length up to which
	// repeated replies may extend it: see [pool.Refusal].
	Wait, Longest time.Duration
	// Guess reports whether the backend named no time.
	Guess bool
	// OncePerRequest reports whether one request starts at most one such
	// cooldown, because the fault may be the request's own: a request that
	// fails at every backend is itself the cause.
	OncePerRequest bool
}

// CooldownFor returns the cooldown that a reply starts, or false if it starts
// none. busy reports whether the backend serves other requests. A busy backend
// that accepts no request on two connections only has too many streams, so it
// gets no cooldown.
func (p *PassiveHealth) CooldownFor(r *Reply, busy bool) (c Cooldown, coolsDown bool) {
	traits := r.traits()
	switch r.Class {
	case verdict.Throttled:
		unnamed := time.Duration(min(p.FailDuration, p.RetryAfterMax))
		c.Wait = p.hinted(r, unnamed)
		// A backend that always says 0 names no time: its cooldown grows to
		// fail_duration at most.
		if c.Guess = r.Source == verdict.NoHint; !c.Guess && r.Wait <= 0 {
			c.Longest = max(c.Wait, unnamed)
		}
	case verdict.Overloaded:
		c.Wait = p.hinted(r, time.Duration(p.FailDuration))
	case verdict.Quota:
		// a budget is not refilled in a moment, whatever a gateway writes into
		// each 429
		c.Wait = min(max(p.hinted(r, time.Duration(p.RetryAfterMax)), time.Duration(p.FailDuration)),
			time.Duration(p.RetryAfterMax))
	case verdict.NoModel:
		if !traits.Kind.Infers() { // another operation has no cooldown for a model
			return c, false
		}
		c = Cooldown{Wait: misconfigured, OncePerRequest: true}
	case verdict.Credential, verdict.NotPermitted:
		// a credential for inference may lack every other permission, that to
		// open a WebSocket included, and uvicorn answers 403 where it has none
		if !traits.Kind.Infers() || r.refusesHandshake() && (r.Class == verdict.NotPermitted ||
			r.Status == http.StatusForbidden) {
			return c, false
		}
		c = Cooldown{Wait: misconfigured, OncePerRequest: true}
	case verdict.NoCredential:
		if r.Status != 0 {
			return c, false
		}
		c.Wait = min(cmp.Or(r.Wait, misconfigured), misconfigured)
	case verdict.Unreachable:
		c = Cooldown{Wait: time.Duration(p.FailDuration)}
	default:
		// A backend that cuts the connection during an upload may have refused
		// the upload.
		if !r.Class.Failover() || !r.Class.Blames() || r.isImpatient() || r.Uploading ||
			busy && errors.Is(r.Err, ErrLostAgain) {
			return c, false
		}
		return p.Failure(), true
	}
	return c, true
}

// Failure returns the cooldown for a failure that may be the request's fault.
func (p *PassiveHealth) Failure() Cooldown {
	return Cooldown{Wait: time.Duration(p.FailDuration), OncePerRequest: true}
}

// hinted returns the time for which the backend asked not to be called, within
// the limits. It returns without if the backend named no time.
func (p *PassiveHealth) hinted(r *Reply, without time.Duration) time.Duration {
	if r.Source == verdict.NoHint {
		return without
	}
	return min(max(r.Wait, shortestThrottle), time.Duration(p.RetryAfterMax))
}
