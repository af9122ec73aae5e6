package wire

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// ActionForms are the faults with their arguments, as the config and the header
// of a request spell them.
var ActionForms = []string{
	"status:<code>[:<retry_after>]", "content_filter", "error_200", "reset", "hang_before_headers", "wrong_upgrade", "json_cut",
	"sse_error_first:<type>:<code>", "sse_error_after:<n>", "truncate_rst:<n>", "truncate_eof:<n>", "hang_after:<n>",
	"silent for <duration> every <duration>",
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

// ParseAction parses a fault as the config and the header of a request spell
// it.
func ParseAction(s string) (Action, error) {
	kind, args, hasArgs := strings.Cut(s, ":")
	a := Action{kind: kind}
	switch kind {
	case "status":
		code, retryAfter, _ := strings.Cut(args, ":")
		a.retryAfter = retryAfter
		var err error
		if a.status, err = strconv.Atoi(code); err != nil || a.status < 400 || a.status > 599 {
			return a, fmt.Errorf("fault '%s': '%s' is not a status from 400 to 599", kind, code)
		}
	case "sse_error_first":
		a.errType, a.errCode, _ = strings.Cut(args, ":")
		if a.errType == "" || a.errCode == "" || strings.Contains(a.errCode, ":") {
			return a, fmt.Errorf("fault '%s' requires <type>:<code>, got '%s'", kind, args)
		}
	case "sse_error_after", "truncate_rst", "truncate_eof", "hang_after":
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

// FailsWith returns the status and the retry-after of a fault that is an error
// of the API that is called. The status is 0 for other faults.
func (c *Client) FailsWith() (status int, retryAfter string) {
	if c.Fault.kind != "status" {
		return 0, ""
	}
	c.acted()
	return c.Fault.status, c.Fault.retryAfter
}

// Instead returns the reply that replaces the answer, if the fault has one that
// is the same in every API, or breaks the connection, if the fault does.
func (c *Client) Instead() *Reply {
	switch c.Fault.kind {
	case "content_filter":
		c.acted()
		return &Reply{Status: http.StatusBadRequest, ContentType: JSONType, Body: []byte(ContentFilterBody)}
	case "error_200":
		c.acted()
		// OpenRouter's shape: its "Error handling" page has code as a number.
		return &Reply{Status: http.StatusOK, ContentType: JSONType, Body: []byte(`{"error":{"code":502,"message":"Provider returned error"}}`)}
	case "reset":
		c.acted()
		c.abort()
	case "wrong_upgrade":
		c.acted()
		c.switchWrongly()
	case "hang_before_headers":
		c.acted()
		c.hang()
	}
	return nil
}

// endings are the faults that end a stream.
var endings = []string{"sse_error_first", "sse_error_after", "truncate_eof", "truncate_rst", "hang_after"}

// disturb applies the fault before the next event. It reports whether the
// stream has ended.
func (s *Stream) disturb() bool {
	f := s.c.Fault
	if s.sent != f.n || !slices.Contains(endings, f.kind) {
		return false
	}
	s.c.acted()
	switch f.kind {
	case "sse_error_first":
		s.error(f.errType, f.errCode)
	case "sse_error_after":
		s.error("server_error", "server_error")
	case "truncate_rst":
		_ = s.c.flush()
		s.c.abort()
	case "hang_after":
		_ = s.c.flush()
		s.c.hang()
	}
	s.Ended = true
	return true
}

// error sends an error as an event: the Responses API names it, chat does not.
// The code "null" stands for a JSON null.
func (s *Stream) error(errType, code string) {
	message := serverErrorText
	if errType == "too_many_requests" {
		message = "The system is currently experiencing high demand and cannot process your request."
	}
	if code == "null" {
		code = ""
	}
	detail := newDetail(errType, code, message)
	if s.Named {
		s.event("error", map[string]any{"type": "error", "error": detail, "sequence_number": s.sent})
		return
	}
	s.event("", openaiBody{"error": detail})
}
