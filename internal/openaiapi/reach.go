package openaiapi

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/url"
	"slices"
	"strings"
)

// Reach tells what a request can get at.
type Reach uint8

const (
	// ReachesUnknown: nobody knows, because the operation is not known.
	ReachesUnknown Reach = iota
	// ReachesNamed: the objects that it names, and what is below them.
	ReachesNamed
	// ReachesAll: all objects of an account, as a list shows them.
	ReachesAll
	// ReachesUnseen: objects that something else names: the frames of a session, the file of a batch, or
	// what an eval is to look for.
	ReachesUnseen
)

// ReachOf returns what a request with this method and operation, as Route has it, can get at. If the
// operation has an id in its path, that is the one of the object.
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

// BodyNamesNothing reports whether the body of an operation names no object, so that nobody needs to
// read it.
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

// Readable reports whether all objects that the body names are among those of EachID, and OddID:
// there is no part of it that some servers read in another way. Those in Go ignore the case of names.
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

// OddID returns a text that the body has in the place of an id, but is not like one.
func (r Request) OddID(body []byte) (text []byte, ok bool) {
	if r.odd.end == 0 {
		return nil, false
	}
	return body[r.odd.start:r.odd.end], true
}
