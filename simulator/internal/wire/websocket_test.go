package wire

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"
)

// masked is a frame as clients send it.
func masked(opcode byte, payload string) []byte {
	mask := [4]byte{1, 2, 3, 4}
	frame := []byte{0x80 | opcode, 0x80 | byte(len(payload))}
	switch {
	case len(payload) > 0xffff:
		frame = binary.BigEndian.AppendUint64([]byte{0x80 | opcode, 0x80 | 127}, uint64(len(payload)))
	case len(payload) > maxControl:
		frame = binary.BigEndian.AppendUint16([]byte{0x80 | opcode, 0x80 | 126}, uint16(len(payload)))
	}
	frame = append(frame, mask[:]...)
	for i := range len(payload) {
		frame = append(frame, payload[i]^mask[i%4])
	}
	return frame
}

// rules are frames, and the code with which the socket ends after them.
var badFrames = map[string]struct {
	frames string
	code   uint16
}{
	"no mask":                    {"\x81\x02hi", closeProtocolError},
	"a reserved bit":             {"\xc1\x80abcd", closeProtocolError},
	"an unknown opcode":          {"\x83\x80abcd", closeProtocolError},
	"an unknown control":         {"\x8b\x80abcd", closeProtocolError},
	"a control in pieces":        {"\x09\x80abcd", closeProtocolError},
	"a long control":             {"\x89\xfe\x00\x80abcd", closeProtocolError},
	"a continuation of nothing":  {"\x80\x80abcd", closeProtocolError},
	"a text within a text":       {"\x01\x80abcd\x81\x80abcd", closeProtocolError},
	"binary data":                {"\x82\x80abcd", closeUnsupported},
	"a long text":                {"\x81\xff\x00\x00\x00\x00\x01\x00\x00\x01abcd", closeTooBig},
	"a length without an end":    {"\x81\xff\xff\xff\xff\xff\xff\xff\xff\xffabcd", closeTooBig},
	"a text that grows too long": {"\x01\x81abcdx\x80\xff\x00\x00\x00\x00\x01\x00\x00\x00abcd", closeTooBig},
	"a close frame":              {string(masked(opcodeClose, "\x03\xe9")), closeGoingAway},
	"an empty close frame":       {string(masked(opcodeClose, "")), closeNormal},
}

// reading is a socket that reads these bytes.
func reading(sent []byte) (*Socket, *bytes.Buffer) {
	var written bytes.Buffer
	return &Socket{conn: recorder{&written}, client: &Client{isSilent: func() bool { return false }}, reader: bufio.NewReader(bytes.NewReader(sent))}, &written
}

// recorder keeps what is written.
type recorder struct{ *bytes.Buffer }

func (recorder) Close() error                     { return nil }
func (recorder) LocalAddr() net.Addr              { return nil }
func (recorder) RemoteAddr() net.Addr             { return nil }
func (recorder) SetDeadline(time.Time) error      { return nil }
func (recorder) SetReadDeadline(time.Time) error  { return nil }
func (recorder) SetWriteDeadline(time.Time) error { return nil }

func TestASocketKeepsTheRules(t *testing.T) {
	for name, c := range badFrames {
		s, _ := reading([]byte(c.frames))
		if message, err := s.receive(); message != nil || err != error(closeError(c.code)) {
			t.Errorf("%s: got %q and %v, want %v", name, message, err, closeError(c.code))
		}
	}
	long := strings.Repeat("x", 70_000)
	pieces := slices.Concat(masked(opcodePong, "?"), []byte("\x01\x81\x00\x00\x00\x00a"), masked(opcodePing, "ping"), []byte("\x00\x80\x00\x00\x00\x00"),
		masked(opcodeContinuation, "b"), masked(opcodeText, long), masked(opcodeText, long[:200]))
	s, written := reading(pieces)
	for _, want := range []string{"ab", long, long[:200]} {
		if got, err := s.receive(); string(got) != want || err != nil {
			t.Errorf("got %d bytes (%v), want %d", len(got), err, len(want))
		}
	}
	if got := written.String(); got != "\x8a\x04ping" {
		t.Errorf("a ping is answered with %q", got)
	}
	if _, err := s.receive(); !errors.Is(err, io.EOF) {
		t.Errorf("the end is %v", err)
	}
}

// FuzzSocket reads whatever a client sends, which is never more than it has sent.
func FuzzSocket(f *testing.F) {
	for _, c := range badFrames {
		f.Add([]byte(c.frames))
	}
	f.Add(slices.Concat(masked(opcodeText, "text"), masked(opcodePing, "ping"), masked(opcodeText, strings.Repeat("x", 300))))
	f.Fuzz(func(t *testing.T, sent []byte) {
		s, written := reading(sent)
		total := 0
		for {
			message, err := s.receive()
			if total += len(message); err != nil {
				break
			}
		}
		if total > len(sent) || written.Len() > len(sent) {
			t.Errorf("of %d bytes, %d are read and %d answered", len(sent), total, written.Len())
		}
	})
}
