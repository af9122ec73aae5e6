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
	// Subject is the last id in the path: the object that the request is about.
	Subject string
	// Creates reports whether the request creates the object in its reply.
	Creates bool
	// List reports whether the request asks for a list of objects. Each account
	// lists only its own.
	List bool
	// Teaches reports whether the reply names objects. The reply to a chat
	// completion does so only if the request asks to store it, or for audio.
	Teaches, TeachesIfStored bool
}

// collections are the paths below which objects have their ids.
var collections = map[string][]string{
	"responses": nil, "conversations": nil, "files": nil, "uploads": nil, "batches": nil, "vector_stores": nil,
	"containers": nil, "assistants": nil, "threads": nil, "evals": nil, "videos": nil, "skills": nil,
	"fine_tuning": {"jobs", "checkpoints"},
	"chat":        {"completions"},
	"realtime":    {"calls", "client_secrets", "sessions", "transcription_sessions"},
	"chatkit":     {"sessions", "threads"},
}

// notIDs are segments in places of ids that are not ids.
var notIDs = []string{"input_tokens", "compact", "runs", "edits", "extensions", "characters"}

// creating are the last segments of paths below an object to which a POST makes something new. Whatever
// else is sent there, such as cancel or search, only changes or shows what there is.
var creating = []string{"files", "file_batches", "messages", "runs", "items", "parts", "versions", "permissions", "remix"}

// ReadStored returns how a request uses stored objects. The operation is
// written as in Route.
func ReadStored(method, operation, rawQuery string) (s Stored) {
	first, rest, _ := strings.Cut(strings.Trim(operation, "/"), "/")
	seconds, ok := collections[first]
	if !ok {
		if first == "realtime" || operation == "/realtime" {
			s.addParams(rawQuery)
		}
		return s
	}
	if seconds != nil {
		var second string
		second, rest, _ = strings.Cut(rest, "/")
		if !slices.Contains(seconds, second) {
			if first == "realtime" {
				s.addParams(rawQuery)
			}
			return s
		}
	}
	s.Teaches = !strings.HasSuffix(rest, "/content") // that may be anything
	if s.TeachesIfStored = first == "chat" && method == http.MethodPost && rest == ""; s.TeachesIfStored {
		s.Teaches, s.Creates = false, true
		return s
	}
	isCollection := rest == ""
	s.Creates = method == http.MethodPost
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
	s.List = isCollection && first != "responses" && len(s.IDs) == 0 && (method == http.MethodGet || method == http.MethodHead)
	return s
}

// addParams adds the ids in a query: after and before of lists, and that of a realtime call.
func (s *Stored) addParams(rawQuery string) {
	if rawQuery == "" {
		return
	}
	for _, name := range []string{"after", "before", "call_id"} {
		if id, ok := Param(rawQuery, name); ok && isID(id) {
			s.IDs = append(s.IDs, id)
		}
	}
}

// IDInLocation returns the id at the end of a Location header, or nothing. The id
// of a realtime call is only there.
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
