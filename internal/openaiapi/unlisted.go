package openaiapi

import (
	"bytes"
	"net/http"
	"net/url"
	"slices"
	"strings"
)

// maybeInfers reports whether a model may answer a request that is not
// [IsInference]: the operation is unknown, or starts work of a model that the
// request names.
func maybeInfers(r *http.Request, operation string) bool {
	switch method := r.Method; method {
	case http.MethodHead, http.MethodOptions, http.MethodDelete:
		return false
	case http.MethodGet:
		if !IsHandshake(r) {
			return false
		}
	}
	operation = strings.TrimSuffix(operation, "/")
	switch operation {
	case "/realtime/calls", "/realtime/client_secrets", "/realtime/translations/calls", "/realtime/translations/client_secrets",
		"/realtime/sessions", "/realtime/transcription_sessions", "/videos":
		return true
	}
	_, _, stored := cutCollection(operation)
	return !stored
}

// Engine returns the model in the path of OpenAI's first API:
// /engines/<model>/completions.
func (q *Request) Engine() string {
	rest, ok := strings.CutPrefix(q.Route.Operation, "/engines/")
	if !ok {
		return ""
	}
	engine, _, _ := strings.Cut(rest, "/")
	return unescapeOr(engine, url.PathUnescape)
}

// NamesModel reports whether the request names a model where one is expected.
func (q *Request) NamesModel() bool { return q.Model != "" || q.Engine() != "" || q.Body.NamesOthers() }

// HidesModel reports whether the body of a request with MayInfer may name a
// model that was not found. A WebRTC offer names none.
func (q *Request) HidesModel(body []byte) bool {
	offer := bytes.HasPrefix(body, []byte("v=0\r\n")) || bytes.HasPrefix(body, []byte("v=0\n"))
	return q.MayInfer && len(body) > 0 && !offer && (!q.Body.Clear || q.Whole && !q.Body.Whole)
}

// Unlisted returns the first model of the request that is not one of these
// models. It looks at the engine, at fallbacks, and at the model of a session.
// An unreadable model is returned as "". found is false if there is none.
func (q *Request) Unlisted(body []byte, models []string) (model string, found bool) {
	if engine := q.Engine(); engine != "" && !slices.Contains(models, engine) {
		return engine, true
	}
	for model, ok := range q.Body.OtherModels(body) {
		if !ok || !slices.Contains(models, model) {
			return model, true
		}
	}
	return "", false
}

// ShowsStored reports whether a request only shows or changes a stored object,
// so that a usage in its reply belongs to an earlier request.
func ShowsStored(method, operation string) bool {
	if method != http.MethodPost {
		return true
	}
	_, _, stored := cutCollection(operation)
	operation = strings.TrimSuffix(operation, "/")
	last := operation[strings.LastIndexByte(operation, '/')+1:]
	return stored && (last == "cancel" || isID(last))
}

// ResponseID returns the id of the stored response that the request is about,
// or an empty string.
func (q *Request) ResponseID() string {
	rest, ok := strings.CutPrefix(q.Route.Operation, "/responses/")
	if !ok || q.Kind.Infers() {
		return ""
	}
	id, _, _ := strings.Cut(rest, "/")
	return unescapeOr(id, url.PathUnescape)
}
