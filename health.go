package openailb

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/hint"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
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
	respondThrottled = "respond"
	forwardThrottled = "forward"
)

// misconfigured is how long a backend is benched whose configuration is wrong:
// it refuses its credential, or does not have the model.
const misconfigured = time.Minute

func (p *PassiveHealth) provision() error {
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
	case "", respondThrottled, forwardThrottled:
		return nil
	}
	return fmt.Errorf("all_throttled '%s' is not one of %s, %s", p.AllThrottled, respondThrottled, forwardThrottled)
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

// remember records what a reply means for the current backend, and logs the
// attempt.
func (p *PassiveHealth) remember(ex *exchange, r *attempt.Reply) {
	now, t, a := time.Now(), ex.tries.current, ex.attempted()
	a.class, a.status = r.Class, r.Status
	ex.observeAttempt(a, r)
	if c := ex.balancer.logger.Check(zap.DebugLevel, "attempt"); c != nil {
		c.Write(zap.String("backend", t.Name), ex.api.callerField(), zap.String("class", string(r.Class)), zap.Int("status", r.Status),
			zap.Duration("duration", now.Sub(a.started)), zap.String("hint", string(r.Source)), zap.String("affinity", ex.api.placement.Why(ex.api.affinity)), errorField(r.Err))
	}
	if !r.Class.Failover() {
		t.Served(ex.benchModel(t.backend), a.started)
		t.servedAt.Store(now.UnixNano())
		if ex.balancer.firstBytes && r.Class == verdict.Served && ex.api.Body.Stream {
			t.firstByte(ex).Took(now.Sub(a.started), now)
		}
	}
	ex.observeQuota(t, r, now)
	if r.Connected || r.Status > 0 {
		t.Reached()
	}
	if t.backend.Credentials.Outdated(a.credential) {
		return // it says nothing of the key that there is now
	}
	if wait, benches := p.bench(ex, r, now); benches {
		began := t.Bench(pool.Refusal{
			Reason:      r.Reason(),
			Throttle:    r.Class.Promise(),
			Whole:       ex.wholeBackend(r.Class),
			Unreachable: r.Class == verdict.Unreachable && ex.balancer.front.rechecks(),
			Model:       ex.benchModel(t.backend),
			Cost:        ex.api.Cost,
			Wait:        wait,
			Longest:     p.longest(r, wait),
			Guess:       r.Class == verdict.Throttled && r.Source == hint.None,
			Started:     a.started,
		}, now)
		if began && r.Class.Promise() {
			a.benched = now
		}
	}
}

// bench returns for how long a reply benches the current backend, if it does.
func (p *PassiveHealth) bench(ex *exchange, r *attempt.Reply, now time.Time) (wait time.Duration, benches bool) {
	hinted := min(max(r.Wait, time.Duration(p.RetryAfterMin)), time.Duration(p.RetryAfterMax))
	switch r.Class {
	case verdict.Throttled:
		if r.Source == hint.None {
			hinted = time.Duration(p.RetryAfterDefault)
		}
		return hinted, true
	case verdict.Overloaded:
		if r.Source == hint.None {
			hinted = time.Duration(p.FailDuration)
		}
		return hinted, true
	case verdict.Quota:
		return time.Duration(p.RetryAfterMax), true
	case verdict.NoModel:
		// another operation has no bench for a model
		return misconfigured, ex.api.Kind.Infers() && ex.tries.bench.claim()
	case verdict.Credential, verdict.NotPermitted:
		// a credential for inference may lack every other permission, that to open a
		// WebSocket included, and uvicorn answers 403 where it has none
		if ex.api.Kind.IsHandshake() && (r.Class == verdict.NotPermitted || r.Status == http.StatusForbidden) {
			return 0, false
		}
		return misconfigured, ex.api.Kind.Infers() && ex.tries.bench.claim()
	case verdict.NoCredential:
		return min(cmp.Or(r.Wait, misconfigured), misconfigured), r.Status == 0
	case verdict.Unreachable:
		return p.countFailure(ex, r.Class, now)
	}
	switch {
	case !r.Class.Failover() || !r.Class.Blames():
		return 0, false
	case r.Uploading: // perhaps it refused the upload
		return 0, false
	case errors.Is(r.Err, attempt.ErrLostAgain) && ex.tries.current.servesOthers(ex.attempted().started), !ex.tries.bench.claim():
		return 0, false
	}
	return p.countFailure(ex, r.Class, now)
}

// longest returns how long a bench may become that a backend keeps asking for
// without naming a time: a hint of 0, again and again, is as good as none.
func (p *PassiveHealth) longest(r *attempt.Reply, wait time.Duration) time.Duration {
	if r.Class != verdict.Throttled || r.Source == hint.None || r.Wait > 0 {
		return 0
	}
	return max(wait, time.Duration(p.RetryAfterDefault))
}

// servesOthers reports whether the backend serves other requests, or has done so
// since then. If it does, and accepts no more, it only has too many streams.
func (t *target) servesOthers(since time.Time) bool {
	return t.InFlight() > 1 || t.servedAt.Load() >= since.UnixNano()
}

func (p *PassiveHealth) countFailure(ex *exchange, class verdict.Class, now time.Time) (wait time.Duration, benches bool) {
	wait = time.Duration(p.FailDuration)
	return wait, ex.tries.current.CountFailure(class.WholeBackend(), ex.benchModel(ex.tries.current.backend), now, p.MaxFails, wait)
}

// Broken implements attempt.Recipient. It records that a reply was cut, or contained
// an error, after its beginning went to the client.
func (ex *exchange) Broken(r *attempt.Reply, reason error) {
	if ex.request.Context().Err() != nil || ex.api.received.Failure() != nil || r.Upload().Stalled() {
		return // the client left, or did not send all of its body
	}
	now, t, a := time.Now(), ex.tries.current, ex.attempted()
	if r.GivenUp(reason) {
		a.class = verdict.ClientError
		if c := ex.balancer.logger.Check(zap.DebugLevel, "reply broken while the client paused"); c != nil {
			c.Write(zap.String("backend", t.Name), zap.Duration("duration", now.Sub(a.started)), errorField(reason))
		}
		return
	}
	ex.balancer.transport.breaks(ex, reason, true)
}

// BrokenTunnel implements attempt.Recipient. A backend that had sent data before is not
// benched.
func (ex *exchange) BrokenTunnel(r *attempt.Reply, reason error, begun bool) {
	if ex.request.Context().Err() == nil {
		ex.balancer.transport.breaks(ex, reason, !begun)
	}
}

// breaks makes the attempt a broken stream.
func (p *PassiveHealth) breaks(ex *exchange, reason error, benches bool) {
	now, t, a := time.Now(), ex.tries.current, ex.attempted()
	a.class = verdict.BrokenStream
	if c := ex.balancer.logger.Check(zap.WarnLevel, "reply broken"); c != nil {
		c.Write(zap.String("backend", t.Name), zap.String("deployment", pool.ModelKey(ex.model())),
			zap.Duration("duration", now.Sub(a.started)), errorField(reason))
	}
	if !benches || !ex.tries.bench.claim() {
		return
	}
	if wait, benches := p.countFailure(ex, a.class, now); benches {
		t.Bench(pool.Refusal{
			Reason: pool.Reason{Class: string(a.class), Status: a.status, Cause: verdict.CauseOf(reason), Error: attempt.ErrorText(reason)},
			Model:  ex.benchModel(t.backend), Wait: wait,
		}, now)
	}
}

// errorField is an error of an attempt for a log.
func errorField(err error) zap.Field {
	if err == nil {
		return zap.Skip()
	}
	return zap.String("error", attempt.ErrorText(err))
}
