package openaiapi

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/url"
	"slices"
	"strings"
)

// Reach is which stored objects a request can use.
type Reach uint8

const (
	// ReachesUnknown: the operation is not a known one.
	ReachesUnknown Reach = iota
	// ReachesNamed: the objects that it names, and the objects below them.
	ReachesNamed
	// ReachesAll: all objects of an account, as a list shows them.
	ReachesAll
	// ReachesUnseen: objects that are named elsewhere: in the frames of a session,
	// in the file of a batch, or in the filters of an eval.
	ReachesUnseen
)

// ReachOf returns which stored objects a request with this method and operation,
// written as in Route, can use. An id in the operation's path names the object.
func ReachOf(method, operation string) Reach {
	reads := method == http.MethodGet || method == http.MethodHead
	first, rest, _ := strings.Cut(strings.Trim(operation, "/"), "/")
	switch {
	case Inference(method, operation), first == "models" && reads:
		return ReachesNamed
	case first == "realtime", first == "chatkit", first == "evals":
		return ReachesUnseen
	}
	seconds, ok := collections[first]
	if seconds != nil {
		var second string
		second, rest, _ = strings.Cut(rest, "/")
		ok = slices.Contains(seconds, second)
	}
	if !ok {
		return ReachesUnknown
	}
	for rest != "" {
		var segment string
		segment, rest, _ = strings.Cut(rest, "/")
		if segment = unescapeOr(segment, url.PathUnescape); isID(segment) {
			return ReachesNamed
		}
		if !slices.Contains(notIDs, segment) {
			return ReachesUnknown
		}
	}
	switch {
	case method != http.MethodPost:
		return ReachesAll
	case first == "batches":
		return ReachesUnseen
	}
	return ReachesNamed
}

// BodyNamesNothing reports whether the body of an operation names no object, so that it need not be
// searched for ids.
func BodyNamesNothing(method, operation string) bool {
	operation = strings.TrimSuffix(operation, "/")
	if method != http.MethodPost {
		return false
	}
	switch operation {
	case "/files", "/completions", "/embeddings", "/moderations", "/rerank", "/images/generations", "/images/variations":
		return true
	}
	return strings.HasPrefix(operation, "/audio/") && operation != "/audio/speech" || strings.HasPrefix(operation, "/uploads/") && strings.HasSuffix(operation, "/parts")
}

// Readable reports whether EachID and OddID return all objects that the body names:
// no server reads any part of it differently. Servers in Go ignore the case of
// names.
func (r Request) Readable(body []byte) bool {
	if r.dashBoundary != nil {
		return r.Clear && r.Whole && !r.nested
	}
	if len(body) == 0 {
		return true
	}
	text := bytes.TrimPrefix(body, bom)
	if !r.Clear || !json.Valid(text) {
		return false
	}
	w := walker{body: text, grammar: inRequestOfAnyCase}
	w.value(skipSpace(text, 0), top, 0)
	return len(w.ids) == len(r.ids) && (w.odd.end > 0) == (r.odd.end > 0)
}

// OddID returns a text of the body in a place of ids that does not look like an id.
func (r Request) OddID(body []byte) (text []byte, ok bool) {
	if r.odd.end == 0 {
		return nil, false
	}
	return body[r.odd.start:r.odd.end], true
}
