package wire

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

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

// ActionForms are the actions with their arguments.
var ActionForms = []string{
	"status:<code>[:<retry_after>]", faultContentFilter, faultError200, faultEarly429, faultReset, faultHangHeaders, faultWrongUpgrade,
	faultJSONCut, "sse_error_first:<type>:<code>", "sse_error_after:<n>", "truncate_rst:<n>", "truncate_eof:<n>",
	"hang_after:<n>", faultNoDone, faultNullErrorChunk, faultComments, "silent for <duration> every <duration>",
}

// Action is a parsed fault. The zero Action is none.
type Action struct {
	kind       string
	n          int
	status     int
	retryAfter string
	errType    string
	errCode    string
}

// ParseAction parses a fault as the config and the header of a request spell it.
func ParseAction(s string) (Action, error) {
	kind, args, hasArgs := strings.Cut(s, ":")
	a := Action{kind: kind}
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
		if !slices.Contains(ActionForms, kind) {
			return a, fmt.Errorf("fault '%s' is not one of %s", s, strings.Join(ActionForms, ", "))
		}
		if hasArgs {
			return a, fmt.Errorf("fault '%s' does not take an argument, got '%s'", kind, args)
		}
	}
	return a, nil
}

// acted counts a fault that took effect.
func (c *Client) acted() {
	if !c.faulted {
		c.faulted = true
		c.onFault()
	}
}

// RefusesEarly reports whether the fault is a 429 before the body was read. Then
// it prepares the connection for that.
func (c *Client) RefusesEarly() bool {
	if c.Fault.kind != faultEarly429 {
		return false
	}
	c.acted()
	if c.r.ProtoMajor == 1 {
		// Without full duplex, net/http reads a body of up to 256 KiB before it
		// answers. With it, net/http panics over a body left unread, once it
		// waits for the next request ("invalid concurrent Body.Read call"), so
		// there must be none.
		_ = http.NewResponseController(c.w).EnableFullDuplex()
		c.Header().Set("connection", "close")
	}
	return true
}

// FailsWith returns the status and the retry-after of a fault that is an error of
// the API that is called. The status is 0 for other faults.
func (c *Client) FailsWith() (status int, retryAfter string) {
	if c.Fault.kind != faultStatus {
		return 0, ""
	}
	c.acted()
	return c.Fault.status, c.Fault.retryAfter
}

// Instead returns the reply that replaces the answer, if the fault has one that is
// the same in every API, or breaks the connection, if the fault does.
func (c *Client) Instead() *Reply {
	switch c.Fault.kind {
	case faultContentFilter:
		c.acted()
		return &Reply{Status: http.StatusBadRequest, ContentType: JSONType, Body: []byte(ContentFilterBody)}
	case faultError200:
		c.acted()
		// OpenRouter's shape: its "Error handling" page has code as a number.
		return &Reply{Status: http.StatusOK, ContentType: JSONType, Body: []byte(`{"error":{"code":502,"message":"Provider returned error"}}`)}
	case faultReset:
		c.acted()
		c.abort()
	case faultWrongUpgrade:
		c.acted()
		c.switchWrongly()
	case faultHangHeaders:
		c.acted()
		c.hang()
	}
	return nil
}

// endings are the faults that end a stream.
var endings = []string{faultSSEErrorFirst, faultSSEErrorAfter, faultTruncateEOF, faultTruncateRST, faultHangAfter}

// disturb applies the fault before the next event. It reports whether the stream
// has ended.
func (s *Stream) disturb() bool {
	f := s.c.Fault
	if f.kind == faultComments {
		s.c.acted()
		s.write([]byte(": simulator processing\n\n"))
		return false
	}
	if s.sent != f.n || !slices.Contains(endings, f.kind) {
		return false
	}
	s.c.acted()
	switch f.kind {
	case faultSSEErrorFirst:
		s.error(f.errType, f.errCode)
	case faultSSEErrorAfter:
		s.error("server_error", "server_error")
	case faultTruncateRST:
		_ = s.c.flush()
		s.c.abort()
	case faultHangAfter:
		_ = s.c.flush()
		s.c.hang()
	}
	s.ended = true
	return true
}

// unfinished reports whether the fault leaves out the last event.
func (s *Stream) unfinished() bool {
	if s.c.Fault.kind != faultNoDone {
		return false
	}
	s.c.acted()
	return true
}

// errorEvent is the error event of the Responses API.
type errorEvent struct {
	Type           string      `json:"type"`
	Error          errorDetail `json:"error"`
	SequenceNumber int         `json:"sequence_number"`
}

// error sends an error as an event: the Responses API names it, chat does not.
func (s *Stream) error(errType, code string) {
	detail := errorDetail{Message: streamErrorText(errType), Type: errType}
	if code != "null" { // which stands for a JSON null
		detail.Code = &code
	}
	if s.Named {
		s.event("error", errorEvent{Type: "error", Error: detail, SequenceNumber: s.sent})
		return
	}
	s.event("", openaiBody{"error": detail})
}

func streamErrorText(errType string) string {
	if errType == "too_many_requests" {
		return "The system is currently experiencing high demand and cannot process your request."
	}
	return serverErrorText
}
