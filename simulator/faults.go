package simulator

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Fault is a fault to simulate.
type Fault struct {
	// Action is what happens:
	//
	//   - `status:<code>[:<retry_after>]`: an error of that status, 400 to 599,
	//     with that `retry-after`
	//   - `content_filter`: the 400 of Azure's content filter
	//   - `error_200`: status 200 with an error in its body
	//   - `early_429`: 429 before the request's body was read
	//   - `reset`: the connection is broken before any header
	//   - `hang_before_headers`: no answer, until the client leaves
	//   - `wrong_upgrade`: a 101 that switches to another protocol than WebSocket
	//   - `json_cut`: a whole reply ends in the middle, short of its
	//     `content-length`
	//   - `sse_error_first:<type>:<code>`: a stream's first event is an error
	//   - `sse_error_after:<n>`: an error follows the first n events
	//   - `truncate_rst:<n>`: the connection is broken after n events
	//   - `truncate_eof:<n>`: the stream ends cleanly after n events
	//   - `hang_after:<n>`: nothing follows the first n events, until the client
	//     leaves
	//   - `no_done`: the last event, `[DONE]` or `response.completed`, is missing
	//   - `null_error_chunk`: the first event has a field `"error":null`
	//   - `comments`: a comment precedes every event
	//
	// The first seven replace the answer and are not charged to any limit. The
	// others change an answer that was admitted. A fault of streams changes
	// only streams, and json_cut changes only replies that are not streamed. A
	// chat stream starts with two events before its first token: Azure's filter
	// results and the role. The messages of a WebSocket are events for
	// truncate_rst, truncate_eof (no close frame is sent) and hang_after.
	Action string `json:"action"`

	// Every makes the fault happen to every n-th request only, counted over all
	// requests with a valid key. Default: `1`
	Every int `json:"every,omitempty"`

	action action
}

const (
	faultStatus         = "status"
	faultContentFilter  = "content_filter"
	faultError200       = "error_200"
	faultEarly429       = "early_429"
	faultReset          = "reset"
	faultHangHeaders    = "hang_before_headers"
	faultWrongUpgrade   = "wrong_upgrade"
	faultJSONCut        = "json_cut"
	faultSSEErrorFirst  = "sse_error_first"
	faultSSEErrorAfter  = "sse_error_after"
	faultTruncateRST    = "truncate_rst"
	faultTruncateEOF    = "truncate_eof"
	faultHangAfter      = "hang_after"
	faultNoDone         = "no_done"
	faultNullErrorChunk = "null_error_chunk"
	faultComments       = "comments"
)

// faultForms are the actions with their arguments.
var faultForms = []string{
	"status:<code>[:<retry_after>]", faultContentFilter, faultError200, faultEarly429, faultReset, faultHangHeaders, faultWrongUpgrade,
	faultJSONCut, "sse_error_first:<type>:<code>", "sse_error_after:<n>", "truncate_rst:<n>", "truncate_eof:<n>",
	"hang_after:<n>", faultNoDone, faultNullErrorChunk, faultComments,
}

// earlyWait is the wait of early_429, which does not ask the limits.
const earlyWait = time.Second

// action is a parsed fault.
type action struct {
	kind       string
	n          int
	status     int
	retryAfter string
	errType    string
	errCode    string
}

func parseAction(s string) (action, error) {
	kind, args, hasArgs := strings.Cut(s, ":")
	a := action{kind: kind}
	switch kind {
	case faultStatus:
		code, retryAfter, _ := strings.Cut(args, ":")
		a.retryAfter = retryAfter
		var err error
		if a.status, err = strconv.Atoi(code); err != nil || a.status < 400 || a.status > 599 {
			return a, fmt.Errorf("fault '%s': '%s' is not a status from 400 to 599", kind, code)
		}
	case faultSSEErrorFirst:
		a.errType, a.errCode, _ = strings.Cut(args, ":")
		if a.errType == "" || a.errCode == "" || strings.Contains(a.errCode, ":") {
			return a, fmt.Errorf("fault '%s' requires <type>:<code>, got '%s'", kind, args)
		}
	case faultSSEErrorAfter, faultTruncateRST, faultTruncateEOF, faultHangAfter:
		var err error
		if a.n, err = strconv.Atoi(args); err != nil || a.n < 0 {
			return a, fmt.Errorf("fault '%s' requires a number of events, got '%s'", kind, args)
		}
	default:
		if !slices.Contains(faultForms, kind) {
			return a, fmt.Errorf("fault '%s' is not one of %s", s, strings.Join(faultForms, ", "))
		}
		if hasArgs {
			return a, fmt.Errorf("fault '%s' does not take an argument, got '%s'", kind, args)
		}
	}
	return a, nil
}

func (f *Fault) provision() error {
	setDefault(&f.Every, 1)
	if f.Every < 1 {
		return fmt.Errorf("fault '%s': every must be 1 or more, got %d", f.Action, f.Every)
	}
	var err error
	f.action, err = parseAction(f.Action)
	return err
}

// chooseFault chooses the fault of this request: the one that its header asks
// for, or else the first one that is due.
func (x *exchange) chooseFault() error {
	n := x.h.state.nextRequest()
	if asked := x.r.Header.Get("X-Simulator-Fault"); asked != "" && x.h.AllowFaultHeader {
		var err error
		if x.fault, err = parseAction(asked); err != nil {
			x.fault = action{}
		}
		return err
	}
	for _, f := range x.h.Fault {
		if n%int64(f.Every) == 0 {
			x.fault = f.action
			return nil
		}
	}
	return nil
}

// acted counts a fault that took effect.
func (x *exchange) acted() {
	if !x.faulted {
		x.faulted = true
		x.h.state.count(func(s *Status) { s.Faults++ })
	}
}

// faultReply is the reply that replaces the answer, if the fault has one.
func (x *exchange) faultReply() *reply {
	switch x.fault.kind {
	case faultStatus:
		x.acted()
		return x.statusReply()
	case faultContentFilter:
		x.acted()
		return &reply{status: http.StatusBadRequest, contentType: jsonType, body: []byte(contentFilterBody)}
	case faultError200:
		x.acted()
		// OpenRouter's shape: its "Error handling" page has code as a number.
		return &reply{status: http.StatusOK, contentType: jsonType, body: []byte(`{"error":{"code":502,"message":"Provider returned error"}}`)}
	case faultReset:
		x.acted()
		x.abort()
	case faultWrongUpgrade:
		x.acted()
		x.switchWrongly()
	case faultHangHeaders:
		x.acted()
		x.hang()
	}
	return nil
}

// statusReply is the reply of the fault status. Its only hint is the one that
// the fault names.
func (x *exchange) statusReply() *reply {
	rep := x.statusError(x.fault.status)
	if x.fault.status == http.StatusTooManyRequests {
		var wait time.Duration
		if s, err := strconv.ParseFloat(x.fault.retryAfter, 64); err == nil && s > 0 && s < 1e9 {
			wait = time.Duration(s * float64(time.Second))
		}
		rep = x.throttleBody(refusal{limit: limitRequests, wait: wait})
		x.promise(wait)
	}
	if x.fault.retryAfter != "" {
		if rep.header == nil {
			rep.header = make(http.Header)
		}
		rep.header.Set("retry-after", x.fault.retryAfter)
	}
	return rep
}

// throttleEarly answers without reading the body.
func (x *exchange) throttleEarly() *reply {
	x.acted()
	if x.r.ProtoMajor == 1 {
		// Without full duplex, net/http reads a body of up to 256 KiB before it
		// answers. With it, net/http panics over a body left unread, once it
		// waits for the next request ("invalid concurrent Body.Read call"), so
		// there must be none.
		_ = http.NewResponseController(x.w).EnableFullDuplex()
		x.w.Header().Set("connection", "close")
	}
	if x.route.deployment != "" && x.h.serves(x.route.deployment) {
		x.limiter = x.h.state.limiter(x.route.deployment)
	}
	if !x.h.rules.unnamed {
		x.promise(earlyWait)
	}
	return x.throttle(refusal{limit: limitRequests, wait: earlyWait})
}

// promise records the wait of a 429 that no limit caused.
func (x *exchange) promise(wait time.Duration) {
	if x.limiter != nil {
		x.limiter.mu.Lock()
		defer x.limiter.mu.Unlock()
		x.limiter.promise(x.h.now(), wait)
	}
}

// disturb applies the fault before the next event. It reports whether the stream
// has ended.
func (s *stream) disturb() bool {
	f := s.x.fault
	if f.kind == faultComments {
		s.x.acted()
		s.write([]byte(": simulator processing\n\n"))
		return false
	}
	if s.sent != f.n {
		return false
	}
	switch f.kind {
	case faultSSEErrorFirst:
		s.x.acted()
		s.error(f.errType, f.errCode)
	case faultSSEErrorAfter:
		s.x.acted()
		s.error("server_error", "server_error")
	case faultTruncateEOF:
		s.x.acted()
	case faultTruncateRST:
		s.x.acted()
		_ = s.x.flush()
		s.x.abort()
	case faultHangAfter:
		s.x.acted()
		_ = s.x.flush()
		s.x.hang()
	default:
		return false
	}
	s.ended = true
	return true
}

// unfinished reports whether the fault leaves out the last event.
func (s *stream) unfinished() bool {
	if s.x.fault.kind != faultNoDone {
		return false
	}
	s.x.acted()
	return true
}

// errorEvent is the error event of the Responses API.
type errorEvent struct {
	Type           string      `json:"type"`
	Error          errorDetail `json:"error"`
	SequenceNumber int         `json:"sequence_number"`
}

// error sends an error as an event: the Responses API names it, chat does not.
func (s *stream) error(errType, code string) {
	body := typedError(errType, code, streamErrorText(errType))
	if s.x.route.op == opResponse {
		s.event("error", errorEvent{Type: "error", Error: body.Error, SequenceNumber: s.sent})
		return
	}
	s.event("", body)
}

func streamErrorText(errType string) string {
	if errType == "too_many_requests" {
		return "The system is currently experiencing high demand and cannot process your request."
	}
	return serverErrorText
}
