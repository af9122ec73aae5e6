package openaiapi

import (
	"bytes"
	"net/http"
	"net/url"
	"slices"
	"strings"
)

// Providers publish new APIs that this package does not know yet, such as
// agents and their sessions, vaults, or tunnels. Almost all of them are
// collections of stored objects. So an operation that is in no table of this
// package counts as one:
//
//   - Each segment of its path after the first is a word of the API, or the
//     name of an object. A segment in lower-case letters may be either, and
//     counts as a name if a reply has taught it in this place. Any other is a
//     name.
//   - A successful POST or PUT makes the object whose name is the "id" in its
//     reply, at the top or one object below.
//   - Members and parameters whose names are "id", or end with "_id" or "_ids",
//     may name an object, or have another meaning. So they count only if a
//     reply has taught their value.
//
// Content and metadata are the user's text.

// knownSegments are the first segments of operations without stored objects
// that have other operations than inference below them.
var knownSegments = []string{"", "models", "realtime", "engines", "usage", "deployments"}

// IsNewAPI reports whether nothing is known about an operation, written as in
// Route.
func IsNewAPI(operation string) bool {
	first, _, known := cutCollection(operation)
	return !known && !slices.Contains(knownSegments, first) && !IsInference(http.MethodPost, operation)
}

// PathName is a segment in the path of a new API that may be an object's name.
type PathName struct {
	// Text is the segment.
	Text string
	// Parent is the path before the segment.
	Parent string
	// Word reports whether the segment may be a word of the API instead.
	Word bool
}

// Scoped returns a unique text for a name that is unique only within its
// collection.
func (n PathName) Scoped() string { return scoped(n.Parent, n.Text) }

func scoped(parent, name string) string { return "\x00" + parent + "/" + name } // no id has a NUL

// IsGlobal reports whether the name is unique across collections.
func (n PathName) IsGlobal() bool { return !n.Word && isID(n.Text) }

// readNewAPI reads the path of a new API.
func (s *Stored) readNewAPI(method, operation string) {
	path := unescapeOr(operation, url.PathUnescape)
	read := asOthersRead(path)
	s.NewAPI = true
	s.OddPath = strings.TrimSuffix(path, "/") != read || strings.Count(path, "/") != strings.Count(operation, "/")
	s.Creates = method == http.MethodPost || method == http.MethodPut
	s.Teaches = s.Creates
	parent := ""
	for i, segment := range strings.Split(strings.TrimPrefix(read, "/"), "/") {
		if i > 0 {
			s.Names = append(s.Names, PathName{segment, parent, isWord(segment)})
		}
		parent += "/" + strings.ToLower(segment)
	}
	s.Parent = parent
}

// isWord reports whether a segment of a path may be a word of an API, such as
// client_secrets, or its version.
func isWord(segment string) bool {
	if version, ok := strings.CutPrefix(segment, "v"); ok && version != "" && strings.Trim(version, "0123456789") == "" {
		return true
	}
	for i := range len(segment) {
		if c := segment[i]; c != '_' && c != '-' && (c < 'a' || c > 'z') {
			return false
		}
	}
	return true
}

// isObjectMember reports whether a member or parameter with this name may name
// an object in an unknown API.
func isObjectMember(name []byte) bool {
	return string(name) == "id" || bytes.HasSuffix(name, []byte("_id")) || bytes.HasSuffix(name, []byte("_ids"))
}

// notObjects are names of members that end like an object's, but never name a
// stored object. Many requests have them.
var notObjects = setOf("call_id", "tool_call_id", "tool_use_id", "connector_id", "user_id", "end_user_id",
	"session_id", "trace_id",
	"span_id", "request_id", "client_request_id", "correlation_id", "event_id")

// isUsersText reports whether a member of an unknown API has the user's own
// text.
func isUsersText(name []byte) bool {
	switch string(name) {
	case "content", "metadata", "input", "messages", "instructions", "parameters", "arguments", "output", "text":
		return true
	}
	return false
}

// EachGuess calls f with every text in the body of a new API that may be an
// object's id.
func EachGuess(body []byte, f func(text []byte)) {
	w := walker{body: body, grammar: inNewAPI}
	w.value(skipSpace(body, 0), open, 0)
	for _, id := range w.ids[:min(len(w.ids), MaxIDs)] {
		f(readID(GuessedID, unquoteBytes(body[id.span.start:id.span.end])))
	}
}

// EachString calls f with every string in a JSON text, including the names of
// members, until f returns false.
func EachString(body []byte, f func(text []byte) bool) {
	for i := 0; ; {
		n := bytes.IndexByte(body[i:], '"')
		if n < 0 {
			return
		}
		end := skipString(body, i+n)
		if end < 0 || !f(unquoteBytes(body[i+n:end])) {
			return
		}
		i = end
	}
}

// EachLine calls f with every line of a form that may be a name, until f
// returns false. Most fields are one line.
func EachLine(form []byte, f func(text []byte) bool) {
	for line := range bytes.SplitSeq(form, []byte("\n")) {
		if len(line) > 0 && line[len(line)-1] == '\r' {
			line = line[:len(line)-1]
		}
		if isName(line) && !f(line) {
			return
		}
	}
}

// MadeName is the name of an object that a new API has made.
type MadeName struct {
	Text string
	// Scoped is the name's unique text with the collection in which it was
	// made: see [PathName.Scoped]. It is empty if the name is global.
	Scoped string
	// Global reports whether the name looks like an id, so that it is not
	// confused with other texts.
	Global bool
}

// maxMade is how many names are learned from a reply of a new API.
const maxMade = 16

// EachMade calls f with the names of the objects that a request below this path
// has made, according to its reply.
func EachMade(reply []byte, parent string, f func(MadeName)) {
	w := walker{body: reply, grammar: inNewReply}
	begin := skipSpace(reply, 0)
	if begin < len(reply) && reply[begin] == '{' { // and not a list, which shows what there was before
		w.value(begin, top, 0)
	}
	for _, id := range w.ids[:min(len(w.ids), maxMade)] {
		n := PathName{Text: string(unquoteBytes(reply[id.span.start:id.span.end])), Parent: parent}
		if hasBlank(n.Text) {
			continue
		}
		n.Word = isWord(n.Text)
		name := MadeName{Text: n.Text, Global: isID(n.Text)}
		if !n.IsGlobal() {
			name.Scoped = n.Scoped()
		}
		f(name)
	}
}

// placeInNewAPI returns the place of a member in a request to a new API.
// Objects may be named anywhere except in the user's text.
func placeInNewAPI(key []byte) place {
	switch {
	case isUsersText(key):
		return elsewhere
	case isObjectMember(key):
		return guess
	}
	return open
}

// placeInNewReply returns the place of a member in the reply to a request that
// makes objects of a new API.
func placeInNewReply(at place, key []byte) place {
	switch {
	case string(key) == "id" && (at == top || at == oneBelow):
		return madeName
	case at == top && !isUsersText(key) && string(key) != "error":
		return oneBelow
	}
	return elsewhere
}
