package observe

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestTheAccessLogSaysHowAWebSocketEnded(t *testing.T) {
	const message, closeFrame = "\x81\x02hi", "\x88\x02\x03\xe8"
	for name, c := range map[string]struct {
		sends string // by the backend, before it ends its side, if ends is set
		ends  bool
		then  func(t *testing.T, client net.Conn, config string)
		class string
	}{
		"by the backend, with a close frame":    {message + closeFrame, true, nil, "served"},
		"by the backend, without a close frame": {message, true, nil, "broken_stream"},
		"by the backend, at once":               {"", true, nil, "broken_stream"},
		"by the client":                         {message, false, func(_ *testing.T, client net.Conn, _ string) { client.Close() }, "served"},
		"by a reload": {message, false, func(t *testing.T, _ net.Conn, config string) {
			lbtest.Reload(t, strings.Replace(config, "priority 1", "priority 2", 1))
		}, "served"},
	} {
		t.Run(name, func(t *testing.T) {
			if lbtest.Race && name == "by a reload" {
				t.Skip("Caddy has a data race where it writes the close frame")
			}
			a, server := lbtest.Listen(t, "a")
			a.Replies(func(w http.ResponseWriter, _ *http.Request) {
				conn, _, err := http.NewResponseController(w).Hijack()
				if err != nil {
					panic(err)
				}
				defer conn.Close()
				io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"+c.sends)
				if !c.ends {
					io.Copy(io.Discard, conn)
				}
			})
			file := filepath.Join(t.TempDir(), "access.log")
			port := lbtest.FreePort(t)
			config := fmt.Sprintf("{\nadmin off\ndefault_bind 127.0.0.1\n}\nhttp://:%d {\nlog {\noutput file %s\n}\nopenai_lb {\npool %s\nbackend %s {\npriority 1\n}\n}\n}",
				port, file, lbtest.Unique("sockets"), server.URL)
			lbtest.Run(t, config)
			client := lbtest.Dial(t, fmt.Sprintf("127.0.0.1:%d", port))
			io.WriteString(client, "GET /v1/realtime?model=m HTTP/1.1\r\nHost: lb\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"+
				"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n")
			replies := bufio.NewReader(client)
			if res, err := http.ReadResponse(replies, nil); err != nil || res.StatusCode != 101 {
				t.Fatal(res, err)
			}
			sent := make([]byte, len(c.sends))
			if _, err := io.ReadFull(replies, sent); err != nil || string(sent) != c.sends {
				t.Fatalf("the client reads %q (%v)", sent, err)
			}
			if c.then != nil {
				c.then(t, client, config)
			} else {
				io.Copy(io.Discard, replies)
				client.Close()
			}
			var line struct {
				Its struct{ Class, Backend string } `json:"openai_lb"`
			}
			lbtest.WaitFor(t, func() bool {
				text, _ := os.ReadFile(file)
				return json.Unmarshal(text, &line) == nil
			})
			if line.Its.Class != c.class {
				t.Errorf("it says %+v, want the class %s", line.Its, c.class)
			}
		})
	}
}
