package affinity

import (
	"net/http"
	"strconv"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// Strict is the value of the option callers with which a caller reaches only
// objects that it made through the pool.
const Strict = "strict"

// refuses returns the error for a request that could reach objects which are
// not visible in the request. Whether the visible objects belong to the caller
// is checked elsewhere.
func (r *Query) refuses() (e apierror.Error, refused bool) {
	if r.Upgrade {
		return forbidden("A WebSocket is not available: the objects that its messages name cannot be seen, and callers are kept apart here."), true
	}
	switch openaiapi.ReachOf(r.Method, r.Operation) {
	case openaiapi.ReachesAll:
		return forbidden("A list is not available: it would show the objects of all callers, and callers are kept apart here."), true
	case openaiapi.ReachesUnseen:
		return forbidden("This operation is not available: the objects that it uses cannot be seen in the request, and callers are kept apart here."), true
	case openaiapi.ReachesUnknown:
		return forbidden("This operation is not available: it is unknown which objects it uses, and callers are kept apart here."), true
	}
	switch {
	case openaiapi.BodyNamesNothing(r.Method, r.Operation):
		return e, false
	case r.Compressed:
		return unseen(http.StatusUnsupportedMediaType, "unsupported_content_encoding", "The request body is compressed. Send it without Content-Encoding"), true
	case r.CutAt > 0:
		return unseen(http.StatusRequestEntityTooLarge, "request_too_large",
			"The request body has more than "+strconv.FormatInt(r.CutAt, 10)+" bytes. Send a shorter one"), true
	case r.Disputed, !r.Body.Readable(r.Text):
		return unseen(http.StatusBadRequest, "invalid_body", "The request body is neither a JSON object nor a form of plain fields. Send one of these"), true
	}
	if text, odd := r.Body.OddID(r.Text); odd {
		return notFound(openaiapi.ObjectID, string(text)), true
	}
	return e, false
}

func forbidden(message string) apierror.Error {
	return apierror.Invalid(http.StatusForbidden, "callers_kept_apart", message)
}

func unseen(status int, code, message string) apierror.Error {
	return apierror.Invalid(status, code, message+": the objects that it names must be visible, because callers are kept apart here.")
}
