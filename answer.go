package openailb

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"math"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// apiError is an error as OpenAI's API words it, so that SDKs turn it into the
// right exception.
type apiError struct {
	status  int
	message string
	kind    string
	code    string
}

// answer is what the client gets when no backend could serve it: the last
// reply that tells something, or an error of our own.
func (ex *exchange) answer(req *http.Request) *http.Response {
	now := time.Now()
	wait := ex.pool.wait(ex, now)
	res := ex.last
	ex.last = nil
	ex.committed()
	if res != nil {
		if !ex.pool.forward || res.StatusCode != http.StatusTooManyRequests {
			rewriteHints(res.Header, wait)
		}
		ex.removeProviderHeaders(res.Header)
		return res
	}
	e := ex.apiError(now, wait)
	res = e.response(req)
	if e.status == http.StatusTooManyRequests {
		setHints(res.Header, wait)
	}
	return res
}

// apiError words why nobody could serve.
func (ex *exchange) apiError(now time.Time, wait time.Duration) apiError {
	if e, ok := ex.nobodyTakes(); ok {
		return e
	}
	throttled := ex.pool.throttled(ex, now)
	var last verdict.Class
	for _, a := range ex.attempts {
		throttled = throttled || a.class.Promise()
		last = a.class
	}
	switch {
	case throttled:
		return apiError{http.StatusTooManyRequests,
			"All backends are rate limited. Please retry after " + strconv.Itoa(clientSeconds(wait)) + " seconds.",
			"rate_limit_error", "rate_limit_exceeded"}
	case last == verdict.Credential, last == verdict.NotPermitted:
		return apiError{http.StatusBadGateway,
			"The load balancer has no credentials that its backends accept.", "server_error", "upstream_credentials_rejected"}
	case last == verdict.Timeout:
		return apiError{http.StatusGatewayTimeout,
			"No backend answered in time.", "server_error", "upstream_timeout"}
	case last == "":
		return apiError{http.StatusTooManyRequests,
			"All backends are busy. Please retry after " + strconv.Itoa(clientSeconds(wait)) + " seconds.",
			"rate_limit_error", "rate_limit_exceeded"}
	}
	return apiError{http.StatusBadGateway,
		"No backend could be reached.", "server_error", "upstream_unreachable"}
}

// nobodyTakes words why the request can be sent to no backend, if that is so.
func (ex *exchange) nobodyTakes() (e apiError, ok bool) {
	var models []string
	withKey := ex.asked
	withKey.anonymous = false
	lacksKey := false
	for _, m := range ex.pool.members {
		if m.takes(&ex.asked) {
			return apiError{}, false
		}
		lacksKey = lacksKey || m.takes(&withKey)
		for _, model := range m.backend.Model {
			if !slices.Contains(models, model.Name) {
				models = append(models, model.Name)
			}
		}
	}
	if lacksKey {
		return missingKey, true
	}
	if ex.asked.opaque {
		return apiError{http.StatusUnsupportedMediaType,
			"The request body is compressed, and no backend takes it as it is. Please send it without Content-Encoding.",
			"invalid_request_error", "unsupported_content_encoding"}, true
	}
	return unknownModel(ex.asked.model, models), true
}

var missingKey = apiError{http.StatusUnauthorized,
	"You did not provide an API key. Send it in an Authorization header, as 'Bearer' and the key, or in an api-key header.",
	"invalid_request_error", "invalid_api_key"}

var wrongKey = apiError{http.StatusUnauthorized,
	"Incorrect API key provided.", "invalid_request_error", "invalid_api_key"}

func unknownModel(name string, models []string) apiError {
	return apiError{http.StatusNotFound,
		"The model '" + modelKey(name) + "' does not exist here. There are: " + strings.Join(models, ", ") + ".",
		"invalid_request_error", "model_not_found"}
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
	text, _ := json.Marshal(value) // there is nothing in it that JSON could not say
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

// refuseBody answers a request whose body could not be read: it is over a
// limit, or malformed, or its client left.
func (ex *exchange) refuseBody(req *http.Request, err error) *http.Response {
	ex.committed()
	var tooLarge *http.MaxBytesError
	if errors.As(err, &tooLarge) {
		return apiError{http.StatusRequestEntityTooLarge,
			"The request body is larger than the " + strconv.FormatInt(tooLarge.Limit, 10) + " bytes allowed here.",
			"invalid_request_error", "request_too_large"}.response(req)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return apiError{http.StatusRequestTimeout, "The request body did not arrive in time.",
			"invalid_request_error", "request_timeout"}.response(req)
	}
	return apiError{http.StatusBadRequest, "The request body could not be read.",
		"invalid_request_error", "invalid_body"}.response(req)
}

// write sends the error to a client whose request went to no backend.
func (e apiError) write(w http.ResponseWriter, req *http.Request) error {
	return writeResponse(w, e.response(req))
}

func writeResponse(w http.ResponseWriter, res *http.Response) error {
	defer res.Body.Close()
	for name, values := range res.Header {
		w.Header()[name] = values
	}
	w.WriteHeader(res.StatusCode)
	_, err := io.Copy(w, res.Body)
	return err
}

// The bounds of what clients are told to wait. Some SDKs sleep for whatever
// they are told (openai-node 6.26 to 7.4), others ignore or refuse more than
// a minute or two (openai-python, openai-go), and most take 0 for no answer.
const (
	minClientWait = time.Second
	maxClientWait = 59 * time.Second
)

// clientSeconds is the wait in whole seconds: what Retry-After may hold that
// every SDK reads.
func clientSeconds(wait time.Duration) int {
	return int(math.Ceil(min(max(wait, minClientWait), maxClientWait).Seconds()))
}

func setHints(header http.Header, wait time.Duration) {
	wait = min(max(wait, minClientWait), maxClientWait)
	header["Retry-After"] = []string{strconv.Itoa(clientSeconds(wait))}
	header["Retry-After-Ms"] = []string{strconv.FormatInt(wait.Milliseconds(), 10)}
}

// rewriteHints replaces a backend's hints, which speak of that backend alone
// and in ways not every SDK survives.
func rewriteHints(header http.Header, wait time.Duration) {
	hinted := false
	for _, name := range []string{"Retry-After", "Retry-After-Ms", "X-Ms-Retry-After-Ms"} {
		hinted = hinted || header[name] != nil
		delete(header, name)
	}
	if hinted {
		setHints(header, wait)
	}
}
