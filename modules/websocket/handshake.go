package websocket

import (
	"bufio"
	"bytes"
	"crypto/sha1" //nolint:gosec // RFC 6455 section 4.2.2
	"encoding/base64"
	"io"
	"net"
	"net/http"
	"strings"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
)

// checkHandshake returns an error if the handshake of a client is not valid
// (RFC 6455 section 4.2.1). It is not used for handshakes that are passed to
// backends.
func checkHandshake(r *http.Request) error {
	key, err := base64.StdEncoding.DecodeString(r.Header.Get("Sec-WebSocket-Key"))
	switch {
	case !r.ProtoAtLeast(1, 1):
		return apierror.OldWebSocket
	case r.Header.Get("Sec-WebSocket-Version") != "13":
		return apierror.WrongWebSocketVersion
	case err != nil || len(key) != 16:
		return apierror.WrongWebSocketKey
	}
	return nil
}

// answerHandshake writes the balancer's own answer to a handshake into the
// header.
func answerHandshake(header http.Header, r *http.Request) {
	const guid = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11" // RFC 6455 section 1.3
	sum := sha1.Sum([]byte(r.Header.Get("Sec-WebSocket-Key") + guid))
	header["Upgrade"], header["Connection"] = []string{"websocket"}, []string{"Upgrade"}
	header["Sec-WebSocket-Accept"] = []string{base64.StdEncoding.EncodeToString(sum[:])}
	for protocol := range strings.SplitSeq(strings.Join(r.Header["Sec-Websocket-Protocol"], ","), ",") {
		if protocol = strings.TrimSpace(protocol); protocol != "" && !keys.IsCredentialProtocol(protocol) {
			header.Set("Sec-WebSocket-Protocol", protocol)
			return
		}
	}
}

// takeOver answers the handshake with the header of w, and hijacks the
// connection. The buffer it returns has the data that the client has already
// sent.
func takeOver(w http.ResponseWriter) (net.Conn, *bufio.ReadWriter, error) {
	w.WriteHeader(http.StatusSwitchingProtocols)
	conn, buffers, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return nil, nil, err
	}
	if err = buffers.Flush(); err != nil {
		conn.Close()
		return nil, nil, err
	}
	return conn, buffers, nil
}

// unread returns a reader of the buffered data, followed by the connection. The
// buffer can then be used for another reader.
func unread(from *bufio.Reader, conn io.Reader) io.Reader {
	n := from.Buffered()
	if n == 0 {
		return conn
	}
	early, _ := from.Peek(n)
	return io.MultiReader(bytes.NewReader(bytes.Clone(early)), conn)
}
