package usage

import (
	"bytes"
	"encoding/binary"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// maxName is the length of the longest member name that matters.
const maxName = len("cache_creation_input_tokens")

// maxDigits is how many digits a count may have, so that sums of counts do not
// overflow.
const maxDigits = 15

// scanner finds the usage in one JSON text, which comes in pieces of any size.
// It is a state machine that follows only the objects that lead to the counts,
// and skips all other values. In a text that is not JSON, it stops at the first
// byte that it cannot read.
type scanner struct {
	inEvent bool
	// found has the counts of this text and of the texts before it.
	found counts
	// tier is the latest service tier in these texts, or empty.
	tier string

	// path is the way from the root to the object whose members are being read.
	path   [4]node
	level  int // how much of path is used
	member node
	state  state
	depth  int  // how many objects and lists are open in the value that is skipped
	slash  bool // an escape is not complete

	current counts        // of the usage that is read
	name    [maxName]byte // a name, or the text of a service tier
	named   int           // its length, of which only maxName bytes are kept
	number  int64
	digits  int // -1 if the number has anything but digits
}

type state uint8

const (
	begins state = iota
	wantsMember
	inName
	inTier
	wantsColon
	wantsValue
	inScalar
	inString
	skips
	ended
)

// begin prepares the scanner for the next text.
func (s *scanner) begin() {
	s.level, s.depth, s.slash, s.state = 0, 0, false, begins
}

// scanFrom scans a whole text from its usage on, because the usage is one of
// the last members of a reply. If the service tier is not after the usage, it
// scans for it separately. It reports whether it found the usage. If not, the
// whole text must be scanned.
func (s *scanner) scanFrom(text []byte) bool {
	if !bytes.HasPrefix(bytes.TrimLeft(text, whiteSpace), []byte("{")) {
		return false
	}
	at := indexString(text, nameEnd, len(nameEnd))
	if at < 0 {
		return false
	}
	s.enter(root)
	rest := s.scan(text[at:])
	whole := s.level == 0 && len(bytes.TrimLeft(rest, whiteSpace)) == 0 // no other object was open
	if whole && (s.tier != "" || !s.found.hasOutput() || s.scanTier(text[:at])) {
		return true
	}
	*s = scanner{inEvent: s.inEvent}
	return false
}

// scanTier scans the text before the usage, from the service tier on. It
// reports true if the tier is in the same object as the usage, or does not
// exist. Otherwise, the whole text must be scanned.
func (s *scanner) scanTier(text []byte) bool {
	at := indexString(text, tierEnd, len(tierName))
	if at < 0 {
		return true
	}
	var before scanner
	before.enter(root)
	before.scan(text[at:])
	s.tier = before.tier
	return before.level == 1 && before.state == wantsMember
}

// indexString returns the index of the first string with this length and this
// end, or -1.
func indexString(text, end []byte, length int) int {
	before := length - len(end) + 1 // how many bytes the quote comes before the end
	for at := 0; ; at += len(end) {
		n := bytes.Index(text[at:], end)
		if n < 0 {
			return -1
		}
		// A quote within a string has a backslash before it. So this quote
		// begins a string, and the one in end ends it.
		if at += n; at > before && text[at-before] == '"' && text[at-before-1] != '\\' {
			return at - before
		}
	}
}

// scan reads the next piece of the text. It returns the bytes after the end of
// the text.
func (s *scanner) scan(p []byte) (rest []byte) {
	for len(p) > 0 && s.state != ended {
		switch s.state {
		case inString:
			_, p, _ = s.readString(p)
		case skips:
			p = s.skip(p)
		case inName, inTier:
			p = s.readKept(p)
		case inScalar:
			p = s.readScalar(p)
		default:
			if c := p[0]; c != ' ' && c != '\n' && c != '\r' && c != '\t' {
				s.structure(c)
			}
			p = p[1:]
		}
	}
	return p
}

// structure reads a byte between names and values. After a scalar, this is the
// byte that ends it.
func (s *scanner) structure(c byte) {
	switch {
	case s.state == begins && c == '{':
		s.enter(root)
	case s.state == begins && (c == 0xef || c == 0xbb || c == 0xbf): // a byte order mark
	case s.state == wantsMember && c == '"':
		s.state, s.named = inName, 0
	case s.state == wantsMember && c == ',':
	case s.state == wantsMember && c == '}':
		s.leave()
	case s.state == wantsColon && c == ':':
		s.state = wantsValue
	case s.state == wantsValue:
		s.beginValue(c)
	default:
		s.state = ended
	}
}

func (s *scanner) beginValue(c byte) {
	switch {
	case c == '{' && s.member.isObject():
		s.enter(s.member)
	case c == '{' || c == '[':
		s.state, s.depth = skips, 1
	case c == '"' && s.member == tier:
		s.state, s.named = inTier, 0
	case c == '"':
		s.state = inString
	default:
		s.state, s.number, s.digits = inScalar, 0, 0
		s.takeDigit(c)
	}
}

func (s *scanner) enter(n node) {
	if n == object {
		s.current = counts{}
	}
	s.path[s.level] = n
	s.level++
	s.state = wantsMember
}

func (s *scanner) leave() {
	s.level--
	if s.path[s.level] == object {
		s.found.add(&s.current)
	}
	if s.level == 0 {
		s.state = ended
	}
}

// leftRoot reports whether the text is an object that has ended.
func (s *scanner) leftRoot() bool { return s.level == 0 && s.path[0] == root && s.state == ended }

// isOpen reports whether the text is an object that has begun and not ended.
func (s *scanner) isOpen() bool { return s.state != begins && s.state != ended }

// readKept reads a string whose text matters, up to its closing quote: a
// member's name, or a service tier.
func (s *scanner) readKept(p []byte) []byte {
	reads := s.state
	text, rest, ends := s.readString(p)
	if s.named < maxName {
		copy(s.name[s.named:], text)
	}
	s.named = min(s.named+len(text), maxName+1)
	switch {
	case !ends:
	case reads == inTier:
		s.takeTier()
	default:
		s.member = nowhere
		if s.named <= maxName {
			s.member = s.path[s.level-1].child(s.name[:s.named], s.inEvent)
		}
		s.state = wantsColon
	}
	return rest
}

func (s *scanner) takeTier() {
	if s.named > 0 {
		s.tier = openaiapi.TierName(string(s.name[:min(s.named, maxName)]))
	}
}

// readScalar reads a number or a word, up to the byte after it.
func (s *scanner) readScalar(p []byte) []byte {
	for i, c := range p {
		switch c {
		case ',', '}', ']', ' ', '\n', '\r', '\t':
			if s.member >= firstCount && s.digits > 0 && s.digits <= maxDigits {
				s.current.set(s.member, s.number)
			}
			s.state = wantsMember
			return p[i:]
		}
		s.takeDigit(c)
	}
	return nil
}

func (s *scanner) takeDigit(c byte) {
	if s.digits < 0 || c < '0' || c > '9' {
		s.digits = -1
		return
	}
	if s.digits <= maxDigits {
		s.digits++
		s.number = s.number*10 + int64(c-'0')
	}
}

// readString reads the rest of a string. At its end, it changes the state.
func (s *scanner) readString(p []byte) (text, rest []byte, ends bool) {
	if text, rest, ends = cutString(p, &s.slash); ends {
		s.state = wantsMember
		if s.depth > 0 {
			s.state = skips
		}
	}
	return text, rest, ends
}

// cutString cuts p at the end of the string in which p begins. slash reports
// whether the previous piece ended with an incomplete escape, and is then set
// for this piece.
func cutString(p []byte, slash *bool) (text, rest []byte, ends bool) {
	start := 0
	if *slash {
		start, *slash = 1, false
	}
	for at := start; ; at = start {
		n := bytes.IndexByte(p[at:], '"')
		end := at + n
		if n < 0 {
			end = len(p)
		}
		// A quote is escaped if an odd number of backslashes stands before it.
		first := end
		for first > start && p[first-1] == '\\' {
			first--
		}
		escaped := (end-first)%2 != 0
		switch {
		case n < 0:
			*slash = escaped
			return p, nil, false
		case !escaped:
			return p[:end], p[end+1:], true
		}
		start = end + 1
	}
}

// skip skips a value up to its next string or its end. It counts braces and
// brackets alike, and does not check that they match.
func (s *scanner) skip(p []byte) []byte {
	for i := 0; i < len(p); i++ {
		switch p[i] {
		case '"':
			s.state = inString
			return p[i+1:]
		case '{', '[':
			s.depth++
		case '}', ']':
			if s.depth--; s.depth == 0 {
				s.state = wantsMember
				return p[i+1:]
			}
		case ',':
			i += plain(p[i+1:])
		}
	}
	return nil
}

// plain returns how many bytes of p can be skipped at once, because they have
// no quote, brace or bracket. It is for embeddings, which are lists of
// thousands of numbers.
func plain(p []byte) (n int) {
	const ones, highs = 0x0101010101010101, 0x8080808080808080
	for ; len(p)-n >= 8; n += 8 {
		x := binary.LittleEndian.Uint64(p[n:])
		quotes := x ^ ones*'"'              // a zero byte for each quote
		braces := x&(ones*0xd9) ^ ones*0x59 // the bits that {}[] have in common, and hardly any other
		if ((quotes-ones)&^quotes|(braces-ones)&^braces)&highs != 0 {
			break
		}
	}
	return n
}
