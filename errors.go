package openailb

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/openai-lb/caddy-openai-lb/internal/hint"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// apiError is an error in the format of OpenAI's API, so that SDKs turn it into
// the right exception.
type apiError struct {
	status  int
	message string
	kind    string
	code    string
}

// The errors with a fixed text.
var (
	missingKey = apiError{http.StatusUnauthorized,
		"You did not provide an API key. Send it in an Authorization header, as 'Bearer' and the key, or in an api-key header.",
		"invalid_request_error", "invalid_api_key"}
	wrongKey = apiError{http.StatusUnauthorized,
		"Incorrect API key provided.", "invalid_request_error", "invalid_api_key"}
	compressedBody = apiError{http.StatusUnsupportedMediaType,
		"The request body is compressed, and no backend accepts it as it is. Send it without Content-Encoding.",
		"invalid_request_error", "unsupported_content_encoding"}
	headersTooLarge = apiError{http.StatusRequestHeaderFieldsTooLarge,
		"The request has more headers than the backend accepts.", "invalid_request_error", "headers_too_large"}
	invalidHeaders = apiError{http.StatusBadRequest,
		"The request has an invalid header.", "invalid_request_error", "invalid_headers"}
	upstreamError = apiError{http.StatusBadGateway,
		"The backend's error cannot be shown.", "server_error", "upstream_error"}
	credentialsRejected = apiError{http.StatusBadGateway,
		"No backend accepts the credentials of the load balancer.", "server_error", "upstream_credentials_rejected"}
	unreachable = apiError{http.StatusBadGateway,
		"No backend could be reached.", "server_error", "upstream_unreachable"}
	brokenOff = apiError{http.StatusBadGateway,
		"Every backend closed the connection before it answered.", "server_error", "upstream_unreachable"}
	timedOut = apiError{http.StatusGatewayTimeout,
		"No backend answered in time.", "server_error", "upstream_timeout"}
	perhapsExecuted = apiError{http.StatusBadGateway,
		"The backend closed the connection before it answered. The request may have been executed, and was not sent again.",
		"server_error", "upstream_unreachable"}
	perhapsStillExecuted = apiError{http.StatusGatewayTimeout,
		"The backend did not answer in time. The request may have been executed, and was not sent again.",
		"server_error", "upstream_timeout"}
	notReady = apiError{http.StatusServiceUnavailable,
		"No backend can be used: they cannot be reached, refuse their keys, or have no budget left.",
		"server_error", "no_backend_usable"}
)

func rateLimited(what string, wait time.Duration) apiError {
	return apiError{http.StatusTooManyRequests,
		"All backends are " + what + ". Please retry after " + strconv.Itoa(hint.ClientSeconds(wait)) + " seconds.",
		"rate_limit_error", "rate_limit_exceeded"}
}

func unknownModel(name string, models []string) apiError {
	return apiError{http.StatusNotFound,
		"The model '" + pool.ModelKey(name) + "' is not available. Available models: " + strings.Join(models, ", ") + ".",
		"invalid_request_error", "model_not_found"}
}

func invalidPath(problem string) apiError {
	return apiError{http.StatusBadRequest, problem, "invalid_request_error", "invalid_path"}
}

func modelBeyondBuffer(limit int64) apiError {
	return apiError{http.StatusRequestEntityTooLarge,
		"The model is not in the first " + strconv.FormatInt(limit, 10) +
			" bytes of the request body. Send 'model' before the long parts of the body, or send a shorter body.",
		"invalid_request_error", "request_too_large"}
}

// unreadableBody is the error for a request body that could not be read: it is
// over a limit, or malformed, or the client left.
func unreadableBody(err error) apiError {
	var tooLarge *http.MaxBytesError
	if errors.As(err, &tooLarge) {
		return apiError{http.StatusRequestEntityTooLarge,
			"The request body is larger than the " + strconv.FormatInt(tooLarge.Limit, 10) + " bytes allowed here.",
			"invalid_request_error", "request_too_large"}
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return apiError{http.StatusRequestTimeout, "The request body did not arrive in time.",
			"invalid_request_error", "request_timeout"}
	}
	return apiError{http.StatusBadRequest, "The request body could not be read.",
		"invalid_request_error", "invalid_body"}
}

// answer is the response when no backend served the request: an answer that
// needed no backend, the last backend's reply that tells the client more than
// we could, or an error of our own.
func (ex *exchange) answer(req *http.Request) *http.Response {
	now := time.Now()
	wait := ex.balancer.Pool.Wait(ex, now)
	res := ex.own
	if res == nil {
		res, ex.last = ex.last, nil
	}
	ex.committed()
	switch res {
	case nil:
		e := ex.whyNobody(now, wait)
		res = e.response(req)
		if e.status == http.StatusTooManyRequests {
			hint.Set(res.Header, wait)
		}
	case ex.own:
		res.Request = req
	default:
		if !ex.balancer.forward || res.StatusCode != http.StatusTooManyRequests {
			hint.Rewrite(res.Header, wait)
		}
		ex.balancer.removeProviderHeaders(res.Header)
	}
	return res
}

// whyNobody is the error that says why no backend could serve.
func (ex *exchange) whyNobody(now time.Time, wait time.Duration) apiError {
	if e, ok := ex.whyNobodyTakes(); ok {
		return e
	}
	throttled := ex.balancer.Pool.Throttled(ex, now)
	var last verdict.Class
	for _, a := range ex.attempts {
		throttled = throttled || a.class.Promise()
		last = a.class
	}
	switch {
	case throttled:
		return rateLimited("rate limited", wait)
	case last == verdict.Credential, last == verdict.NotPermitted:
		return credentialsRejected
	case last == verdict.Timeout:
		return timedOut
	case last == verdict.Failed:
		return brokenOff
	case last == "":
		return rateLimited("busy", wait)
	}
	return unreachable
}

// whyNobodyTakes is the error that says why the request can be sent to no
// backend. It reports false if it can be sent to one.
func (ex *exchange) whyNobodyTakes() (e apiError, ok bool) {
	var models []string
	withKey := ex.asked
	withKey.anonymous = false
	lacksKey := false
	for _, t := range ex.balancer.targets {
		if t.backend.takes(&ex.asked) {
			return apiError{}, false
		}
		lacksKey = lacksKey || t.backend.takes(&withKey)
		for _, model := range t.backend.Model {
			if !slices.Contains(models, model.Name) {
				models = append(models, model.Name)
			}
		}
	}
	switch {
	case lacksKey:
		return missingKey, true
	case ex.asked.opaque:
		return compressedBody, true
	case ex.asked.cutOff:
		return modelBeyondBuffer(ex.balancer.transport.RequestBuffers), true
	}
	return unknownModel(ex.asked.model, models), true
}

// response makes the error a reply to req.
func (e apiError) response(req *http.Request) *http.Response {
	res := jsonResponse(req, e.status, map[string]any{"error": struct {
		Message string  `json:"message"`
		Type    string  `json:"type"`
		Param   *string `json:"param"`
		Code    string  `json:"code"`
	}{e.message, e.kind, nil, e.code}})
	if e.status == http.StatusUnauthorized {
		res.Header["Www-Authenticate"] = []string{"Bearer"} // RFC 9110 section 15.5.2
	}
	return res
}

// jsonResponse is a reply of our own to req.
func jsonResponse(req *http.Request, status int, value any) *http.Response {
	text, _ := json.Marshal(value) // only strings and numbers: it cannot fail
	return &http.Response{
		Status:     strconv.Itoa(status) + " " + http.StatusText(status),
		StatusCode: status,
		Proto:      "HTTP/1.1",
		ProtoMajor: 1,
		ProtoMinor: 1,
		Header: http.Header{
			"Content-Type":   {"application/json"},
			"Content-Length": {strconv.Itoa(len(text))},
			"X-Request-Id":   {"req_" + uuid.NewString()},
		},
		Body:          io.NopCloser(bytes.NewReader(text)),
		ContentLength: int64(len(text)),
		Request:       req,
	}
}
