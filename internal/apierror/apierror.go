// Package apierror defines the answers that the balancer gives by itself,
// without a backend: its errors, and the list of models.
//
// Clients are SDKs, which turn an error into an exception by its status and its
// members. So each error is a value with a status, a type, a code and a text,
// and it is written in the form of the API that the request used: OpenAI's, or
// Anthropic's at /v1/messages. Both forms have all that a status needs, such as
// a Retry-After with each 429 and 503 (TestWhatAStatusNeedsIsThereInBothForms).
package apierror

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// Error is an error in the format of OpenAI's API, so that SDKs turn it into
// the right exception.
type Error struct {
	Status  int
	Message string
	// Kind is the "type" of the error.
	Kind string
	Code string
	// Class is the class of the answer in metrics and logs. If it is empty, the
	// answer has the class of the last attempt.
	Class string
	// Param is the parameter that is wrong, if one is.
	Param string
}

// Error implements error.
func (e Error) Error() string { return e.Message }

// The classes of the balancer's own answers.
const (
	Unauthenticated = "unauthenticated"
	InvalidRequest  = "invalid_request"
	NoSuchModel     = "no_such_model"
	AllThrottled    = "all_throttled"
	OwnerThrottled  = "owner_throttled"
	AllBusy         = "all_busy"
	RetryLater      = "retry_later"
	CallerLimited   = "caller_limited"
	Ready           = "ready"
	Unready         = "not_ready"
	Models          = "models"
	Usage           = "usage"
	// Unsent: a handler or a policy has panicked.
	Unsent = "error"
)

// Invalid returns an error about a mistake of the caller's.
func Invalid(status int, code, message string) Error {
	return Error{Status: status, Message: message, Kind: "invalid_request_error", Code: code, Class: InvalidRequest}
}

func unauthenticated(message string) Error {
	e := Invalid(http.StatusUnauthorized, "invalid_api_key", message)
	e.Class = Unauthenticated
	return e
}

// upstream returns an error about the backends. It has the class of the last
// attempt.
func upstream(status int, code, message string) Error {
	return Error{Status: status, Message: message, Kind: "server_error", Code: code}
}

func unavailable(class, code, message string) Error {
	e := upstream(http.StatusServiceUnavailable, code, message)
	e.Class = class
	return e
}

// The errors with a fixed text.
var (
	MissingKey = unauthenticated("You did not provide an API key. Send it in an Authorization header, as 'Bearer' and the key, or in an api-key header.")
	WrongKey   = unauthenticated("Incorrect API key provided.")
	ExpiredKey = unauthenticated("The API key provided has expired.")
	TwoCallers = unauthenticated("Incorrect API keys provided: they belong to different callers. Send one of them.")
	Denied     = Error{
		Status:  http.StatusForbidden,
		Message: "The API key provided is valid, but its owner may not use this server. Ask its operator for access.",
		Kind:    "invalid_request_error", Code: "permission_denied", Class: Unauthenticated,
	}
	MethodNotAllowed = Invalid(http.StatusMethodNotAllowed, "method_not_supported", "TRACE and CONNECT are not supported.")
	CompressedBody   = Invalid(http.StatusUnsupportedMediaType, "unsupported_content_encoding",
		"The request body is compressed, and no backend accepts it as it is. Send it without Content-Encoding.")
	UnknownPath = Invalid(http.StatusNotFound, "unknown_url",
		"Unknown path. The base URL for OpenAI's SDKs is this server's address followed by /v1. The endpoint for Azure's SDKs is the address alone.")
	NoUsage     = Invalid(http.StatusNotFound, "unknown_url", "Unknown path. What callers use is not counted here.")
	NoWebSocket = Invalid(http.StatusUpgradeRequired, "websocket_not_supported",
		"Responses are not available over WebSocket here: no backend opens one. Use HTTP.")
	// NoWebSockets is the error of a build without the module websocket.
	NoWebSockets = Invalid(http.StatusUpgradeRequired, "websocket_not_supported",
		"WebSockets are not available here: this server was built without the module websocket. Use HTTP.")
	// NoExtendedConnect is the error for a WebSocket over HTTP/2 or HTTP/3 (RFC
	// 8441, RFC 9220). Clients must not repeat it.
	NoExtendedConnect = Invalid(http.StatusNotImplemented, "websocket_not_supported",
		"WebSockets over HTTP/2 and HTTP/3 are not available here. Open the WebSocket over HTTP/1.1.")
	// TooEarly is the error for a request that came in TLS early data (RFC 8470
	// section 5.2). Its reply asks to repeat it.
	TooEarly = Invalid(http.StatusTooEarly, "too_early",
		"The request came before the TLS handshake was complete. Please send it again.")
	// AnotherWebSocket is the error for a message that the backend of its
	// WebSocket must not get. It has the code with which clients open another
	// one.
	AnotherWebSocket = Invalid(http.StatusBadRequest, "websocket_connection_limit_reached",
		"This WebSocket is for another model, or another account's objects. Create a new WebSocket connection to continue.")
	UnclearEvent = Invalid(http.StatusBadRequest, "invalid_event", "The message must be one JSON object with one 'type'. The first one must be a response.create. Where callers are kept apart, each later one must be a response.create or a response.steer.")
	// WrongWebSocketVersion is the error for a handshake of another version.
	// Its reply names the one that there is.
	WrongWebSocketVersion = Invalid(http.StatusUpgradeRequired, "websocket_version_not_supported", "Sec-WebSocket-Version must be 13.")
	WrongWebSocketKey     = Invalid(http.StatusBadRequest, "invalid_headers", "Sec-WebSocket-Key must be 16 bytes in base64.")
	// OldWebSocket is the error for a handshake of HTTP/1.0, which has no
	// WebSockets (RFC 6455 section 4.1).
	OldWebSocket = Invalid(http.StatusBadRequest, "http_version_not_supported", "A WebSocket requires HTTP/1.1.")
	// NoMemory is the error for the message of a WebSocket while those of all
	// clients together are too many.
	NoMemory = unavailable(RetryLater, "server_overloaded", "Too many messages are being received now. Please retry after 1 second.")
	// Loop is the error for a request that this balancer has sent, and that
	// came back to it. Nobody must repeat it.
	Loop = Error{Status: http.StatusLoopDetected, Kind: "server_error", Code: "loop_detected",
		Class:   string(verdict.Loop),
		Message: "The request came back to the load balancer that had sent it: the URL of a backend leads to the load balancer itself."}
	HeadersTooLarge     = Invalid(http.StatusRequestHeaderFieldsTooLarge, "headers_too_large", "The request headers are larger than the backend accepts.")
	InvalidHeaders      = Invalid(http.StatusBadRequest, "invalid_headers", "The request has an invalid header.")
	HiddenContent       = Invalid(http.StatusBadRequest, "invalid_headers", "Connection must not name a header that describes the body, such as Content-Type, and such a header must not be a key.")
	UpstreamError       = upstream(http.StatusBadGateway, "upstream_error", "The backend's error was withheld because it might reveal a key.")
	CredentialsRejected = upstream(http.StatusBadGateway, "upstream_credentials_rejected", "No backend accepts the credentials of the load balancer.")
	Unreachable         = upstream(http.StatusBadGateway, "upstream_unreachable", "No backend could be reached.")
	BrokenOff           = upstream(http.StatusBadGateway, "upstream_unreachable", "No backend gave a valid answer.")
	TimedOut            = upstream(http.StatusGatewayTimeout, "upstream_timeout", "No backend answered in time.")
	PerhapsExecuted     = upstream(http.StatusBadGateway, "upstream_unreachable",
		"The backend closed the connection before its answer was complete. The request may have been executed, so it was not retried.")
	// NotProcessed is the error for a body that cannot be sent to another
	// backend. Its reply has a Retry-After of a second.
	NotProcessed = upstream(http.StatusServiceUnavailable, "upstream_unreachable",
		"The backend closed the connection before it processed the request. Please retry after 1 second.")
	PerhapsStillExecuted = upstream(http.StatusGatewayTimeout, "upstream_timeout",
		"The backend did not answer in time. The request may have been executed, so it was not retried.")
	// OwnersUnknown is the error while the engine of state cannot look up the
	// owners of the objects that a request names, or saved ids have not been
	// read. Its reply has a Retry-After of a second.
	OwnersUnknown = unavailable(RetryLater, "owners_unknown",
		"The load balancer cannot check now whether the caller may use the objects that the request names. Please retry after 1 second.")
	// TokenUnchecked is the error while the keys of the issuer of tokens are
	// not known. Its reply has a Retry-After of a second.
	TokenUnchecked = unavailable(RetryLater, "token_unchecked",
		"The load balancer cannot check the token now, because its issuer cannot be reached. Please retry after 1 second.")
	NotReady = unavailable(Unready, "no_backend_usable", "No backend can be used: each one is unreachable, refuses its key, or has no budget left.")
)

// RateLimited is the error while every backend throttles, or some do and the
// others, which may be busy, cannot serve. If the request can only go to the
// account that stores an object, it is about the backends of that account.
func RateLimited(wait time.Duration, all bool, object string) Error {
	return retryLater("rate limited", wait, all, AllThrottled, object, OwnerThrottled)
}

// Busy is the error while every backend has as many requests as it may get, or
// some have and the others cannot serve.
func Busy(wait time.Duration, all bool, object string) Error {
	return retryLater("busy", wait, all, AllBusy, object, RetryLater)
}

func retryLater(what string, wait time.Duration, all bool, class, object, ownerClass string) Error {
	text := "All backends are " + what
	switch {
	case !all:
		text, class = "Some backends are "+what+", and no other could serve the request", RetryLater
	case object != "":
		text, class = "The account that stores "+object+" is "+what, ownerClass
	}
	return Error{Status: http.StatusTooManyRequests,
		Message: text + ". Please retry after " + strconv.Itoa(verdict.RetrySeconds(wait)) + " seconds.",
		Kind:    "rate_limit_error", Code: "rate_limit_exceeded", Class: class}
}

// TooLargeForQuotas is the error for a request whose prompt is larger than the
// quotas of all backends that have its model. limit is one of them.
func TooLargeForQuotas(unit string, limit, requested int64) Error {
	return Error{Status: http.StatusTooManyRequests,
		Message: fmt.Sprintf("Request too large for the quotas of the backends on tokens per %s: Limit %d, Requested %d. The input must be reduced in order to run successfully.",
			unit, limit, requested),
		Kind: "tokens", Code: "rate_limit_exceeded", Class: string(verdict.TooLarge)}
}

// NoCredential is the error while there is no credential for a backend, or if
// the credential that was sent has been replaced and the body cannot be sent
// again.
func NoCredential(wait time.Duration) Error {
	return upstream(http.StatusServiceUnavailable, "upstream_credential_unavailable",
		"The load balancer's credential for the backend is being renewed. Please retry after "+
			strconv.Itoa(verdict.RetrySeconds(wait))+" seconds.")
}

// UnknownModel is the error for a model that no backend serves.
func UnknownModel(name string, models []string) Error {
	return Error{Status: http.StatusNotFound,
		Message: "The model '" + pool.ModelKey(name) + "' is not available. Available models: " +
			strings.Join(models, ", ") + ".",
		Kind: "invalid_request_error", Code: "model_not_found", Class: NoSuchModel}
}

// UnknownModelThere is the error for a model that is not served by the account
// that stores the object which the request names.
func UnknownModelThere(name, object string, models []string) Error {
	e := UnknownModel(name, models)
	e.Message = "The model '" + pool.ModelKey(name) + "' is not available where " + object +
		" is stored. Available models there: " + strings.Join(models, ", ") + "."
	return e
}

// ServiceTierRefused is the error for a service tier that the caller may not
// use. The text of another one than tiers have is not repeated: it may be
// anything.
func ServiceTierRefused(tier string, allowed []string) Error {
	text := "Invalid value"
	if tier != openaiapi.OtherTier {
		text += ": '" + tier + "'"
	}
	return ofServiceTier(text + ". Supported values are: " + quoted(allowed) + ".")
}

// ServiceTierHidden is the error for a body that may name another service tier
// than the one that was found, for a caller that may not use all.
func ServiceTierHidden(limit int64) Error {
	return ofServiceTier("It is not certain which 'service_tier' the request names. Name it once, in a JSON object of at most " +
		strconv.FormatInt(limit, 10) + " bytes with Content-Type application/json.")
}

func ofServiceTier(message string) Error {
	e := Invalid(http.StatusBadRequest, "invalid_value", message)
	e.Param = "service_tier"
	return e
}

// quoted lists values as OpenAI's errors do.
func quoted(values []string) string {
	text := "'" + strings.Join(values, "', '") + "'"
	if last := strings.LastIndex(text, ", "); last >= 0 {
		comma := ","
		if len(values) == 2 {
			comma = ""
		}
		text = text[:last] + comma + " and" + text[last+1:]
	}
	return text
}

// MissingModel is the error for a request for inference in which no model was
// found. It lists the models that the backends serve.
func MissingModel(models []string) Error {
	text := "You must provide a model parameter: 'model' in a JSON object with Content-Type application/json, or in a multipart form."
	if len(models) > 0 {
		text += " Available models: " + strings.Join(models, ", ") + "."
	}
	return Invalid(http.StatusBadRequest, "missing_required_parameter", text)
}

// TooManyIDs is the error for a body that names more stored objects than the
// limit.
func TooManyIDs(limit int) Error {
	return Invalid(http.StatusBadRequest, "too_many_ids", "The request names more than "+strconv.Itoa(limit)+" stored objects.")
}

// InvalidPath is the error for a path with this problem.
func InvalidPath(problem string) Error {
	return Invalid(http.StatusBadRequest, "invalid_path", problem)
}

// ModelBeyondBuffer is the error for a body whose model is not in its first
// limit bytes.
func ModelBeyondBuffer(limit int64) Error {
	return Invalid(http.StatusRequestEntityTooLarge, "request_too_large",
		"The model is not in the first "+strconv.FormatInt(limit, 10)+" bytes of the request body. Send 'model' before the long parts of the body, or send a shorter body.")
}

// PerhapsAnotherModel is the error for a body in which another model may follow
// the one that is in the part that was buffered.
func PerhapsAnotherModel(limit int64) Error {
	return Invalid(http.StatusRequestEntityTooLarge, "request_too_large",
		"The request body is longer than "+strconv.FormatInt(limit, 10)+" bytes, so it is not certain which model it names. Send a shorter body.")
}

// UnknownLength is the error for a body whose tokens cannot be estimated.
func UnknownLength(limit int64) Error {
	return Invalid(http.StatusRequestEntityTooLarge, "request_too_large",
		"The request body is longer than "+strconv.FormatInt(limit, 10)+" bytes and has no Content-Length, so its tokens cannot be estimated. Send a Content-Length.")
}

// http2Left is in net/http's error for a client that left while its body was
// read over HTTP/2. That error is not exported.
const http2Left = "client disconnected"

// UnreadableBody is the error for a request body that could not be read: it is
// over a limit, or malformed, or the client left.
func UnreadableBody(err error) Error {
	if e, ok := errors.AsType[Error](err); ok {
		return e
	}
	if tooLarge, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return Invalid(http.StatusRequestEntityTooLarge, "request_too_large",
			"The request body is larger than the "+strconv.FormatInt(tooLarge.Limit, 10)+" bytes allowed here.")
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return Invalid(http.StatusRequestTimeout, "request_timeout", "The request body did not arrive in time.")
	}
	class := InvalidRequest
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, context.Canceled) ||
		strings.Contains(err.Error(), http2Left) {
		class = string(verdict.ClientLeft)
	}
	return Error{Status: http.StatusBadRequest, Message: "The request body could not be read.",
		Kind: "invalid_request_error", Code: "invalid_body", Class: class}
}

// Response returns the error as a reply to req, in the form of the API that has
// the path of req.
func (e Error) Response(req *http.Request) *http.Response {
	id := newID()
	messages := openaiapi.IsMessages(req.URL.EscapedPath())
	form := e.openAI
	if messages {
		form = e.anthropic
	}
	res := jsonResponse(req, e.Status, id, form(id))
	if messages {
		res.Header["Request-Id"] = []string{id}
	}
	if e == WrongWebSocketVersion {
		res.Header["Sec-Websocket-Version"] = []string{"13"} // RFC 6455 section 4.4
	}
	if e == NotProcessed || e == NoMemory || e == OwnersUnknown || e == TokenUnchecked {
		verdict.SetHint(res.Header, time.Second)
	}
	if e.Class == string(verdict.TooLarge) {
		res.Header["X-Should-Retry"] = []string{"false"}
	}
	switch e.Status {
	case http.StatusTooEarly:
		res.Header["X-Should-Retry"] = []string{"true"}
	case http.StatusNotImplemented, http.StatusLoopDetected:
		res.Header["X-Should-Retry"] = []string{"false"}
	case http.StatusUnauthorized:
		res.Header["Www-Authenticate"] = []string{"Bearer"} // RFC 9110 section 15.5.2
	case http.StatusMethodNotAllowed:
		res.Header["Allow"] = []string{"GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"} // RFC 9110 section 15.5.6
	}
	return res
}

// openAI returns the error in the form of OpenAI's API. The id of the request
// is in a header.
func (e Error) openAI(string) any {
	var param *string // null in OpenAI's API
	if e.Param != "" {
		param = &e.Param
	}
	return map[string]any{"error": struct {
		Message string  `json:"message"`
		Type    string  `json:"type"`
		Param   *string `json:"param"`
		Code    string  `json:"code"`
	}{e.Message, e.Kind, param, e.Code}}
}

// Answer is a reply of the balancer's own. The zero Answer stands for no
// answer.
type Answer struct {
	*http.Response
	// Class is that of the answer. If empty, it is that of the last attempt.
	Class string
	// Limit is the limit of the caller that refused the request, or nil.
	Limit *Limit
}

// Limit is a limit that refused a request, and the numbers in the error.
type Limit struct {
	// Name is such as tokens/minute.
	Name string
	// Allowed is how much may be used, Used how much was, and Requested how
	// much the request needs.
	Allowed, Used, Requested int64
}

// Answer returns the error as an answer to req.
func (e Error) Answer(req *http.Request) Answer {
	return Answer{Response: e.Response(req), Class: e.Class}
}

// JSONResponse returns the balancer's own reply to req.
func JSONResponse(req *http.Request, status int, value any) *http.Response {
	return jsonResponse(req, status, newID(), value)
}

// newID returns the ID of a request, in the form of OpenAI's own. It cannot be
// guessed or repeat.
func newID() string { return "req_" + rand.Text() }

func jsonResponse(req *http.Request, status int, id string, value any) *http.Response {
	text, _ := json.Marshal(value) // strings, numbers and times: it cannot fail
	return &http.Response{
		Status:     strconv.Itoa(status) + " " + http.StatusText(status),
		StatusCode: status,
		Proto:      "HTTP/1.1",
		ProtoMajor: 1,
		ProtoMinor: 1,
		Header: http.Header{
			"Content-Type":   {"application/json"},
			"Content-Length": {strconv.Itoa(len(text))},
			"X-Request-Id":   {id},
		},
		Body:          io.NopCloser(bytes.NewReader(text)),
		ContentLength: int64(len(text)),
		Request:       req,
	}
}
