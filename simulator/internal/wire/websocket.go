package wire

import (
	"bufio"
	"net"
	"net/http"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"
	"golang.org/x/net/websocket"
)

// closeGoingAway is the code of a close frame of a server that stops (RFC 6455
// section 7.4.1).
const closeGoingAway = 1001

// closeTimeout is how long a client may take to receive the close frame.
const closeTimeout = 2 * time.Second

// Socket is the server's side of a WebSocket. A message is what one frame
// holds.
type Socket struct {
	Messages <-chan []byte // of the client, until it leaves

	conn   *connection
	socket *websocket.Conn
	client *Client
	left   chan struct{} // closed when nothing more can be received
}

// connection is the connection below a WebSocket. Nothing is written during a
// silence.
type connection struct {
	net.Conn
	isSilent func() bool
}

func (c *connection) Write(p []byte) (int, error) {
	if c.isSilent() {
		return len(p), nil
	}
	return c.Conn.Write(p)
}

// AsksWebSocket reports whether r is the handshake of a WebSocket.
func AsksWebSocket(r *http.Request) bool {
	return r.ProtoMajor == 1 && strings.EqualFold(r.Header.Get("Upgrade"), "websocket") &&
		r.Header.Get("Sec-WebSocket-Version") == "13" &&
		r.Header.Get("Sec-WebSocket-Key") != "" && httpguts.HeaderValuesContainsToken(r.Header["Connection"], "upgrade")
}

// Socket opens a WebSocket, has it served, and closes it. It chooses the
// subprotocol if the client offers it.
func (c *Client) Socket(subprotocol string, serve func(*Socket)) {
	c.HangIfSilent()
	c.Status = http.StatusSwitchingProtocols
	opened := opening{c.w, &connection{isSilent: c.isSilent}}
	websocket.Server{
		Handshake: func(config *websocket.Config, r *http.Request) error {
			config.Header, config.Protocol = c.Header(), nil
			if httpguts.HeaderValuesContainsToken(r.Header["Sec-Websocket-Protocol"], subprotocol) {
				config.Protocol = []string{subprotocol}
			}
			return nil
		},
		Handler: func(socket *websocket.Conn) {
			messages, done := make(chan []byte), make(chan struct{})
			s := &Socket{Messages: messages, conn: opened.conn, socket: socket, client: c, left: make(chan struct{})}
			go s.listen(messages, done)
			defer socket.Close()
			defer close(done)
			serve(s)
		},
	}.ServeHTTP(opened, c.r)
}

// opening gives the server of the WebSocket its connection.
type opening struct {
	http.ResponseWriter
	conn *connection
}

// Hijack implements [http.Hijacker].
func (o opening) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, buffers, err := http.NewResponseController(o.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err
	}
	o.conn.Conn = conn
	return o.conn, bufio.NewReadWriter(buffers.Reader, bufio.NewWriter(o.conn)), nil
}

// listen passes the client's messages on until there are no more, or none is
// wanted.
func (s *Socket) listen(messages chan<- []byte, done <-chan struct{}) {
	defer close(messages)
	defer close(s.left)
	for {
		var message []byte
		if websocket.Message.Receive(s.socket, &message) != nil {
			return
		}
		select {
		case messages <- message:
		case <-done:
			return
		}
	}
}

// Send sends a message. It reports whether the WebSocket is still open.
func (s *Socket) Send(v any) bool {
	if s.client.isSilent() {
		s.client.acted()
	}
	return websocket.Message.Send(s.socket, string(encode(v))) == nil
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
func (s *Socket) GoAway() {
	_ = s.conn.SetWriteDeadline(time.Now().Add(closeTimeout))
	_ = s.socket.WriteClose(closeGoingAway)
	s.conn.Close()
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
