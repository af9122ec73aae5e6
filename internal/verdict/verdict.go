// Package verdict says what a backend's reply means: who is to blame, and
// whether the same request may succeed elsewhere.
package verdict

import (
	"encoding/json"
	"net/http"
	"strings"
)

// Class is what a reply, or the lack of one, means.
type Class string

const (
	// Served is a reply for the client: success, redirect, upgrade.
	Served Class = "served"
	// ClientError is the client's own fault, and would be everywhere.
	ClientError Class = "client_error"
	// Throttled: the backend's rate limit is used up, and it said for how long.
	Throttled Class = "throttled"
	// Quota: the backend's account has no budget left.
	Quota Class = "quota"
	// TooLarge: this one request exceeds the backend's limit, whenever it comes.
	TooLarge Class = "too_large"
	// Overloaded: the backend has no capacity at the moment.
	Overloaded Class = "overloaded"
	// Failed: the backend tried and did not succeed.
	Failed Class = "failed"
	// Credential: the backend does not accept the credential it was given.
	Credential Class = "credential"
	// NotPermitted: the credential is good, but not for what was asked.
	NotPermitted Class = "not_permitted"
	// NoModel: the backend does not have the model or deployment.
	NoModel Class = "no_model"
	// Unreachable: no connection, or it broke before the reply's headers.
	Unreachable Class = "unreachable"
	// Timeout: no headers in time.
	Timeout Class = "timeout"
	// BrokenStream: the reply broke off, or told of an error, after its
	// beginning had gone to the client.
	BrokenStream Class = "broken_stream"
)

// Failover reports whether the same request may succeed on another backend.
func (c Class) Failover() bool {
	return c != Served && c != ClientError && c != BrokenStream
}

// Promise reports whether the backend itself said when it is back, so that it
// is not called before. Every other bench is only a suspicion.
func (c Class) Promise() bool {
	return c == Throttled || c == Quota
}

// WholeBackend reports whether the class speaks for all of the backend, not
// only for the model that was asked.
func (c Class) WholeBackend() bool {
	return c == Quota || c == Credential || c == Unreachable
}

// OfCredential reports whether the class is about the credential that was used,
// its rights, limits and budget, rather than about the backend.
func (c Class) OfCredential() bool {
	switch c {
	case Throttled, Quota, TooLarge, Credential, NotPermitted, NoModel:
		return true
	}
	return false
}

// NeedsBody reports whether Judge may tell more from the body of a reply with
// this status than that it is the client's.
func NeedsBody(status int) bool {
	return status == http.StatusNotFound || Judge(status, nil).Failover()
}

// Judge tells the class of a reply. body is the first part of the decoded
// body and may be nil for a status that does not NeedsBody.
func Judge(status int, body []byte) Class {
	switch {
	case status < 400:
		return Served
	case status == http.StatusPaymentRequired:
		return Quota
	case status == http.StatusTooManyRequests:
		return judgeTooManyRequests(parseReport(body))
	case status == http.StatusUnauthorized, status == http.StatusForbidden:
		switch r := parseReport(body); {
		case status == http.StatusForbidden && r.aboutRequest():
			return ClientError
		case r.notPermitted():
			return NotPermitted
		}
		return Credential
	case status == http.StatusNotFound:
		if parseReport(body).has("DeploymentNotFound", "model_not_found") {
			return NoModel
		}
		return ClientError
	// 529 is Anthropic's overloaded_error, 498 Groq's "flex tier capacity exceeded".
	case status == http.StatusServiceUnavailable, status == 529, status == 498:
		return Overloaded
	// 424 is Azure Machine Learning's word for a failed model server.
	case status == http.StatusRequestTimeout, status == http.StatusFailedDependency:
		return Failed
	case status >= 500:
		if parseReport(body).overloaded() {
			return Overloaded
		}
		return Failed
	}
	return ClientError
}

func judgeTooManyRequests(r report) Class {
	switch {
	case r.outOfBudget():
		return Quota
	case strings.Contains(r.message, "Request too large for"):
		return TooLarge
	case r.overloaded():
		return Overloaded
	}
	return Throttled
}

// report is what an error body says, in whichever shape it says it.
type report struct {
	code, kind, message string
}

// parseReport reads OpenAI's and Azure's {"error":{…}}, whose code may be a
// number (OpenRouter, vLLM), the flat object of Mistral and older vLLMs, and
// {"error":"text"}. Anything else is an empty report.
func parseReport(body []byte) report {
	type fields struct {
		Code    any    `json:"code"`
		Type    string `json:"type"`
		Message string `json:"message"`
		Details struct {
			ErrorCode string `json:"error_code"`
		} `json:"details"`
	}
	var envelope struct {
		Error json.RawMessage `json:"error"`
	}
	if json.Unmarshal(body, &envelope) != nil {
		return report{}
	}
	raw := []byte(envelope.Error)
	if raw == nil {
		raw = body
	}
	var f fields
	if err := json.Unmarshal(raw, &f); err != nil {
		// a field of an unexpected type leaves the others filled in
		var message string
		if json.Unmarshal(raw, &message) == nil {
			f.Message = message
		}
	}
	code, _ := f.Code.(string)
	if code == "" {
		code = f.Details.ErrorCode
	}
	return report{code: code, kind: f.Type, message: f.Message}
}

func (r report) has(words ...string) bool {
	for _, word := range words {
		if r.code == word || r.kind == word {
			return true
		}
	}
	return false
}

// outOfBudget knows OpenAI's billing codes, Anthropic's spend limit and
// Moonshot's word for the same.
func (r report) outOfBudget() bool {
	return r.has("insufficient_quota", "credit_balance_exhausted", "billing_hard_limit_reached",
		"organization_usage_limit_exceeded", "enforced_spend_limit_reached", "exceeded_current_quota_error") ||
		strings.HasSuffix(r.code, "_spend_limit_exceeded")
}

func (r report) overloaded() bool {
	return r.has("no_capacity", "slow_down", "server_is_overloaded", "engine_overloaded_error", "overloaded_error")
}

// notPermitted knows OpenAI's words for a key that is restricted to some of the
// API, and Azure's for an identity whose role lacks an operation.
func (r report) notPermitted() bool {
	return r.has("missing_scope", "PermissionDenied") ||
		strings.Contains(r.message, "insufficient permissions for this operation") ||
		strings.Contains(r.message, "lacks the required data action")
}

// aboutRequest reports whether a refusal concerns what was asked, not who asked.
func (r report) aboutRequest() bool {
	return r.has("content_filter", "user_error", "content_policy_violation", "invalid_prompt")
}
