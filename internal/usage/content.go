package usage

import (
	"bytes"

	"github.com/openai-lb/caddy-openai-lb/internal/sse"
)

// bytesPerToken is how many bytes of content make about one token.
const bytesPerToken = 4

// content counts the bytes of a JSON text that a model has written. These are
// the string values of members for which isContent is true. The text comes in
// pieces of any size.
type content struct {
	length int64
	// name is the latest string that may be a member's name, and named its
	// length.
	name  [maxContentName]byte
	named int
	state contentState
	slash bool // an escape is not complete
}

type contentState uint8

const (
	outside  contentState = iota
	inText                // within a string that may be a name
	after                 // after it
	value                 // after the colon that follows a name of content
	inOutput              // within a string that counts
	inOther               // within a string that does not
	other                 // after the colon that follows any other name
)

const maxContentName = len("reasoning_content")

// isContent reports whether a model writes the strings with this name, in any
// of the APIs.
func isContent(name []byte) bool {
	switch string(name) {
	case "content", "text", "delta", "arguments", "refusal", "reasoning_content", "reasoning", "thinking",
		"partial_json", "transcript":
		return true
	}
	return false
}

func (c *content) count(p []byte) {
	for len(p) > 0 {
		switch c.state {
		case inText, inOutput, inOther:
			p = c.read(p)
		case outside:
			i := bytes.IndexByte(p, '"')
			if i < 0 {
				return
			}
			c.state, c.named, p = inText, 0, p[i+1:]
		default:
			p = c.readBetween(p)
		}
	}
}

// readBetween reads one byte after a string or a colon.
func (c *content) readBetween(p []byte) []byte {
	switch b := p[0]; {
	case b == ' ' || b == '\n' || b == '\r' || b == '\t':
	case b == ':' && c.state == after:
		if c.state = other; c.named <= maxContentName && isContent(c.name[:c.named]) {
			c.state = value
		}
	case b == '"' && c.state == value:
		c.state = inOutput
	case b == '"' && c.state == other:
		c.state = inOther
	default:
		c.state = outside
		if b == '"' {
			return p // a string in a list
		}
	}
	return p[1:]
}

func (c *content) read(p []byte) []byte {
	text, rest, ends := cutString(p, &c.slash)
	next := outside
	switch c.state {
	case inText:
		if c.named < maxContentName {
			copy(c.name[c.named:], text)
		}
		c.named = min(c.named+len(text), maxContentName+1)
		next = after
	case inOutput:
		c.length += int64(len(text))
	}
	if ends {
		c.state = next
	}
	return rest
}

// Spender records the output of a stream so far.
type Spender interface {
	Spend(output int64)
}

// step is the number of further tokens after which Spend is called again.
const step = 64

// CountContent makes the reader count the bytes of the reply's content, which
// give a lower bound of its tokens.
func (r *Reader) CountContent() {
	if r != nil {
		r.counts = true
	}
}

// FindID makes the reader find the id of the reply's own object, which comes
// before all other ids.
func (r *Reader) FindID() {
	if r != nil {
		r.finds = true
	}
}

// ID returns the id that FindID found, or an empty string.
func (r *Reader) ID() string {
	if r == nil {
		return ""
	}
	return r.id
}

func (r *Reader) findID(data []byte) {
	r.finds = false
	value, _ := sse.NextMember(data, idName)
	text, isText := bytes.CutPrefix(value, []byte(`"`))
	if id, _, whole := bytes.Cut(text, []byte(`"`)); isText && whole && len(id) <= longestID {
		r.id = string(id)
	}
}

// longestID is how long an id may be.
const longestID = 512

// Follow reports the output of a stream to the spender as it passes, once it is
// more than from tokens.
func (r *Reader) Follow(s Spender, from int64) {
	if r != nil && r.scanner.inEvent {
		r.spender, r.next = s, from+1
	}
}

// piece reads an event with a part of the content. It skips the data before the
// first "delta", which has only names and ids. The bytes of audio do not count,
// because a token of audio has hundreds of them.
func (r *Reader) piece(data []byte) {
	audio := false
	if i := bytes.Index(data, []byte(`"delta":`)); i > 0 {
		audio, data = bytes.Contains(data, []byte(`audio.delta"`)), data[i:]
	}
	if !audio {
		r.content.state, r.content.slash = outside, false
		r.content.count(data)
	}
	r.spend(r.written())
}

// written returns the fewest tokens that the content counted so far can have.
func (r *Reader) written() int64 {
	written := (r.content.length + bytesPerToken - 1) / bytesPerToken
	if r.watcher != nil {
		written = max(written, r.watcher.Pieces)
	}
	return written
}

func (r *Reader) spend(output int64) {
	if r.spender != nil && output >= r.next {
		r.spender.Spend(output)
		r.next = output + step
	}
}
