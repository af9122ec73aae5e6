package wire

import (
	"bufio"
	"crypto/sha1" // #nosec G505 -- RFC 6455 has it
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/http/httpguts"
)

// The opcodes of frames (RFC 6455 section 5.2).
const (
	opcodeContinuation = 0x0
	opcodeText         = 0x1
	opcodeBinary       = 0x2
	opcodeClose        = 0x8
	opcodePing         = 0x9
	opcodePong         = 0xa
)

// The codes of close frames (RFC 6455 section 7.4.1).
const (
	closeNormal        = 1000
	closeGoingAway     = 1001
	closeProtocolError = 1002
	closeUnsupported   = 1003
	closeTooBig        = 1009
)

const (
	// maxMessage is the longest message that a client may send.
	maxMessage = 16 << 20
	// maxControl is the longest payload of a control frame.
	maxControl = 125
	// closeTimeout is how long a client may take to take the close frame.
	closeTimeout = 2 * time.Second
)

// closeError ends a WebSocket with this code.
type closeError uint16

func (e closeError) Error() string {
	return fmt.Sprintf("the WebSocket is closed with code %d", uint16(e))
}

// Socket is the server's side of a WebSocket. One goroutine may read while others
// write.
type Socket struct {
	Messages <-chan []byte // of the client, until it leaves

	conn   net.Conn
	reader *bufio.Reader

	mu     sync.Mutex // guards writing
	closed bool       // a close frame was sent

	client *Client
	sent   int           // messages so far
	left   chan struct{} // closed when nothing more can be received
	over   chan struct{} // closed when nothing more is wanted
}

// acceptKey proves to the client that the handshake was understood (RFC 6455 section 1.3).
func acceptKey(key string) string {
	sum := sha1.Sum([]byte(key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11")) // #nosec G401
	return base64.StdEncoding.EncodeToString(sum[:])
}

// AsksWebSocket reports whether r is the handshake of a WebSocket.
func AsksWebSocket(r *http.Request) bool {
	return r.ProtoMajor == 1 && strings.EqualFold(r.Header.Get("Upgrade"), "websocket") && r.Header.Get("Sec-WebSocket-Version") == "13" &&
		r.Header.Get("Sec-WebSocket-Key") != "" && httpguts.HeaderValuesContainsToken(r.Header["Connection"], "upgrade")
}

// Accept opens the WebSocket. It chooses the subprotocol if the client offers it.
func (c *Client) Accept(subprotocol string) *Socket {
	hdr := c.Header()
	hdr.Set("Upgrade", "websocket")
	hdr.Set("Connection", "Upgrade")
	hdr["Sec-WebSocket-Accept"] = []string{acceptKey(c.r.Header.Get("Sec-WebSocket-Key"))}
	if httpguts.HeaderValuesContainsToken(c.r.Header["Sec-Websocket-Protocol"], subprotocol) {
		hdr["Sec-WebSocket-Protocol"] = []string{subprotocol}
	}
	c.sendHeader(http.StatusSwitchingProtocols)
	conn, rw, err := http.NewResponseController(c.w).Hijack()
	if err != nil {
		c.abort()
	}
	if err := rw.Flush(); err != nil {
		conn.Close()
		c.abort()
	}
	messages := make(chan []byte)
	s := &Socket{Messages: messages, conn: conn, reader: rw.Reader, client: c, left: make(chan struct{}), over: make(chan struct{})}
	go s.listen(messages)
	return s
}

// listen passes the client's messages on until there are no more, or the WebSocket is closed.
func (s *Socket) listen(messages chan<- []byte) {
	defer close(messages)
	defer close(s.left)
	for {
		message, err := s.receive()
		if code, ok := errors.AsType[closeError](err); ok { // the client can still be told
			s.sendClose(uint16(code))
		}
		if err != nil {
			return
		}
		select {
		case messages <- message:
		case <-s.over:
			return
		}
	}
}

// Send sends a message, and applies the fault before it. It reports whether the
// WebSocket is still open.
func (s *Socket) Send(v any) bool {
	if s.disturb() {
		return false
	}
	if s.client.isSilent() {
		s.client.acted()
	}
	s.sent++
	return s.send(opcodeText, encode(v)) == nil
}

// disturb applies the fault if its message is the next one. It reports whether the
// WebSocket has ended.
func (s *Socket) disturb() bool {
	if s.sent != s.client.Fault.n {
		return false
	}
	switch s.client.Fault.kind {
	case faultTruncateRST:
		s.client.acted()
		s.reset()
	case faultTruncateEOF:
		s.client.acted()
		s.conn.Close()
	case faultHangAfter:
		s.client.acted()
		<-s.left
	default:
		return false
	}
	return true
}

// Wait waits for d. It reports whether the client is still connected.
func (s *Socket) Wait(d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-s.left:
		s.client.Cancelled = true
	}
	return false
}

// GoAway closes the WebSocket because its server stops.
func (s *Socket) GoAway() { s.sendClose(closeGoingAway) }

// Close ends the WebSocket.
func (s *Socket) Close() {
	close(s.over)
	s.sendClose(closeNormal)
}

// receive returns the next text. It answers pings, and a close frame, whose error is a
// closeError, as is that of a client that breaks the rules.
func (s *Socket) receive() ([]byte, error) {
	var message []byte
	begun := false
	for {
		opcode, final, payload, err := s.frame(maxMessage - len(message))
		if err != nil {
			return nil, err
		}
		switch opcode {
		case opcodeText, opcodeContinuation:
			if begun != (opcode == opcodeContinuation) {
				return nil, closeError(closeProtocolError)
			}
			begun = true
			if message = append(message, payload...); final {
				return message, nil
			}
		case opcodeBinary:
			return nil, closeError(closeUnsupported)
		case opcodePing:
			if err := s.send(opcodePong, payload); err != nil {
				return nil, err
			}
		case opcodePong:
		case opcodeClose:
			if len(payload) >= 2 {
				return nil, closeError(binary.BigEndian.Uint16(payload))
			}
			return nil, closeError(closeNormal)
		default:
			return nil, closeError(closeProtocolError)
		}
	}
}

// frame reads a frame with a payload of up to limit bytes (RFC 6455 section 5.2).
func (s *Socket) frame(limit int) (opcode byte, final bool, payload []byte, err error) {
	var head [8]byte
	if _, err = io.ReadFull(s.reader, head[:2]); err != nil {
		return 0, false, nil, err
	}
	opcode, final = head[0]&0x0f, head[0]&0x80 != 0
	length := uint64(head[1] & 0x7f)
	// extensions were not agreed upon, and clients mask
	if head[0]&0x70 != 0 || head[1]&0x80 == 0 || opcode >= opcodeClose && (!final || length > maxControl) {
		return 0, false, nil, closeError(closeProtocolError)
	}
	if more := map[uint64]int{126: 2, 127: 8}[length]; more > 0 {
		if _, err = io.ReadFull(s.reader, head[8-more:]); err != nil {
			return 0, false, nil, err
		}
		clear(head[:8-more])
		length = binary.BigEndian.Uint64(head[:])
	}
	if opcode < opcodeClose && length > uint64(max(0, limit)) {
		return 0, false, nil, closeError(closeTooBig)
	}
	var mask [4]byte
	if _, err = io.ReadFull(s.reader, mask[:]); err != nil {
		return 0, false, nil, err
	}
	// what is not there yet takes no memory
	if payload, err = io.ReadAll(io.LimitReader(s.reader, int64(length))); err != nil {
		return 0, false, nil, err
	}
	if uint64(len(payload)) < length {
		return 0, false, nil, io.ErrUnexpectedEOF
	}
	for i := range payload {
		payload[i] ^= mask[i%4]
	}
	return opcode, final, payload, nil
}

// send sends a frame, unless the WebSocket is closed.
func (s *Socket) send(opcode byte, payload []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return net.ErrClosed
	}
	if s.client.isSilent() {
		return nil
	}
	s.closed = opcode == opcodeClose
	frame := make([]byte, 0, len(payload)+10)
	frame = append(frame, 0x80|opcode)
	switch n := len(payload); {
	case n <= maxControl:
		frame = append(frame, byte(n))
	case n <= 0xffff:
		frame = binary.BigEndian.AppendUint16(append(frame, 126), uint16(n)) // #nosec G115 -- it is checked
	default:
		frame = binary.BigEndian.AppendUint64(append(frame, 127), uint64(n)) // #nosec G115 -- a length is not negative
	}
	_, err := s.conn.Write(append(frame, payload...))
	return err
}

// sendClose sends a close frame and closes the connection.
func (s *Socket) sendClose(code uint16) {
	_ = s.conn.SetWriteDeadline(time.Now().Add(closeTimeout))
	_ = s.send(opcodeClose, binary.BigEndian.AppendUint16(nil, code))
	s.conn.Close()
}

// reset breaks the connection, so that the client reads an error.
func (s *Socket) reset() {
	conn := s.conn
	if secured, ok := conn.(interface{ NetConn() net.Conn }); ok {
		conn = secured.NetConn()
	}
	if tcp, ok := conn.(interface{ SetLinger(int) error }); ok {
		_ = tcp.SetLinger(0)
	}
	conn.Close()
}

// switchWrongly answers with a 101 to another protocol than the requested one.
func (c *Client) switchWrongly() {
	conn, rw, err := http.NewResponseController(c.w).Hijack()
	if err != nil {
		c.abort()
	}
	defer conn.Close()
	c.Status = http.StatusSwitchingProtocols
	_, _ = rw.WriteString("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: foo\r\n\r\n")
	_ = rw.Flush()
	c.abort()
}
