package openaiapi

import (
	"bytes"
	"encoding/json"
)

// Kind is the place where an id stands, as far as it matters.
type Kind uint8

const (
	// Object is the place of the id of a stored object: a path, a file_id, a vector_store_ids.
	Object Kind = iota
	// PreviousResponse is the value of previous_response_id.
	PreviousResponse
	// Item is the id of an input item. A backend need not know it: a message comes whole, and only
	// what is not in it is looked up.
	Item
	// Encrypted is an encrypted_content, which only the account can read that wrote it.
	Encrypted
)

// ID is an id, or an encrypted content, in a path, a query or a body.
type ID struct {
	Kind Kind
	span span
}

const (
	// shortestID and longestID are how long an id is that can be told from other texts. Those
	// of the API have a prefix, a separator and 20 characters or more.
	shortestID = 8
	longestID  = 512
	// maxDepth is how deep in a body ids are looked for. The API has none below depth 7.
	maxDepth = 16
)

// isID reports whether a text can be the id of an object, and not a word such as "auto".
func isID[T string | []byte](text T) bool {
	if len(text) < shortestID || len(text) > longestID {
		return false
	}
	separated := false
	for i := range len(text) {
		separated = separated || text[i] == '_' || text[i] == '-'
		if text[i] <= ' ' {
			return false
		}
	}
	return separated
}

// place tells what a value in a body is.
type place uint8

const (
	elsewhere place = iota // nothing in it is an id of ours

	// Objects, or lists of them, in which only some members are looked at.
	top        // the body
	inside     // an object whose members may name objects
	item       // an object that has an id itself
	annotation // a note of the model's on where its text comes from
	named      // an id, a list of ids, or an object that has one

	// Texts, or lists of them.
	previous
	itemID
	encrypted

	stored // tells whether a response is stored
)

// grammar tells what stands under a key of an object that is at a place itself.
type grammar func(at place, key []byte) place

// placesInRequest are those where the API's requests name objects. All others are passed over: ids
// in prompts, metadata and schemas are text of the user's.
func placesInRequest(at place, key []byte) place {
	switch string(key) {
	case "id":
		switch at {
		case item:
			return itemID
		case named:
			return named
		}
	case "file_id", "file_ids", "vector_store_id", "vector_store_ids", "container", "container_id", "input_file_id",
		"training_file", "validation_file", "assistant_id", "thread_id", "part_ids", "skill_id":
		return named
	case "encrypted_content":
		return encrypted
	case "content", "output", "tools", "tool_resources", "file_search", "code_interpreter", "vector_stores", "file",
		"image_file", "input_image_mask", "attachments", "messages", "additional_messages", "thread", "files", "image", "images",
		"mask", "input_reference", "environment", "skills", "data_source":
		return inside
	case "source", "video":
		return item
	}
	if at == top {
		switch string(key) {
		case "previous_response_id":
			return previous
		case "conversation":
			return named
		case "input", "items":
			return item
		}
	}
	return elsewhere
}

// placesInReply are those where replies name objects that exist where the reply comes from.
func placesInReply(at place, key []byte) place {
	switch string(key) {
	case "id":
		if at == top || at == item || at == named {
			return named
		}
	case "conversation", "thread_id", "container_id", "output_file_id", "error_file_id", "result_files":
		return named
	case "file_id":
		if at == annotation {
			return named
		}
	case "encrypted_content":
		return encrypted
	case "content":
		return inside
	case "annotations":
		return annotation
	case "data", "output", "item":
		if at == top {
			return item
		}
	case "response":
		if at == top {
			return top
		}
	case "store":
		if at == top {
			return stored
		}
	}
	return elsewhere
}

// walker goes over JSON and notes the ids in it. Like ParseJSON it is a scanner. What it need not
// look into, it steps over.
type walker struct {
	body   []byte
	places grammar
	ids    []ID
	// notStored tells that a response says that it is not stored.
	notStored bool
}

// value returns the end of the value at i, or -1 if it is missing, incomplete or malformed.
func (w *walker) value(i int, at place, depth int) (end int) {
	if i >= len(w.body) {
		return -1
	}
	switch c := w.body[i]; {
	case c == '"':
		if end = skipString(w.body, i); end > 0 && named <= at && at <= encrypted {
			w.note(at, span{i, end})
		}
		return end
	case depth >= maxDepth, at == elsewhere, at > named:
	case c == '{':
		return w.object(i, at, depth+1)
	case c == '[':
		return w.array(i, at, depth+1)
	}
	end = skipValue(w.body, i)
	if at == stored && end > 0 && string(w.body[i:end]) == "false" {
		w.notStored = true
	}
	return end
}

func (w *walker) object(i int, at place, depth int) (end int) {
	b := w.body
	for {
		key := skipSpace(b, i+1) // past the brace or the comma
		if key < len(b) && b[key] == '}' {
			return key + 1
		}
		if key >= len(b) || b[key] != '"' {
			return -1
		}
		keyEnd := skipString(b, key)
		if keyEnd < 0 {
			return -1
		}
		colon := skipSpace(b, keyEnd)
		if colon >= len(b) || b[colon] != ':' {
			return -1
		}
		if i = w.value(skipSpace(b, colon+1), w.under(at, b[key+1:keyEnd-1]), depth); i < 0 {
			return -1
		}
		i = skipSpace(b, i)
		switch {
		case i >= len(b):
			return -1
		case b[i] == '}':
			return i + 1
		case b[i] != ',':
			return -1
		}
	}
}

// array looks at objects and strings. Numbers, of which a prompt of tokens has thousands, and lists
// of them are stepped over.
func (w *walker) array(i int, at place, depth int) (end int) {
	b := w.body
	start := i
	for {
		value := skipSpace(b, i+1) // past the bracket or the comma
		within := at
		if value < len(b) {
			switch c := b[value]; {
			case c == ']':
				return value + 1
			case c == '[':
				within = elsewhere
			case c != '{' && c != '"':
				return skipValue(b, start)
			}
		}
		if i = w.value(value, within, depth); i < 0 {
			return -1
		}
		i = skipSpace(b, i)
		switch {
		case i >= len(b):
			return -1
		case b[i] == ']':
			return i + 1
		case b[i] != ',':
			return -1
		}
	}
}

// under is the grammar for a key as it is written.
func (w *walker) under(at place, quoted []byte) place {
	if bytes.IndexByte(quoted, '\\') < 0 {
		return w.places(at, quoted)
	}
	var decoded [longestMember]byte
	key, ok := decodeKey(quoted, &decoded)
	if !ok {
		return elsewhere
	}
	return w.places(at, key)
}

func (w *walker) note(at place, s span) {
	kind := Object
	switch at {
	case previous:
		kind = PreviousResponse
	case itemID:
		kind = Item
	case encrypted:
		kind = Encrypted
	}
	if text := unquoteBytes(w.body[s.start:s.end]); kind == Encrypted && len(text) >= shortestID || isID(text) {
		w.ids = append(w.ids, ID{kind, s})
	}
}

// unquoteBytes decodes a string, without a copy if it has no escape.
func unquoteBytes(quoted []byte) []byte {
	if bytes.IndexByte(quoted, '\\') < 0 {
		return quoted[1 : len(quoted)-1]
	}
	var s string
	if json.Unmarshal(quoted, &s) != nil {
		return quoted[1 : len(quoted)-1]
	}
	return []byte(s)
}

// EachID calls f with every id that the body names, in their order. The body is the one that was
// parsed, and the text is a part of it.
func (r Request) EachID(body []byte, f func(kind Kind, text []byte)) {
	for _, id := range r.ids {
		text := body[id.span.start:id.span.end]
		if r.dashBoundary == nil {
			text = unquoteBytes(text)
		}
		f(id.Kind, text)
	}
}

// HasIDs reports whether the body names an object.
func (r Request) HasIDs() bool { return len(r.ids) > 0 }

// EachIDInReply calls f with every id in a JSON reply, or an event of a stream: those of objects
// that exist where it comes from. text is a part of reply. Of a reply that was cut off, it finds
// those that came whole. Of a response that says that it is not stored, only encrypted contents
// count.
func EachIDInReply(reply []byte, f func(kind Kind, text []byte)) (notStored bool) {
	w := walker{body: reply, places: placesInReply}
	w.value(skipSpace(reply, 0), top, 0)
	for _, id := range w.ids {
		if id.Kind == Encrypted || !w.notStored {
			f(id.Kind, unquoteBytes(reply[id.span.start:id.span.end]))
		}
	}
	return w.notStored
}
