// Package verdict decides the meaning of a backend's reply.
//
// Providers, gateways and proxies use the same status for different things: a
// 429 is a rate limit, a lack of capacity or a used-up budget, and a 403 a bad
// key, a quota or a firewall. The meaning is therefore read from the status,
// the headers and the text together. It is a [Class]. All consequences follow
// from the class: who caused the error, whether it counts against the backend,
// and whether the request may succeed at another backend (class.go). A further
// provider needs words in a table, and no code (words.go).
//
// The package also reads when the backend accepts requests again (hint.go), and
// writes when clients may retry (clienthint.go). It has the words for the
// reasons why there was no reply (cause.go) and for the actions that end a
// problem (remedy.go).
//
// A word means the same wherever it stands
// (TestEveryWordMeansTheSameInAnErrorAndInA200). A client cannot cause a
// cooldown by its request (TestNoClientCanMakeABackendLookBroke).
package verdict

import (
	"cmp"
	"net/http"
	"strings"
	"time"
)

// Reply has the parts of a reply that decide its class.
type Reply struct {
	// Status is its status.
	Status int
	// Header is its header. It is read only for a 429 or 403, and may be nil.
	Header http.Header
	// Body is the beginning of its decoded body. It may be nil if the status
	// does not need it: see NeedsBody.
	Body []byte
	// Cost is the estimate of the tokens that the request counts as, by
	// openaiapi. It is 0 if it is not known.
	Cost int64
	// Infers reports whether the request was for inference, and not a
	// handshake. If so, a missing path is the backend's fault.
	Infers bool
	// OfResponse reports whether the reply is the error of a response whose
	// status is failed.
	OfResponse bool
}

// NeedsBody reports whether Judge may need the body of a reply with this
// status.
func NeedsBody(status int) bool {
	return status >= http.StatusBadRequest || Judge(Reply{Status: status}).Failover()
}

// Judge returns the class of a reply.
func Judge(reply Reply) Class {
	switch status := reply.Status; {
	case status < 100: // HTTP has no such status
		return Failed
	case status < 400:
		return Served
	case status == http.StatusPaymentRequired:
		if parseReport(reply.Body).aboutItsTokens() {
			return TooLarge
		}
		return Quota
	case status == http.StatusTooManyRequests:
		return judgeTooManyRequests(parseReport(reply.Body), reply)
	case status == http.StatusUnauthorized:
		if parseReport(reply.Body).notPermitted() {
			return NotPermitted
		}
		return Credential
	case status == http.StatusForbidden:
		return judgeForbidden(reply)
	// 529 is Anthropic's overloaded_error, 498 Groq's "flex tier capacity
	// exceeded".
	case status == http.StatusServiceUnavailable, status == 529, status == 498:
		return Overloaded
	case status == http.StatusLoopDetected:
		return Loop
	case status == http.StatusFailedDependency && parseReport(reply.Body).means(ClientError):
		return ClientError
	// 424 is also Azure Machine Learning's word for a failed model server.
	case status == http.StatusRequestTimeout, status == http.StatusFailedDependency:
		return Failed
	case status >= 500:
		switch r := parseReport(reply.Body); {
		case r.overloaded():
			return Overloaded
		case reply.OfResponse && IsCode(r.code) && meaningOf(r.code) == (meaning{}):
			return Unclear
		}
		return Failed
	}
	return judgeRefusal(reply)
}

// judgeRefusal returns the class of a 4xx whose status says little.
func judgeRefusal(reply Reply) Class {
	r := parseRefusal(reply.Body)
	if reply.Status == http.StatusBadRequest && r.exceedsContext() {
		return TooLarge
	}
	infers := reply.Infers && mayLackPath(reply.Status)
	if infers && reply.Status != http.StatusBadRequest && isPage(reply.Body) {
		return NotHere
	}
	return cmp.Or(r.refusal(infers), ClientError)
}

// judgeForbidden returns the class of a 403, which is not always about the
// credential.
func judgeForbidden(reply Reply) Class {
	r := parseRefusal(reply.Body)
	if r.notPermitted() {
		return NotPermitted
	}
	if class := r.refusal(false); class != "" {
		return class
	}
	_, hint := ReadHint(http.StatusForbidden, reply.Header, nil, time.Time{})
	_, stated := readErrorText([]byte(r.message), time.Time{})
	switch {
	case r.means(ClientError): // about what was asked for, not about who asked
		return ClientError
	case hint != NoHint, stated:
		return Quota
	case isPage(reply.Body):
		return Blocked
	}
	return Credential
}

// Missing reports whether a reply says that the account does not store an
// object that the request names, so that another account may store it. In that
// case nothing was executed. OpenAI has many texts for this: a code such as
// previous_response_not_found or invalid_encrypted_content, "Item with id '…'
// not found.", "No such File object: …", "Files [file-…] were not found", "The
// encrypted content … could not be verified."
func Missing(status int, body []byte) bool {
	if status != http.StatusNotFound && status != http.StatusBadRequest {
		return false // the body of a throttle is read only once
	}
	r := parseReport(body)
	if status == http.StatusNotFound {
		return !r.means(NoModel)
	}
	return strings.HasSuffix(r.code, "_not_found") && !r.means(NoModel) || r.code == unreadableContent ||
		r.kind == unreadableContent ||
		r.messageContains("not found", "No such ", "does not exist", "could not be verified")
}

// AboutAudience returns the message of a refusal that may be about the audience
// of a token, else an empty string. Azure's is: "Unauthorized. Access token is
// missing, invalid, audience is incorrect (https://ai.azure.com), or have
// expired."
func AboutAudience(status int, body []byte) string {
	if status != http.StatusUnauthorized {
		return ""
	}
	r := parseReport(body)
	if r.notPermitted() || !strings.Contains(strings.ToLower(r.message), "audience") {
		return ""
	}
	return r.message
}

// unreadableContent is OpenAI's code for encrypted content of another account.
const unreadableContent = "invalid_encrypted_content"

func judgeTooManyRequests(r report, reply Reply) Class {
	switch {
	case r.means(Quota):
		return Quota
	case r.aboutItsTokens(), exceedsLimit(reply.Header, reply.Cost):
		return TooLarge
	case r.means(Overloaded):
		return Overloaded
	}
	return Throttled
}

// exceedsLimit reports whether a request costs more tokens than the backend
// grants in a whole window, so that it would be refused even if it were the
// only request.
func exceedsLimit(header http.Header, cost int64) bool {
	limit, _ := ReadRates(header).Tokens.Limit.Number()
	return limit > 0 && limit < float64(cost)
}

// Status returns the HTTP status that corresponds to an error inside a reply of
// status 200. An unknown error counts as a failure of the backend.
func Status(body []byte) int {
	r := parseReport(body)
	byCode, byType := meaningOf(r.code).status, meaningOf(r.kind).status
	switch {
	case byCode != 0: // the code says more than the type
		return byCode
	case r.number >= 400 && r.number <= 599:
		return r.number
	case byType != 0:
		return byType
	case r.exceedsContext():
		return http.StatusBadRequest
	}
	return http.StatusInternalServerError
}
