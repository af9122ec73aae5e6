package openaiapi

import (
	"net/http"
	"net/url"
	"slices"
	"strings"
)

// Stored describes how a request uses stored objects, by its method, path and
// query.
type Stored struct {
	// IDs are the ids in the path, followed by the ids in the query.
	IDs []string
	// Subject is the last id in the path, which is the object that the request
	// is about.
	Subject string
	// Creates reports whether the request creates the object in its reply.
	Creates bool
	// Makes is the kind of object that the request makes in a collection, if
	// that is not below another object.
	Makes Made
	// List reports whether the request asks for a list of objects. Each account
	// lists only its own.
	List bool
	// Teaches reports whether the reply names objects. TeachesIfStored reports
	// whether it does so only if the request asks to store the reply, or for
	// audio, as a chat completion may.
	Teaches, TeachesIfStored bool
	// Guesses are the values of further parameters that may be ids. They count
	// only if a reply has taught them.
	Guesses []string

	// NewAPI reports whether the operation is unknown: see [IsNewAPI]. Then
	// Names are the possible names of objects in its path, and Parent is the
	// path in which its reply names objects. OddPath reports whether some
	// servers read other names in the path.
	NewAPI  bool
	Names   []PathName
	Parent  string
	OddPath bool
}

// Made is the kind of object that a request makes, by how other requests use
// it.
type Made uint8

const (
	// MakesNothing means no object, or one that other requests do not name
	// together with other objects.
	MakesNothing Made = iota
	// MakesResponse means a response, which the next request may name together
	// with other objects.
	MakesResponse
	// MakesHistory means a conversation or thread, which responses or runs
	// continue, and name together with other objects.
	MakesHistory
	// MakesObject means an object that other requests name, often with others
	// of its kind.
	MakesObject
)

// made returns the kind of object that a POST to a collection makes.
func made(collection string) Made {
	switch collection {
	case "responses":
		return MakesResponse
	case "conversations", "threads":
		return MakesHistory
	case "files", "uploads", "vector_stores", "batches", "containers", "assistants", "skills", "evals":
		return MakesObject
	}
	return MakesNothing
}

// collections are the paths of stored objects: the first segment and, if it has
// any, the second. The ids of the objects follow.
var collections = map[string][]string{
	"responses": nil, "conversations": nil, "files": nil, "uploads": nil, "batches": nil, "vector_stores": nil,
	"containers": nil, "assistants": nil, "threads": nil, "evals": nil, "videos": nil, "skills": nil,
	"fine_tuning": {"jobs", "checkpoints"},
	"chat":        {"completions"},
	"realtime":    {"calls", "client_secrets", "sessions", "transcription_sessions", "translations"},
	"chatkit":     {"sessions", "threads"},
}

// cutCollection cuts the collection from an operation: its first segment, and
// the second one if it belongs to the collection.
func cutCollection(operation string) (first, rest string, ok bool) {
	first, rest, _ = strings.Cut(strings.Trim(operation, "/"), "/")
	seconds, ok := collections[first]
	if seconds != nil {
		var second string
		second, rest, _ = strings.Cut(rest, "/")
		ok = slices.Contains(seconds, second)
	}
	return first, rest, ok
}

// notIDs are segments that stand in the place of an id, but are not ids.
var notIDs = []string{"input_tokens", "compact", "runs", "edits", "extensions", "characters", "client_secrets", "calls"}

// creating are the last segments of paths below an object to which a POST
// creates something. A POST to other segments, such as cancel or search, only
// changes or shows existing objects.
var creating = []string{"files", "file_batches", "messages", "runs", "items", "parts", "versions", "permissions", "remix"}

// ReadStored returns how a request uses stored objects. The operation is
// written as in Route.
func ReadStored(method, operation, rawQuery string) (s Stored) {
	first, rest, ok := cutCollection(operation)
	if !ok {
		if IsNewAPI(operation) {
			s.readNewAPI(method, operation)
		}
		if s.NewAPI || first == "realtime" {
			s.addParams(rawQuery)
		}
		return s
	}
	s.Teaches = !strings.HasSuffix(rest, "/content") // that may be anything
	if s.TeachesIfStored = first == "chat" && method == http.MethodPost && rest == ""; s.TeachesIfStored {
		s.Teaches, s.Creates = false, true
		return s
	}
	isCollection := rest == ""
	if s.Creates = method == http.MethodPost; s.Creates && isCollection {
		s.Makes = made(first)
	}
	// names of collections and ids take turns, and some of the latter are verbs
	for i := 0; rest != ""; i++ {
		var segment string
		segment, rest, _ = strings.Cut(rest, "/")
		switch segment = unescapeOr(segment, url.PathUnescape); {
		case i%2 == 0 && slices.Contains(notIDs, segment):
			i-- // what follows may be one
		case i%2 == 0:
			if s.Creates = false; isID(segment) {
				s.IDs, s.Subject = append(s.IDs, segment), segment
			}
		default:
			s.Creates = method == http.MethodPost && slices.Contains(creating, segment)
		}
	}
	s.addParams(rawQuery)
	// there is no list of responses: a WebSocket is opened there
	s.List = isCollection && first != "responses" && len(s.IDs) == 0 &&
		(method == http.MethodGet || method == http.MethodHead)
	return s
}

// addParams adds the ids in a query. Servers differ in which of several
// parameters they read, and some also split at semicolons, or read call_id[] as
// call_id. So all of these count.
func (s *Stored) addParams(rawQuery string) {
	if rawQuery == "" {
		return
	}
	for pair := range strings.FieldsFuncSeq(rawQuery, func(r rune) bool { return r == '&' || r == ';' }) {
		name, value, _ := strings.Cut(pair, "=")
		name, _, _ = strings.Cut(bareText(unescapeOr(name, url.QueryUnescape)), "[")
		id := bareText(unescapeOr(value, url.QueryUnescape))
		switch name = strings.ToLower(name); {
		case !isID(id):
		case slices.Contains(objectParams, name) && !s.NewAPI:
			s.IDs = append(s.IDs, id)
		case slices.Contains(objectParams, name), isObjectMember([]byte(name)):
			s.Guesses = append(s.Guesses, id)
		}
	}
}

// objectParams are the parameters that name objects: those of lists, and the
// call of a realtime connection.
var objectParams = []string{"after", "before", "call_id"}

// Reach says which stored objects a request can use.
type Reach uint8

const (
	// ReachesUnknown means that the operation is unknown.
	ReachesUnknown Reach = iota
	// ReachesNamed means the objects that the request names, and the objects
	// below them.
	ReachesNamed
	// ReachesAll means all objects of an account, as in a list.
	ReachesAll
	// ReachesUnseen means objects that are named outside the request: in the
	// frames of a session, in the file of a batch, or in the filters of an
	// eval.
	ReachesUnseen
)

// ReachOf returns which stored objects a request can use. The operation is
// written as in Route. An id in the path names an object.
func ReachOf(method, operation string) Reach {
	reads := method == http.MethodGet || method == http.MethodHead
	first, rest, ok := cutCollection(operation)
	switch {
	case IsInference(method, operation), first == "models" && reads:
		return ReachesNamed
	case first == "realtime", first == "chatkit", first == "evals":
		return ReachesUnseen
	case !ok:
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

// BodyNamesNothing reports whether the body of an operation names no objects,
// so that it need not be searched for ids.
func BodyNamesNothing(method, operation string) bool {
	operation = strings.TrimSuffix(operation, "/")
	if method != http.MethodPost {
		return false
	}
	if known, ok := inferences[operation]; ok {
		return known.namesNothing
	}
	return operation == "/files" || strings.HasPrefix(operation, "/audio/") ||
		strings.HasPrefix(operation, "/uploads/") && strings.HasSuffix(operation, "/parts")
}

// IDInLocation returns the id at the end of a Location header, or an empty
// string. The id of a realtime call is only in this header.
func IDInLocation(location string) string {
	u, err := url.Parse(location)
	if err != nil {
		return ""
	}
	if ids := ReadStored(http.MethodPost, ParsePath(u.EscapedPath()).Operation, "").IDs; len(ids) > 0 {
		return ids[len(ids)-1]
	}
	return ""
}
