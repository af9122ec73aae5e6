package openailb

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

// clientsOwnFaults are the codes with which the Responses API says that the
// request is at fault, of those that openai-python's ResponseError knows.
var clientsOwnFaults = []string{
	"invalid_prompt", "invalid_image", "invalid_image_format", "invalid_base64_image", "invalid_image_url", "image_too_large", "image_too_small",
	"image_parse_error", "image_content_policy_violation", "invalid_image_mode", "image_file_too_large", "unsupported_image_media_type",
	"empty_image_file", "failed_to_download_image", "image_file_not_found",
}

func failedResponse(code, padding string) string {
	return fmt.Sprintf(`{"id":"resp_1","object":"response","instructions":%q,"status":"failed","error":{"code":%q,"message":"no"},"metadata":{"x":%q}}`, padding, code, padding)
}

func failedEvent(code, padding string) string {
	return "event: response.failed\ndata: {\"type\":\"response.failed\",\"sequence_number\":3,\"response\":" + failedResponse(code, padding) + "}\n\n"
}

const (
	responsesPreamble = "event: response.created\ndata: {\"type\":\"response.created\"}\n\nevent: response.in_progress\ndata: {\"type\":\"response.in_progress\"}\n\n"
	responsesContent  = "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"Hello\"}\n\n"
)

// wantNobodyBlamed checks that no backend was benched, or its reply taken for
// broken.
func (w *world) wantNobodyBlamed() {
	w.t.Helper()
	for _, message := range []string{"backend benched", "reply broken"} {
		for _, entry := range w.logged(message) {
			w.t.Errorf("%s: %v", message, entry.ContextMap())
		}
	}
}

func (w *world) responses(body string) clientReply {
	return w.send(w.request(http.MethodPost, "/v1/responses", strings.NewReader(body)))
}

func TestTheClientsOwnFaultInA200IsPassedOn(t *testing.T) {
	long := strings.Repeat("x", 10_000)
	for _, code := range clientsOwnFaults {
		for name, c := range map[string]struct{ contentType, body string }{
			"whole":                     {"application/json", failedResponse(code, "")},
			"whole and long":            {"application/json", failedResponse(code, long)},
			"first in a stream":         {"text/event-stream", failedEvent(code, "")},
			"after the preamble":        {"text/event-stream", responsesPreamble + failedEvent(code, "")},
			"after the preamble, long":  {"text/event-stream", responsesPreamble + failedEvent(code, long)},
			"after content":             {"text/event-stream", responsesPreamble + responsesContent + failedEvent(code, "")},
			"after content, long":       {"text/event-stream", responsesPreamble + responsesContent + failedEvent(code, long)},
			"after content, and longer": {"text/event-stream", responsesContent + failedEvent(code, strings.Repeat(long, 10))},
		} {
			inBubble(t, threeInOrder, func(t *testing.T, w *world) {
				w.backends["a"].replies(says(200, c.body, "Content-Type", c.contentType))
				for range 2 {
					reply := w.responses(fmt.Sprintf(`{"model":"gpt-4o","stream":%v}`, c.contentType != "application/json"))
					if reply.err != nil || reply.status != 200 || reply.body != c.body {
						t.Errorf("%s %s: client got %d %.200s (%v), want the reply as it was", code, name, reply.status, reply.body, reply.err)
					}
				}
				w.wantCalls(map[string]int{"a": 2, "b": 0, "c": 0})
				w.wantNobodyBlamed()
			})
		}
	}
}

func TestTheBackendsFaultInA200StaysItsOwn(t *testing.T) {
	for _, code := range []string{"server_error", "rate_limit_exceeded", "vector_store_timeout"} {
		inBubble(t, threeInOrder, func(t *testing.T, w *world) {
			w.backends["a"].replies(says(200, failedResponse(code, "")))
			w.responses(`{"model":"gpt-4o"}`).wantServed(t, "b")
			if n := len(w.logged("backend benched")); n != 1 {
				t.Errorf("%s: %d benches, want 1", code, n)
			}
		})
	}
}

func TestAnErrorThatIsNoneBlamesNobody(t *testing.T) {
	chunk := func(value string) string {
		return strings.Replace(streamContent, `{"choices"`, `{"error":`+value+`,"choices"`, 1)
	}
	for _, value := range []string{`""`, `false`, `{}`, `null`, `0`, `[]`, ` {} `, `" "`} {
		last := strings.Replace(streamContent, `}]}`, `}],"error":`+value+`}`, 1)
		for name, stream := range map[string]string{
			"first":                   chunk(value) + chunk(value) + streamEnd,
			"first, after a preamble": streamPreamble + chunk(value) + chunk(value) + streamEnd,
			"last":                    last + last + streamEnd,
			"without content":         "data: {\"error\":" + value + "}\n\n" + streamContent + "data: {\"error\":" + value + "}\n\n" + streamEnd,
		} {
			inBubble(t, threeInOrder, func(t *testing.T, w *world) {
				w.backends["a"].replies(streams(stream))
				if reply := w.stream(); reply.body != stream || reply.err != nil || reply.backend != "a" {
					t.Errorf("%s, %s: client got %q of %q (%v)", value, name, reply.body, reply.backend, reply.err)
				}
				w.wantNobodyBlamed()
			})
		}
		inBubble(t, threeInOrder, func(t *testing.T, w *world) {
			whole := `{"id":"chatcmpl-1","error":` + value + `,"choices":[{"message":{"content":"Hello"}}]}`
			w.backends["a"].replies(says(200, whole))
			if reply := w.post(`{}`); reply.body != whole || reply.backend != "a" {
				t.Errorf("%s: client got %q of %q", value, reply.body, reply.backend)
			}
			w.wantNobodyBlamed()
		})
	}
}

func TestAnErrorAfterContentIsSeenWhereverItStands(t *testing.T) {
	const failure = `"error":{"message":"busy","type":"server_error","code":"server_is_overloaded"}`
	for event, blames := range map[string]bool{
		"data: {" + failure + "}\n\n":                                                                 true,
		"data: {\"id\":\"x\",\"choices\":[]," + failure + "}\n\n":                                     true,
		"data:{\"id\":\"x\",\"object\":\"chat.completion.chunk\"," + failure + ",\"usage\":null}\n\n": true,
		"data: { \"id\" : \"x\" , " + strings.Replace(failure, ":", " : ", 1) + "}\r\n\r\n":           true,
		"data: {\"user\":\"" + strings.Repeat("x", 3000) + "\"," + failure + "}\n\n":                  true,
		// it is another's error, or only told of
		"data: {\"choices\":[{\"delta\":{\"content\":\"x\"}," + failure + "}]}\n\n":                                false,
		"data: {\"choices\":[{\"delta\":{\"content\":\"{" + strings.ReplaceAll(failure, `"`, `\"`) + "}\"}}]}\n\n": false,
		": {" + failure + "}\n\n": false,
		"data: {\"id\":\"x\",\"error\":{\"type\":\"invalid_request_error\",\"code\":\"content_filter\"}}\n\n": false,
	} {
		inBubble(t, threeInOrder, func(t *testing.T, w *world) {
			stream := streamPreamble + streamContent + event + streamEnd
			w.backends["a"].replies(streams(streamPreamble+streamContent, time.Second, event, streamEnd))
			if reply := w.stream(); reply.body != stream {
				t.Errorf("%q: client got %q (%v)", event, reply.body, reply.err)
			}
			if n := len(w.logged("backend benched")); blames != (n == 1) {
				t.Errorf("%.150q: %d benches, want one: %v", event, n, blames)
			}
			w.wantCalls(map[string]int{"b": 0, "c": 0})
		})
	}
}

// sendsHeaders begins a stream without a byte of it.
func sendsHeaders(after, silence time.Duration, then ...any) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-time.After(after):
			streams(append([]any{silence}, then...)...)(w, r)
		case <-r.Context().Done():
		}
	}
}

func TestAStreamWithoutAByteInTimeIsFailedOver(t *testing.T) {
	for _, c := range []struct {
		name           string
		options        string
		after, silence time.Duration
		want           time.Duration // when b is asked; 0: never
	}{
		{"headers and then nothing", "", 0, time.Hour, 2 * time.Minute},
		{"late headers and then nothing", "", 90 * time.Second, time.Hour, 2 * time.Minute},
		{"nothing at all", "", time.Hour, 0, 2 * time.Minute},
		{"late headers, and a byte in time", "", 100 * time.Second, 19 * time.Second, 0},
		{"a byte just in time", "", 0, 119 * time.Second, 0},
		{"a limit of its own", "stream_first_event_timeout 30s", 10 * time.Second, time.Hour, 30 * time.Second},
		{"a longer limit", "stream_first_event_timeout 10m\nstream_idle_timeout 1m", 0, 9 * time.Minute, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			inBubble(t, poolOf("a b", "lb_policy first\n"+c.options), func(t *testing.T, w *world) {
				w.backends["a"].replies(sendsHeaders(c.after, c.silence, streamContent, streamEnd))
				w.backends["b"].replies(streams(streamContent, streamEnd))
				start := time.Now()
				reply := w.stream()
				if c.want == 0 {
					reply.wantServed(t, "a")
					w.wantNobodyBlamed()
					return
				}
				reply.wantServed(t, "b")
				if waited := time.Since(start); waited != c.want {
					t.Errorf("b was asked after %s, want %s", waited, c.want)
				}
				if benches := w.logged("backend benched"); len(benches) != 1 || benches[0].ContextMap()["class"] != "timeout" || benches[0].ContextMap()["model"] != "gpt-4o" {
					t.Errorf("benches %v, want one of a's model, for timeout", benches)
				}
				w.wantReady()
			})
		})
	}
}

func TestAPoolWithoutAByteInTimeIsATimeout(t *testing.T) {
	inBubble(t, poolOf("a b", ""), func(t *testing.T, w *world) {
		w.allReply(sendsHeaders(0, time.Hour))
		w.stream().wantError(t, 504, "upstream_timeout")
	})
}

func TestAModelThatThinksIsNotFailedOver(t *testing.T) {
	for name, pieces := range map[string][]any{
		"after a comment":       {": thinking\n\n", 299 * time.Second, streamContent, streamEnd},
		"after a byte":          {":", 299 * time.Second, " x\n\n", streamContent, streamEnd},
		"after the preamble":    {streamPreamble, 299 * time.Second, streamContent, streamEnd},
		"with a sign of life":   {119 * time.Second, ": x\n\n", 4 * time.Minute, ": x\n\n", 4 * time.Minute, ": x\n\n", 4 * time.Minute, streamContent, streamEnd},
		"in the middle":         {streamContent, 299 * time.Second, streamContent, streamEnd},
		"after a long preamble": {strings.Repeat(streamPreamble, 1000), 299 * time.Second, streamContent, streamEnd},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, poolOf("a b", "lb_policy first"), func(t *testing.T, w *world) {
				w.backends["a"].replies(streams(pieces...))
				reply := w.stream()
				reply.wantServed(t, "a")
				if !strings.HasSuffix(reply.body, streamContent+streamEnd) {
					t.Errorf("client got %.100q", reply.body)
				}
				w.wantCalls(map[string]int{"a": 1, "b": 0})
				w.wantNobodyBlamed()
			})
		})
	}
}

func TestAStreamThatStallsForFiveMinutesIsBroken(t *testing.T) {
	inBubble(t, poolOf("a", ""), func(t *testing.T, w *world) {
		w.backends["a"].replies(streams(streamContent, time.Hour))
		start := time.Now()
		events := w.open(t)
		if _, err := io.ReadAll(events.res.Body); err == nil || time.Since(start) != 5*time.Minute {
			t.Errorf("after %s the client got %v, want a broken stream after 5m", time.Since(start), err)
		}
	})
}
