package simulator

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
)

// realtimeClient is the client's side of a realtime session.
type realtimeClient struct {
	io.ReadWriteCloser
	header http.Header
}

// dialRealtime opens a session. It returns the reply if that is not a
// WebSocket.
func dialRealtime(t testing.TB, srv *httptest.Server, path string, headers ...string) (realtimeClient, *http.Response) {
	t.Helper()
	headers = append([]string{"Connection", "Upgrade", "Upgrade", "websocket", "Sec-WebSocket-Version", "13", "Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="}, headers...)
	res, err := roundTrip(srv, http.MethodGet, path, "", headers...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { res.Body.Close() })
	conn, ok := res.Body.(io.ReadWriteCloser)
	if res.StatusCode != http.StatusSwitchingProtocols || !ok {
		return realtimeClient{}, res
	}
	return realtimeClient{conn, res.Header}, res
}

// The opcodes of a text and of a close frame.
const (
	opcodeText  = 0x1
	opcodeClose = 0x8
)

// masked is a frame as clients send it.
func masked(opcode byte, payload string) []byte {
	mask := [4]byte{1, 2, 3, 4}
	frame := []byte{0x80 | opcode, 0x80 | byte(len(payload))}
	if len(payload) > 125 {
		frame = binary.BigEndian.AppendUint16([]byte{0x80 | opcode, 0x80 | 126}, uint16(len(payload)))
	}
	frame = append(frame, mask[:]...)
	for i := range len(payload) {
		frame = append(frame, payload[i]^mask[i%4])
	}
	return frame
}

func (c realtimeClient) say(t testing.TB, events ...string) {
	t.Helper()
	for _, event := range events {
		if _, err := c.Write(masked(opcodeText, event)); err != nil {
			t.Fatal(err)
		}
	}
}

// frame returns the server's next frame.
func (c realtimeClient) frame() (opcode byte, payload []byte, err error) {
	var head [2]byte
	if _, err := io.ReadFull(c, head[:]); err != nil {
		return 0, nil, err
	}
	length := uint64(head[1])
	if more := map[uint64]int{126: 2, 127: 8}[length]; more > 0 {
		var number [8]byte
		if _, err := io.ReadFull(c, number[8-more:]); err != nil {
			return 0, nil, err
		}
		length = binary.BigEndian.Uint64(number[:])
	}
	payload = make([]byte, length)
	_, err = io.ReadFull(c, payload)
	return head[0], payload, err
}

// until returns the events up to one of this type.
func (c realtimeClient) until(t testing.TB, last string) (types []string, events []map[string]any) {
	t.Helper()
	for {
		opcode, payload, err := c.frame()
		if err != nil || opcode != 0x80|opcodeText {
			t.Fatalf("after %v comes a frame %x of %q (%v)", types, opcode, payload, err)
		}
		var event map[string]any
		if err := json.Unmarshal(payload, &event); err != nil {
			t.Fatal(err)
		}
		types, events = append(types, event["type"].(string)), append(events, event)
		if event["type"] == last {
			return types, events
		}
	}
}

func TestARealtimeSessionAnswersTexts(t *testing.T) {
	srv := listen(t, &Handler{Name: "east", OutputTokens: 3, Deployments: []string{"gpt-realtime"}})
	added, delta := []string{"conversation.item.added", "conversation.item.done"}, "response.output_text."
	for path, headers := range map[string][]string{
		"/v1/realtime?model=gpt-realtime":                                         nil,
		"/openai/v1/realtime?model=gpt-realtime":                                  nil,
		"/openai/realtime?api-version=2024-10-01-preview&deployment=gpt-realtime": nil,
		"/v1/realtime?model=gpt-realtime&x=of-a-browser":                          {"Sec-WebSocket-Protocol", "openai-beta.realtime-v1, realtime"},
	} {
		t.Run(path, func(t *testing.T) {
			c, res := dialRealtime(t, srv, path, headers...)
			if c.ReadWriteCloser == nil {
				t.Fatalf("the handshake gives %d", res.StatusCode)
			}
			// RFC 6455 section 1.3
			if c.header.Get("Sec-WebSocket-Accept") != "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" || c.header.Get("X-Simulator") != "east" ||
				(c.header.Get("Sec-WebSocket-Protocol") == "realtime") != strings.HasSuffix(path, "browser") {
				t.Errorf("the handshake gives %v", c.header)
			}
			_, created := c.until(t, "session.created")
			if got := created[0]["session"].(map[string]any)["model"]; got != "gpt-realtime" {
				t.Errorf("the session has the model %v", got)
			}
			c.say(t, `{"type":"session.update","session":{"type":"realtime","instructions":"Be brief.","model":"other"}}`)
			_, updated := c.until(t, "session.updated")
			if got := updated[0]["session"].(map[string]any); got["instructions"] != "Be brief." || got["model"] != "gpt-realtime" {
				t.Errorf("the session is now %v", got)
			}
			c.say(t, `{"type":"conversation.item.create","item":{"type":"message","role":"user","content":[{"type":"input_text","text":"`+strings.Repeat("Hello. ", 20)+`"}]}}`)
			if types, _ := c.until(t, added[len(added)-1]); !slices.Equal(types, added) {
				t.Errorf("an item is followed by %v", types)
			}
			c.say(t, `{"type":"response.create"}`)
			types, events := c.until(t, "response.done")
			if want := []string{"response.created", "response.output_item.added", "response.content_part.added", delta + "delta", delta + "delta", delta + "delta",
				delta + "done", "response.content_part.done", "response.output_item.done", "response.done"}; !slices.Equal(types, want) {
				t.Errorf("a response has the events %v, want %v", types, want)
			}
			done := events[len(events)-1]["response"].(map[string]any)
			if usage := done["usage"].(map[string]any); done["status"] != "completed" || usage["input_tokens"] != 38.0 || usage["output_tokens"] != 3.0 {
				t.Errorf("the response is %v", done)
			}
			text := ""
			for _, event := range events {
				if more, ok := event["delta"].(string); ok {
					text += more
				}
			}
			if whole := events[6]["text"]; text != "This reply comes" || whole != text {
				t.Errorf("the text is %q and %q", text, whole)
			}
			for event, code := range map[string]string{
				`{`: "invalid_json", `{"type":"input_audio_buffer.append"}`: "invalid_value", `{"type":"conversation.item.create"}`: "missing_required_parameter",
			} {
				c.say(t, event)
				if _, events := c.until(t, "error"); events[0]["error"].(map[string]any)["code"] != code {
					t.Errorf("%s gives %v", event, events)
				}
			}
			c.say(t, `{"type":"response.create","response":{"max_output_tokens":1}}`)
			if _, events := c.until(t, "response.done"); events[len(events)-1]["response"].(map[string]any)["usage"].(map[string]any)["output_tokens"] != 1.0 {
				t.Errorf("a short response is %v", events[len(events)-1])
			}
			if _, err := c.Write(masked(opcodeClose, "\x03\xe8")); err != nil {
				t.Fatal(err)
			}
			if opcode, payload, err := c.frame(); err != nil || opcode != 0x80|opcodeClose || string(payload) != "\x03\xe8" {
				t.Errorf("a close frame is answered with %x %q (%v)", opcode, payload, err)
			}
			if rest, err := io.ReadAll(c); len(rest) > 0 || err != nil {
				t.Errorf("after it comes %q (%v)", rest, err)
			}
		})
	}
}

func TestARealtimeSessionIsRefused(t *testing.T) {
	srv := listen(t, &Handler{APIKey: []string{"key-of-the-simulator"}, Deployments: []string{"m"}, RequestsPerMinute: 12, AllowFaultHeader: true})
	key := []string{"Authorization", "Bearer key-of-the-simulator"}
	for name, c := range map[string]struct {
		path   string
		fault  string
		status int
	}{
		"without a model":        {"/v1/realtime", "", 400},
		"for another model":      {"/v1/realtime?model=other", "", 404},
		"without an api-version": {"/openai/realtime?deployment=m", "", 404},
		"by a status":            {"/v1/realtime?model=m", "status:401", 401},
		"by a 200":               {"/v1/realtime?model=m", "error_200", 200},
	} {
		t.Run(name, func(t *testing.T) {
			if _, res := dialRealtime(t, srv, c.path, append(key, "X-Simulator-Fault", c.fault)...); res.StatusCode != c.status {
				t.Errorf("got %d, want %d", res.StatusCode, c.status)
			}
		})
	}
	if _, res := dialRealtime(t, srv, "/v1/realtime?model=m"); res.StatusCode != 401 {
		t.Errorf("without a key, got %d", res.StatusCode)
	}
	if res, _ := call(t, srv, "GET", "/v1/realtime?model=m", "", key...); res.StatusCode != 426 || res.Header.Get("Upgrade") != "websocket" {
		t.Errorf("without an upgrade, got %d %v", res.StatusCode, res.Header)
	}
	if c, _ := dialRealtime(t, srv, "/v1/realtime?model=m", key...); c.ReadWriteCloser == nil {
		t.Error("the second request of two is refused")
	}
	if _, res := dialRealtime(t, srv, "/v1/realtime?model=m", key...); res.StatusCode != 429 || res.Header.Get("Retry-After-Ms") == "" {
		t.Errorf("the third request of two gets %d %v", res.StatusCode, res.Header)
	}
}

func TestARealtimeSessionHasTheLimitsOfItsDeployment(t *testing.T) {
	h := &Handler{TokensPerMinute: 40, OutputTokens: 4}
	srv := listen(t, h)
	c, _ := dialRealtime(t, srv, "/v1/realtime?model=m")
	for i, want := range []string{"completed", "completed", "failed"} {
		c.say(t, `{"type":"response.create"}`)
		_, events := c.until(t, "response.done")
		response := events[len(events)-1]["response"].(map[string]any)
		if response["status"] != want {
			t.Fatalf("response %d is %v, want it %s", i, response, want)
		}
		if want == "failed" {
			if code := response["status_details"].(map[string]any)["error"].(map[string]any)["code"]; code != "rate_limit_exceeded" {
				t.Errorf("it failed for %v", code)
			}
		}
	}
	if got := status(t, srv); got.Throttled.Tokens != 1 || got.Tokens.Output != 8 || got.Admitted != 1 {
		t.Errorf("the status is %+v", got)
	}
}

func TestAHandshakeCanSwitchToAnotherProtocol(t *testing.T) {
	srv := listen(t, &Handler{Fault: []Fault{{Action: "wrong_upgrade"}}})
	for range 2 {
		if _, res := dialRealtime(t, srv, "/v1/realtime?model=m"); res.StatusCode != 101 || res.Header.Get("Upgrade") != "foo" {
			t.Errorf("got %d %v", res.StatusCode, res.Header)
		}
	}
}

func TestARealtimeSessionEndsWithItsConfig(t *testing.T) {
	h := new(Handler)
	ctx, unload := caddy.NewContext(caddy.Context{Context: context.Background()})
	if err := h.Provision(ctx); err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { serve(h, w, r) }))
	t.Cleanup(srv.Close)
	var clients []realtimeClient
	for range 2 {
		c, _ := dialRealtime(t, srv, "/v1/realtime?model=m")
		c.until(t, "session.created")
		clients = append(clients, c)
	}
	unload()
	for i, c := range clients {
		if opcode, payload, err := c.frame(); err != nil || opcode != 0x80|opcodeClose || string(payload) != "\x03\xe9" {
			t.Errorf("session %d ends with a frame %x of %q (%v)", i, opcode, payload, err)
		}
	}
}

func TestResponsesComeOverAWebSocket(t *testing.T) {
	srv := listen(t, &Handler{OutputTokens: 3, Deployments: []string{"gpt-5"}})
	c, _ := dialRealtime(t, srv, "/v1/responses")
	c.say(t, `{"type":"response.create","model":"gpt-5","input":"hi"}`)
	_, events := c.until(t, "response.completed")
	response := events[len(events)-1]["response"].(map[string]any)
	if usage := response["usage"].(map[string]any); usage["output_tokens"] != 3.0 {
		t.Errorf("the response is %v", response)
	}
	c.say(t, `{"type":"response.create","model":"gpt-5","input":"hi","previous_response_id":"`+response["id"].(string)+`"}`)
	c.until(t, "response.completed")
	for message, want := range map[string]float64{
		`{"type":"response.create","model":"gpt-5","input":"hi","previous_response_id":"resp_unknown"}`: 400,
		`{"type":"response.create","model":"o3","input":"hi"}`:                                          404,
		`{"type":"response.create","input":"hi"}`:                                                       400,
		`{`: 400,
	} {
		c.say(t, message)
		if _, events := c.until(t, "error"); events[0]["status"] != want {
			t.Errorf("%s gets %v, want %v", message, events[0], want)
		}
	}
}
