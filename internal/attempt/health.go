package attempt

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/pulse"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// PassiveHealth configures what the balancer learns from replies: which replies
// bench a backend, and for how long.
type PassiveHealth struct {
	// UnhealthyStatus lists the statuses that are classified. A reply with any
	// other status is passed on to the client and benches no backend. 4 and 5
	// stand for all of 4xx and 5xx. A listed status without a class of its own
	// counts as a failure. Default: every status with its own class.
	UnhealthyStatus []int `json:"unhealthy_status,omitempty"`

	// FailDuration is how long a backend is benched after a failure, and how
	// long a failure counts towards max_fails. A backend that is benched for a
	// failure is used when no other backend is left. Default: 10s.
	FailDuration caddy.Duration `json:"fail_duration,omitempty"`

	// MaxFails is how many failures within fail_duration bench a backend.
	// Default: 1.
	MaxFails int `json:"max_fails,omitempty"`

	// RetryAfterDefault is how long a backend is benched that throttles and
	// does not say for how long. While no other backend is left, it is tried
	// before that. Default: 10s, or RetryAfterMax if that is less.
	RetryAfterDefault caddy.Duration `json:"retry_after_default,omitempty"`

	// RetryAfterMin is the shortest bench of a backend that throttles.
	// Default: 50ms.
	RetryAfterMin caddy.Duration `json:"retry_after_min,omitempty"`

	// RetryAfterMax is the longest bench of a backend that throttles, however
	// long it asks for, and the bench of one whose quota is used up.
	// Default: 5m.
	RetryAfterMax caddy.Duration `json:"retry_after_max,omitempty"`

	// Silence is how many times the usual wait for the first byte of a reply is too
	// long. A backend is silent if two or more requests for inference have waited for
	// longer than that, for longer than the longest recent wait and for half a second,
	// and none of them has got a byte. It is used when no other backend is left, and
	// requests that wait there go on to a backend that answers. It is 2 or more; 0
	// turns that off. Default: 4.
	Silence *pulse.Factor `json:"silence,omitempty"`

	// QuotaSteering passes a backend over that has no room for the request in its rate
	// limits, while another backend of its priority has. What is left is known from the
	// x-ratelimit headers of replies and from what was sent since. Default: true.
	QuotaSteering *bool `json:"quota_steering,omitempty"`

	// AllThrottled defines the outcome of a request while all backends throttle:
	// `respond` answers 429 with the shortest wait, `forward` sends the request
	// to the backend with the shortest wait and passes the reply on. If another
	// backend fails or is busy, forward works like respond. Default: respond.
	AllThrottled string `json:"all_throttled,omitempty"`
}

// The values of all_throttled.
const (
	RespondThrottled = "respond"
	ForwardThrottled = "forward"
)

// misconfigured is how long a backend is benched whose configuration is wrong:
// it refuses its credential, or does not have the model.
const misconfigured = time.Minute

// Provision checks the options and sets their defaults.
func (p *PassiveHealth) Provision() error {
	for _, d := range []struct {
		name     string
		value    *caddy.Duration
		fallback time.Duration
	}{
		{"fail_duration", &p.FailDuration, 10 * time.Second},
		{"retry_after_default", &p.RetryAfterDefault, min(10*time.Second, cmp.Or(time.Duration(p.RetryAfterMax), 10*time.Second))},
		{"retry_after_min", &p.RetryAfterMin, 50 * time.Millisecond},
		{"retry_after_max", &p.RetryAfterMax, 5 * time.Minute},
	} {
		if err := directive.DefaultDuration(d.name, d.value, d.fallback); err != nil {
			return err
		}
	}
	if p.RetryAfterMin > p.RetryAfterMax {
		return fmt.Errorf("retry_after_min '%s' is longer than retry_after_max, which is %s",
			time.Duration(p.RetryAfterMin), time.Duration(p.RetryAfterMax))
	}
	if p.RetryAfterDefault > p.RetryAfterMax {
		return fmt.Errorf("retry_after_default %s: expected no more than retry_after_max, which is %s",
			time.Duration(p.RetryAfterDefault), time.Duration(p.RetryAfterMax))
	}
	if p.MaxFails < 0 {
		return fmt.Errorf("max_fails '%d' is not a whole number of 1 or more", p.MaxFails)
	}
	p.MaxFails = cmp.Or(p.MaxFails, 1)
	if err := pulse.Provision(&p.Silence); err != nil {
		return err
	}
	for _, status := range p.UnhealthyStatus {
		if !validStatusOrClass(status) {
			return fmt.Errorf("unhealthy_status '%d' is not a status from 400 to 599, 4 for 4xx or 5 for 5xx", status)
		}
	}
	switch p.AllThrottled {
	case "", RespondThrottled, ForwardThrottled:
		return nil
	}
	return fmt.Errorf("all_throttled '%s' is not one of %s, %s", p.AllThrottled, RespondThrottled, ForwardThrottled)
}

func validStatusOrClass(status int) bool {
	return status == 4 || status == 5 || status >= 400 && status <= 599
}

// parseStatus reads a status like 503 or a class like 5xx.
func parseStatus(word string) (int, error) {
	status, err := strconv.Atoi(strings.TrimSuffix(word, "xx"))
	if err != nil || !validStatusOrClass(status) || (status < 10) != strings.HasSuffix(word, "xx") {
		return 0, fmt.Errorf("'%s' is not a status from 400 to 599, 4xx or 5xx", word)
	}
	return status, nil
}

// Directives are the options in a Caddyfile.
func (p *PassiveHealth) Directives() directive.Options {
	return directive.Options{
		"unhealthy_status":    directive.Args("at least one status", 1, directive.MaxInt, p.addUnhealthyStatus),
		"fail_duration":       directive.Duration(&p.FailDuration),
		"max_fails":           directive.Int(&p.MaxFails, 1, directive.MaxInt),
		"retry_after_default": directive.Duration(&p.RetryAfterDefault),
		"retry_after_min":     directive.Duration(&p.RetryAfterMin),
		"retry_after_max":     directive.Duration(&p.RetryAfterMax),
		"silence":             directive.Args("a number of 2 or more, or off", 1, 1, pulse.Parse(&p.Silence)),
		"quota_steering":      directive.Off(&p.QuotaSteering),
		"all_throttled":       directive.OneOf(&p.AllThrottled, RespondThrottled, ForwardThrottled),
	}.Check(func() error {
		checked := *p
		return checked.Provision()
	})
}

func (p *PassiveHealth) addUnhealthyStatus(args []string) error {
	for _, arg := range args {
		status, err := parseStatus(arg)
		if err != nil {
			return fmt.Errorf("unhealthy_status %w", err)
		}
		p.UnhealthyStatus = append(p.UnhealthyStatus, status)
	}
	return nil
}

// Bench is what a reply benches.
type Bench struct {
	// Wait is for how long, and Longest what it may become if the backend repeats that: see [pool.Refusal].
	Wait, Longest time.Duration
	// Guess reports whether the backend named no time.
	Guess bool
	// MayBeOfRequest reports whether the fault may be the request's own. One request benches one backend for such
	// faults at most: what fails everywhere is the request's doing.
	MayBeOfRequest bool
	// Counts reports whether it is a failure, which benches only together with others: see MaxFails.
	Counts bool
}

// Bench returns what a reply benches. It returns false if that is nothing. busy reports whether the backend serves other
// requests. If it does, and accepts no more, it only has too many streams.
func (p *PassiveHealth) Bench(r *Reply, busy bool) (b Bench, benches bool) {
	asks := r.asks()
	switch r.Class {
	case verdict.Throttled:
		b.Wait = p.hinted(r, p.RetryAfterDefault)
		if b.Guess = r.Source == verdict.NoHint; !b.Guess && r.Wait <= 0 { // a hint of 0, again and again, is as good as none
			b.Longest = max(b.Wait, time.Duration(p.RetryAfterDefault))
		}
	case verdict.Overloaded:
		b.Wait = p.hinted(r, p.FailDuration)
	case verdict.Quota:
		b.Wait = time.Duration(p.RetryAfterMax)
	case verdict.NoModel:
		if !asks.Kind.Infers() { // another operation has no bench for a model
			return b, false
		}
		b = Bench{Wait: misconfigured, MayBeOfRequest: true}
	case verdict.Credential, verdict.NotPermitted:
		// a credential for inference may lack every other permission, that to open a
		// WebSocket included, and uvicorn answers 403 where it has none
		if !asks.Kind.Infers() || asks.Kind.IsHandshake() && (r.Class == verdict.NotPermitted || r.Status == http.StatusForbidden) {
			return b, false
		}
		b = Bench{Wait: misconfigured, MayBeOfRequest: true}
	case verdict.NoCredential:
		if r.Status != 0 {
			return b, false
		}
		b.Wait = min(cmp.Or(r.Wait, misconfigured), misconfigured)
	case verdict.Unreachable:
		b = Bench{Wait: time.Duration(p.FailDuration), Counts: true}
	default:
		// a backend that breaks off an upload has perhaps refused it
		if !r.Class.Failover() || !r.Class.Blames() || r.Uploading || busy && errors.Is(r.Err, ErrLostAgain) {
			return b, false
		}
		return p.Failure(), true
	}
	return b, true
}

// Failure is what a failure benches that may be the request's own.
func (p *PassiveHealth) Failure() Bench {
	return Bench{Wait: time.Duration(p.FailDuration), MayBeOfRequest: true, Counts: true}
}

// hinted returns for how long the backend asked not to be called, within the limits.
func (p *PassiveHealth) hinted(r *Reply, without caddy.Duration) time.Duration {
	if r.Source == verdict.NoHint {
		return time.Duration(without)
	}
	return min(max(r.Wait, time.Duration(p.RetryAfterMin)), time.Duration(p.RetryAfterMax))
}
