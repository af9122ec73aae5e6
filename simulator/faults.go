package simulator

import (
	"cmp"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/simulator/internal/limits"
	"github.com/openai-lb/caddy-openai-lb/simulator/internal/wire"
)

// Fault is a fault to simulate.
type Fault struct {
	// Action is the fault itself, such as `status:503:30`, `truncate_eof:4` or
	// `silent`: docs/simulator.md lists the actions.
	Action string `json:"action"`

	// Every makes the fault happen to every n-th request only, counted over all
	// requests with a valid key. Default: `1`
	Every int `json:"every,omitempty"`

	// For is how long each silence of `silent` lasts, and Period how often it
	// happens. Default: required for `silent`
	For    caddy.Duration `json:"for,omitempty"`
	Period caddy.Duration `json:"period,omitempty"`

	action wire.Action
}

func (f *Fault) provision() error {
	f.Every = cmp.Or(f.Every, 1)
	switch {
	case f.Every < 1:
		return fmt.Errorf("fault '%s': every must be 1 or more, got %d", f.Action, f.Every)
	case f.Action == silent && (f.For <= 0 || f.Period <= f.For):
		return fmt.Errorf("fault '%s' requires for and period, with for the shorter one, got %s and %s",
			silent, time.Duration(f.For), time.Duration(f.Period))
	case f.Action == silent:
		return nil
	case f.For != 0 || f.Period != 0:
		return fmt.Errorf("fault '%s' does not take for or period", f.Action)
	}
	var err error
	f.action, err = wire.ParseAction(f.Action)
	return err
}

// silent is the fault that depends on the time, and not on the request.
const silent = "silent"

// silentWithin reports whether there is a silence between the two times since
// the config was loaded.
func (f *Fault) silentWithin(from, to time.Duration) bool {
	latest := (to + time.Duration(f.For)) / time.Duration(f.Period) // its end, in periods
	return latest > 0 && from < latest*time.Duration(f.Period)
}

// isSilent reports whether a silence hits the request.
func (x *exchange) isSilent() bool {
	return slices.ContainsFunc(x.h.Fault, func(f Fault) bool {
		return f.Action == silent && f.silentWithin(x.arrived.Sub(x.h.loaded), x.h.now().Sub(x.h.loaded))
	})
}

// chooseFault chooses the fault of this request: the one that its header asks
// for, or else the first one that is due.
func (x *exchange) chooseFault() error {
	n := x.h.state.next("request")
	if asked := x.r.Header.Get("X-Simulator-Fault"); asked != "" && x.h.AllowFaultHeader {
		action, err := wire.ParseAction(asked)
		if err == nil {
			x.client.Fault = action
		}
		return err
	}
	for _, f := range x.h.Fault {
		if f.Action != silent && n%int64(f.Every) == 0 {
			x.client.Fault = f.action
			return nil
		}
	}
	return nil
}

// faultReply is the reply that replaces the answer, if the fault has one.
func (x *exchange) faultReply() *wire.Reply {
	status, retryAfter := x.client.FailsWith()
	if status == 0 {
		return x.client.Instead()
	}
	rep := x.statusError(status)
	if status == http.StatusTooManyRequests {
		var wait time.Duration
		if s, err := strconv.ParseFloat(retryAfter, 64); err == nil && s > 0 && s < 1e9 {
			wait = time.Duration(s * float64(time.Second))
		}
		rep = x.h.rules.Style.Body(x.asked(), limits.Refusal{Limit: limits.Requests, Wait: wait})
		if x.charge.deployment != nil {
			x.charge.deployment.Promise(x.h.now(), wait)
		}
	}
	if retryAfter != "" { // the only hint
		rep.Header = http.Header{"Retry-After": {retryAfter}}
	}
	return rep
}
