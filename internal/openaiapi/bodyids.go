package openaiapi

import (
	"bytes"
	"encoding/json"
	"strings"
	"unicode"
)

// IDKind is the kind of place where an id was found.
type IDKind uint8

const (
	// ObjectID is the id of a stored object, for example in a path, a file_id
	// or a vector_store_ids.
	ObjectID IDKind = iota
	// PreviousResponseID is the value of previous_response_id.
	PreviousResponseID
	// ItemID is the id of an input item. A backend need not know the id:
	// messages are sent in full, and only items without content are looked up.
	ItemID
	// EncryptedContent is an encrypted_content, which only the account that
	// wrote it can read.
	EncryptedContent
	// PartID is the id of an object that was created as a part of the shown
	// object, such as an output item of a response, the output file of a batch,
	// or the thread of a run. In a reply, ObjectID is the id of the shown
	// object itself, or of an object in a list.
	PartID
	// MentionedID is the id of an object that a reply only mentions, such as a
	// file that an answer cites.
	MentionedID
	// GuessedID is the value of a member that may name an object in a new API.
	// It counts only if a reply has taught it.
	GuessedID
)

// id is the place of an id, or of encrypted content, in a body.
type id struct {
	kind IDKind
	span span
}

const (
	// shortestID and longestID limit the length of an id. The lower limit
	// distinguishes ids from other texts: the API's ids have a prefix, a
	// separator and 20 characters or more.
	shortestID = 8
	longestID  = 512
	// MaxIDs is how many ids a body may name, and how many ids of a reply are
	// read.
	MaxIDs = 1000
	// maxDepth is the depth to which a body is searched for ids. The API has
	// none below depth 7.
	maxDepth = 16
)

// isID reports whether a text may be the id of an object, and not a word such
// as "auto".
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

// isName reports whether a text may be the name of an object in a new API.
func isName(text []byte) bool {
	return len(text) > 0 && len(text) <= longestID && !hasBlank(string(text))
}

// isBlank reports whether servers may drop the character at the ends of a text,
// because it is white space or invisible.
func isBlank(r rune) bool { return unicode.IsSpace(r) || unicode.In(r, unicode.Cc, unicode.Cf) }

func hasBlank(text string) bool { return strings.ContainsFunc(text, isBlank) }

// bareText returns a text as servers read it that drop blanks, or end a text at
// a NUL.
func bareText[T string | []byte](text T) T {
	for i := range len(text) {
		if c := text[i]; c <= ' ' || c >= 0x7f {
			before, _, _ := strings.Cut(strings.TrimFunc(string(text), isBlank), "\x00")
			return T(strings.Join(strings.FieldsFunc(before, isBlank), ""))
		}
	}
	return text
}

// walker scans JSON and records the ids in it. It skips values in which there
// cannot be an id.
type walker struct {
	body    []byte
	grammar grammar
	objects // those that were found
	// notStored reports whether a response says that it is not stored.
	notStored bool
	// acts reports whether the request may have an effect: see hasEffect.
	acts bool
	// prompt records the messages in the current list. It is nil outside a list
	// of messages.
	prompt *Prompt
}

// value returns the end of the value at i, or -1 if it is missing, incomplete
// or malformed.
func (w *walker) value(i int, at place, depth int) (end int) {
	if i >= len(w.body) {
		return -1
	}
	switch c := w.body[i]; {
	case c == '"':
		if end = skipString(w.body, i); end > 0 && at.isText() {
			w.add(at, span{i, end})
		}
		return end
	case depth >= maxDepth:
		w.acts = w.acts || at == tool
	case at == elsewhere, at > mention && at != memberAudio && (at != guess || c != '['), at == oneBelow && c != '{':
	case c == '{':
		return w.object(i, at, depth+1)
	case c == '[':
		return w.array(i, at, depth+1)
	}
	end = skipValue(w.body, i)
	if at == memberStore && end > 0 && string(w.body[i:end]) == "false" {
		w.notStored = true
	}
	return end
}

// messageDepth is the depth of the messages in their list.
const messageDepth = 3

func (w *walker) object(i int, at place, depth int) (end int) {
	b := w.body
	var role, content []byte
	for {
		name, value := memberAt(b, i)
		if value < 0 {
			return endOf(b, i+1)
		}
		inner := w.grammar.under(at, name)
		if value < len(b) && b[value] == '"' && !inner.isText() { // as most are
			end = skipString(b, value)
		} else {
			end = w.value(value, inner, depth)
		}
		if end < 0 {
			return -1
		}
		if at == top || at == item || at == tool {
			w.acts = w.acts || hasEffect(at, inner, name, b[value:end])
		}
		if w.prompt != nil && depth == messageDepth {
			switch string(name) {
			case "role":
				role = b[value:end]
			case "content":
				content = b[value:end]
			}
		}
		if i = skipSpace(b, end); i >= len(b) || b[i] != ',' {
			break
		}
	}
	if w.prompt != nil && depth == messageDepth {
		w.prompt.addMessage(role, content)
	}
	return endOf(b, i)
}

// array reads a list. It looks at objects and strings, and skips null, inner
// lists, and numbers, of which a prompt of tokens has thousands.
func (w *walker) array(i int, at place, depth int) (end int) {
	b := w.body
	for i++; i >= 0 && i < len(b); {
		switch c := b[i]; {
		case inert[c]:
			i++
		case c == '"', c == '{':
			i = w.value(i, at, depth)
		case c == '[':
			i = skipOut(b, i+1)
		case c == ']':
			return i + 1
		default:
			return -1
		}
	}
	return -1
}

func (w *walker) add(at place, s span) {
	if len(w.ids) > MaxIDs {
		return // it is refused
	}
	text := readID(kinds[at], unquoteBytes(w.body[s.start:s.end]))
	if isContent := at == encrypted || at == mentionEncrypted; isContent && len(text) >= shortestID ||
		at == madeName && isName(text) || isID(text) {
		w.ids = append(w.ids, id{kinds[at], s})
	} else if len(text) > 0 && at < guess {
		w.odd = s
	}
}

// kinds maps places to the kinds of their ids.
var kinds = [...]IDKind{named: ObjectID, ofPart: PartID, mention: MentionedID, previous: PreviousResponseID,
	ofItem: ItemID, encrypted: EncryptedContent, mentionEncrypted: MentionedID, guess: GuessedID, madeName: ObjectID}

// readID returns an id as servers may read it, or encrypted content without the
// white space around it.
func readID(kind IDKind, text []byte) []byte {
	if kind == EncryptedContent {
		return bytes.TrimSpace(text)
	}
	return bareText(text)
}

// unquoteBytes decodes a JSON string. It does not copy a string without
// escapes.
func unquoteBytes(quoted []byte) []byte {
	if bytes.IndexByte(quoted, '\\') < 0 {
		return quoted[1 : len(quoted)-1]
	}
	var s string
	if json.Unmarshal(bytes.Clone(quoted), &s) != nil {
		return quoted[1 : len(quoted)-1]
	}
	return []byte(s)
}

// EachID calls f with every id that the body names, in order. The body must be
// the one that was parsed. text is a part of it.
func (b Body) EachID(body []byte, f func(kind IDKind, text []byte)) {
	for _, id := range b.objects.ids {
		text := body[id.span.start:id.span.end]
		if b.form == nil {
			text = unquoteBytes(text)
		}
		f(id.kind, readID(id.kind, text))
	}
}

// TooManyIDs reports whether the body names more than MaxIDs ids. Further ids
// are not read.
func (b Body) TooManyIDs() bool { return len(b.objects.ids) > MaxIDs }

// HasIDs reports whether the body names an object.
func (b Body) HasIDs() bool { return len(b.objects.ids) > 0 }

// Readable reports whether EachID and OddID return all objects that the body
// names, because no server reads it differently. For example, servers in Go
// ignore the case of member names.
func (b Body) Readable(body []byte) bool {
	if b.form != nil {
		return b.Clear && b.Whole && !b.form.nested
	}
	if len(body) == 0 {
		return true
	}
	text := bytes.TrimPrefix(body, bom)
	if !b.Clear || !json.Valid(text) {
		return false
	}
	w := walker{body: text, grammar: inRequestOfAnyCase}
	w.value(skipSpace(text, 0), top, 0)
	return len(w.ids) == len(b.objects.ids) && (w.odd.end > 0) == (b.objects.odd.end > 0)
}

// OddID returns a text that stands where an id is expected, but does not look
// like one.
func (b Body) OddID(body []byte) (text []byte, ok bool) {
	if b.objects.odd.end == 0 {
		return nil, false
	}
	return body[b.objects.odd.start:b.objects.odd.end], true
}

// EachIDInReply calls f with every id in a JSON reply, or an event of a stream.
// stored reports whether the replying account stores the object. text is a part
// of reply. In a reply that was cut off, it finds the complete ids. In a
// response that is not stored, only encrypted contents count as stored, because
// they contain everything that is needed to use them.
func EachIDInReply(reply []byte, f func(kind IDKind, stored bool, text []byte)) (notStored bool) {
	w := walker{body: reply, grammar: inReply}
	w.value(skipSpace(reply, 0), top, 0)
	for _, id := range w.ids[:min(len(w.ids), MaxIDs)] {
		f(id.kind, id.kind == EncryptedContent || !w.notStored, unquoteBytes(reply[id.span.start:id.span.end]))
	}
	return w.notStored
}
