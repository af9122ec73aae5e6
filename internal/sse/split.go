package sse

import "bytes"

const (
	// MaxEvent is how much of an event's data is kept. A failed response
	// repeats the request's instructions and tools, and can be read up to this
	// size.
	MaxEvent = 64 << 10
	// maxName is how much of an event's name is kept. All names that matter are
	// shorter.
	maxName = 64
	// maxLine is how much of a line is kept if it arrives in several pieces.
	maxLine = MaxEvent + len("data: ") + len(bom)
)

const bom = "\xef\xbb\xbf"

// Event is one event of a stream. It is valid only during the call that passes
// it.
type Event struct {
	// Name is the value of the last "event" line, or empty.
	Name []byte
	// Data is the values of the "data" lines, joined by line feeds.
	Data []byte
	// Tail is the end of Data. No member before it is named "error" or has a
	// name that ends in "usage". A [Watcher] sets it, so that only the part of
	// an event is searched that differs from earlier events.
	Tail []byte
	// TooLong reports whether Data is only the first MaxEvent bytes of the
	// data. [Splitter.Long] was called with all of the data.
	TooLong bool
}

// Splitter cuts a stream into its events. The zero Splitter is at the beginning
// of a stream. It gets the stream in pieces of any size.
//
// Lines end with LF, CRLF or CR. Comments and unknown fields are skipped.
// "data:" needs no space after it, and an event without data does not count
// (WHATWG HTML, "Server-sent events").
//
// Every streamed token passes through a Splitter, so it is made to cost little.
// It searches each byte only once for LF and once for CR. It does not copy an
// event that lies within one piece: its Data is a part of that piece. Lines and
// events that continue in the next piece are kept in buffers of limited size.
type Splitter struct {
	// Long, if it is set, is called with the data of an event that is longer
	// than MaxEvent: first with the beginning that is kept, then with the rest,
	// in pieces as they arrive.
	Long func(data []byte)

	begun bool // the first line was read, and with it the byte order mark
	gotCR bool // a line feed that comes next is the rest of a line's end

	partial    kept // the beginning of a line that has not ended
	inLongLine bool // the beginning of the line was read already, because the line is so long
	inData     bool // that is a data line

	inEvent    bool // a line of an event that has not ended was read
	begin, end int  // where the event lies in the piece
	name       [maxName]byte
	named      int    // how much of name is used
	hasAny     bool   // the event has a data line
	data       []byte // the data so far, in the current piece, in partial or in joined
	joined     kept   // the data that does not lie in one place
	long       bool   // there was more data than is kept
}

// Split reads the next piece of the stream and calls each with every event that
// ends in it. The piece may be reused as soon as Split returns.
func (s *Splitter) Split(piece []byte, each func(Event)) {
	at := 0
	if s.gotCR && len(piece) > 0 {
		s.gotCR = false
		if piece[0] == '\n' {
			at = 1
		}
	}
	// The next LF and the next CR, or len(piece) without one. Both are
	// remembered, so that a piece full of one is not searched for the other
	// again and again.
	lf, cr := -1, -1
	for {
		if lf < at {
			if at < len(piece) && piece[at] == '\n' { // the empty line after an event's data
				lf = at
			} else {
				lf = indexFrom(piece, at, '\n')
			}
		}
		if cr < at {
			cr = indexFrom(piece, at, '\r')
		}
		end := min(lf, cr)
		if end == len(piece) {
			break
		}
		next := end + 1
		if end == cr {
			if next < len(piece) && piece[next] == '\n' {
				next++
			} else {
				s.gotCR = next == len(piece)
			}
		}
		if line := piece[at:end]; s.inLine() {
			s.keep(line)
			s.takePartial()
			s.inLongLine = false
		} else if len(line) > 0 {
			s.beginEvent(line, at)
			s.takeLine(line)
		} else {
			s.end = next
			s.endEvent(each)
		}
		at = next
	}
	if s.hasAny {
		s.joinData() // before partial, where it may lie, is written
	}
	if rest := piece[at:]; len(rest) > 0 {
		if !s.inLine() {
			s.beginEvent(rest, at)
		}
		s.keep(rest)
	}
	s.begin -= len(piece)
}

// End calls each with the last event if the stream ended without an empty line
// after it. SDKs read such an event as well.
func (s *Splitter) End(each func(Event)) {
	s.takePartial()
	s.inLongLine = false
	s.end = 0
	s.endEvent(each)
}

// Bounds returns the bytes of the piece that are the current event and the
// empty line after it. It may be called only while an event is passed. begin is
// negative if the event began in an earlier piece. Comments before the first
// line of an event are not part of it. If the piece ends with the CR of a CRLF,
// the LF is not counted.
func (s *Splitter) Bounds() (begin, end int) { return s.begin, s.end }

// Unfinished returns how many bytes of the stream so far belong to an event
// that has not ended.
func (s *Splitter) Unfinished() int {
	if !s.inEvent {
		return 0
	}
	return -s.begin
}

// inLine reports whether a line has begun in an earlier piece and not ended.
func (s *Splitter) inLine() bool { return len(s.partial.text) > 0 || s.inLongLine }

// beginEvent records that an event begins with this line of the piece. It does
// nothing within an event, or if the line is a comment.
func (s *Splitter) beginEvent(line []byte, at int) {
	if !s.inEvent && line[0] != ':' {
		s.inEvent, s.begin = true, at
	}
}

func indexFrom(b []byte, at int, c byte) int {
	if n := bytes.IndexByte(b[at:], c); n >= 0 {
		return at + n
	}
	return len(b)
}

// keep adds to the line that has not ended. If the line is too long to be kept,
// it reads the line's beginning, and then each further piece.
func (s *Splitter) keep(b []byte) {
	if !s.inLongLine {
		n := min(len(b), maxLine-len(s.partial.text))
		s.partial.add(b[:n])
		if b = b[n:]; len(b) == 0 {
			return
		}
		s.inData = false
		s.takePartial()
		s.inLongLine = true
	}
	if s.inData && len(b) > 0 {
		s.exceed(b)
	}
}

// takePartial reads the kept line, or its beginning.
func (s *Splitter) takePartial() {
	if len(s.partial.text) > 0 {
		s.takeLine(s.partial.text)
		s.partial.clear()
	}
}

func (s *Splitter) takeLine(line []byte) {
	if !s.begun {
		s.begun = true
		line = bytes.TrimPrefix(line, []byte(bom))
	}
	if value, ok := cutField(line, "data"); ok {
		s.inData = true
		s.takeData(value)
	} else if value, ok := cutField(line, "event"); ok {
		s.named = copy(s.name[:], value)
	}
}

// cutField returns the value of a line that has this field. A line without a
// colon is a field without a value.
func cutField(line []byte, field string) (value []byte, ok bool) {
	n := len(field)
	if len(line) < n || string(line[:n]) != field {
		return nil, false
	}
	if len(line) == n {
		return nil, true
	}
	if line[n] != ':' {
		return nil, false
	}
	if n++; len(line) > n && line[n] == ' ' {
		n++
	}
	return line[n:], true
}

func (s *Splitter) takeData(value []byte) {
	if !s.hasAny {
		s.hasAny = true
		s.data = value[:min(len(value), MaxEvent)]
		if len(value) > MaxEvent {
			s.exceed(value[MaxEvent:])
		}
		return
	}
	s.joinData()
	s.join(lineFeed)
	s.join(value)
}

var lineFeed = []byte("\n")

// join appends to the data in joined.
func (s *Splitter) join(b []byte) {
	n := min(len(b), MaxEvent-len(s.joined.text))
	s.joined.add(b[:n])
	s.data = s.joined.text
	if n < len(b) {
		s.exceed(b[n:])
	}
}

// exceed passes data that is not kept to Long.
func (s *Splitter) exceed(b []byte) {
	if s.Long != nil {
		if !s.long {
			s.Long(s.data)
		}
		s.Long(b)
	}
	s.long = true
}

// joinData copies the data to joined, unless it is there.
func (s *Splitter) joinData() {
	if len(s.joined.text) == 0 {
		s.joined.add(s.data)
		s.data = s.joined.text
	}
}

// endEvent passes the event on, unless it has no data, and prepares for the
// next one.
func (s *Splitter) endEvent(each func(Event)) {
	s.begun = true
	if len(s.data) > 0 {
		each(Event{Name: s.name[:s.named], Data: s.data, TooLong: s.long})
	}
	s.inEvent, s.named, s.hasAny, s.data, s.long = false, 0, false, nil, false
	s.joined.end()
	if len(s.partial.text) == 0 {
		s.partial.end()
	}
}
