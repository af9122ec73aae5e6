package failover

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
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

func responses(w *lbtest.World, body string) lbtest.Reply {
	return w.Send(w.Request(http.MethodPost, "/v1/responses", strings.NewReader(body)))
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
			lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(lbtest.Says(200, c.body, "Content-Type", c.contentType))
				for range 2 {
					reply := responses(w, fmt.Sprintf(`{"model":"gpt-4o","stream":%v}`, c.contentType != "application/json"))
					if reply.Err != nil || reply.Status != 200 || reply.Body != c.body {
						t.Errorf("%s %s: client got %d %.200s (%v), want the reply as it was", code, name, reply.Status, reply.Body, reply.Err)
					}
				}
				w.WantCalls(map[string]int{"a": 2, "b": 0, "c": 0})
				w.WantNobodyBlamed()
			})
		}
	}
}

func TestTheBackendsFaultInA200StaysItsOwn(t *testing.T) {
	for _, code := range []string{"server_error", "rate_limit_exceeded", "vector_store_timeout"} {
		lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
			w.Backends["a"].Replies(lbtest.Says(200, failedResponse(code, "")))
			responses(w, `{"model":"gpt-4o"}`).WantServed(t, "b")
			if n := len(w.Logged("cooldown started")); n != 1 {
				t.Errorf("%s: %d cooldowns, want 1", code, n)
			}
		})
	}
}

func TestAnErrorThatIsNoneBlamesNobody(t *testing.T) {
	chunk := func(value string) string {
		return strings.Replace(lbtest.StreamContent, `{"choices"`, `{"error":`+value+`,"choices"`, 1)
	}
	for _, value := range []string{`""`, `false`, `{}`, `null`, `0`, `[]`, ` {} `, `" "`} {
		last := strings.Replace(lbtest.StreamContent, `}]}`, `}],"error":`+value+`}`, 1)
		for name, stream := range map[string]string{
			"first":                   chunk(value) + chunk(value) + lbtest.StreamEnd,
			"first, after a preamble": lbtest.StreamPreamble + chunk(value) + chunk(value) + lbtest.StreamEnd,
			"last":                    last + last + lbtest.StreamEnd,
			"without content":         "data: {\"error\":" + value + "}\n\n" + lbtest.StreamContent + "data: {\"error\":" + value + "}\n\n" + lbtest.StreamEnd,
		} {
			lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(lbtest.Streams(stream))
				if reply := w.PostStream(); reply.Body != stream || reply.Err != nil || reply.Backend != "a" {
					t.Errorf("%s, %s: client got %q of %q (%v)", value, name, reply.Body, reply.Backend, reply.Err)
				}
				w.WantNobodyBlamed()
			})
		}
		lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
			whole := `{"id":"chatcmpl-1","error":` + value + `,"choices":[{"message":{"content":"Hello"}}]}`
			w.Backends["a"].Replies(lbtest.Says(200, whole))
			if reply := w.Post(`{}`); reply.Body != whole || reply.Backend != "a" {
				t.Errorf("%s: client got %q of %q", value, reply.Body, reply.Backend)
			}
			w.WantNobodyBlamed()
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
		lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
			stream := lbtest.StreamPreamble + lbtest.StreamContent + event + lbtest.StreamEnd
			w.Backends["a"].Replies(lbtest.Streams(lbtest.StreamPreamble+lbtest.StreamContent, time.Second, event, lbtest.StreamEnd))
			if reply := w.PostStream(); reply.Body != stream {
				t.Errorf("%q: client got %q (%v)", event, reply.Body, reply.Err)
			}
			if n := len(w.Logged("cooldown started")); blames != (n == 1) {
				t.Errorf("%.150q: %d cooldowns, want one: %v", event, n, blames)
			}
			w.WantCalls(map[string]int{"b": 0, "c": 0})
		})
	}
}

// sendsHeaders begins a stream without a byte of it.
func sendsHeaders(after, silence time.Duration, then ...any) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-time.After(after):
			lbtest.Streams(append([]any{silence}, then...)...)(w, r)
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
		{"headers and then nothing", "", 0, time.Hour, 5 * time.Minute},
		{"late headers and then nothing", "", 60 * time.Second, time.Hour, 5 * time.Minute},
		{"nothing at all", "", time.Hour, 0, 5 * time.Minute},
		{"late headers, and a byte in time", "", 270 * time.Second, 29 * time.Second, 0},
		{"a byte just in time", "", 0, 299 * time.Second, 0},
		{"a limit of its own", "stream_first_event_timeout 30s", 10 * time.Second, time.Hour, 30 * time.Second},
		{"a longer limit", "stream_first_event_timeout 10m\nstream_idle_timeout 1m", 0, 9 * time.Minute, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first\n"+c.options), func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(sendsHeaders(c.after, c.silence, lbtest.StreamContent, lbtest.StreamEnd))
				w.Backends["b"].Replies(lbtest.Streams(lbtest.StreamContent, lbtest.StreamEnd))
				start := time.Now()
				reply := w.PostStream()
				if c.want == 0 {
					reply.WantServed(t, "a")
					w.WantNobodyBlamed()
					return
				}
				reply.WantServed(t, "b")
				if waited := time.Since(start); waited != c.want {
					t.Errorf("b was asked after %s, want %s", waited, c.want)
				}
				if cooldowns := w.Logged("cooldown started"); len(cooldowns) != 1 || cooldowns[0].ContextMap()["class"] != "timeout" || cooldowns[0].ContextMap()["deployment"] != "gpt-4o" {
					t.Errorf("got the cooldowns %v, want one of a's model, for timeout", cooldowns)
				}
				w.WantReady()
			})
		})
	}
}

func TestAPoolWithoutAByteInTimeIsATimeout(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b", ""), func(t *testing.T, w *lbtest.World) {
		w.AllReply(sendsHeaders(0, time.Hour))
		w.PostStream().WantError(t, 504, "upstream_timeout")
	})
}

func TestAModelThatThinksIsNotFailedOver(t *testing.T) {
	for name, pieces := range map[string][]any{
		"after a comment":       {": thinking\n\n", 299 * time.Second, lbtest.StreamContent, lbtest.StreamEnd},
		"after a byte":          {":", 299 * time.Second, " x\n\n", lbtest.StreamContent, lbtest.StreamEnd},
		"after the preamble":    {lbtest.StreamPreamble, 299 * time.Second, lbtest.StreamContent, lbtest.StreamEnd},
		"with a sign of life":   {299 * time.Second, ": x\n\n", 290 * time.Second, ": x\n\n", 290 * time.Second, ": x\n\n", 290 * time.Second, lbtest.StreamContent, lbtest.StreamEnd},
		"in the middle":         {lbtest.StreamContent, 299 * time.Second, lbtest.StreamContent, lbtest.StreamEnd},
		"after a long preamble": {strings.Repeat(lbtest.StreamPreamble, 1000), 299 * time.Second, lbtest.StreamContent, lbtest.StreamEnd},
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(lbtest.Streams(pieces...))
				reply := w.PostStream()
				reply.WantServed(t, "a")
				if !strings.HasSuffix(reply.Body, lbtest.StreamContent+lbtest.StreamEnd) {
					t.Errorf("client got %.100q", reply.Body)
				}
				w.WantCalls(map[string]int{"a": 1, "b": 0})
				w.WantNobodyBlamed()
			})
		})
	}
}

func TestAStreamThatStallsForFiveMinutesIsBroken(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a", ""), func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Streams(lbtest.StreamContent, time.Hour))
		start := time.Now()
		events := w.Open(t)
		if _, err := io.ReadAll(events.Response.Body); err == nil || time.Since(start) != 5*time.Minute {
			t.Errorf("after %s the client got %v, want a broken stream after 5m", time.Since(start), err)
		}
	})
}

// An error has one meaning, whether it comes as a reply with its own status or
// inside a reply of status 200.
func TestAWordMeansTheSameInAnErrorAndInA200(t *testing.T) {
	for word, c := range map[string]struct {
		status int // of the error where it is a reply
		class  string
	}{
		"insufficient_quota":                {429, "quota"},
		"credit_balance_exhausted":          {429, "quota"},
		"billing_hard_limit_reached":        {429, "quota"},
		"exceeded_current_quota_error":      {429, "quota"},
		"enforced_spend_limit_reached":      {429, "quota"},
		"organization_usage_limit_exceeded": {429, "quota"},
		"team_spend_limit_exceeded":         {429, "quota"},
		"rate_limit_exceeded":               {429, "throttled"},
		"rate_limit_reached_error":          {429, "throttled"},
		"engine_overloaded_error":           {429, "overloaded"},
		"no_capacity":                       {429, "overloaded"},
		"server_is_overloaded":              {503, "overloaded"},
		"exceed_context_size_error":         {400, "too_large"},
		"content_policy_violation":          {403, "client_error"},
		"content_filter":                    {400, "client_error"},
		"missing_scope":                     {403, "not_permitted"},
		"invalid_api_key":                   {401, "credential"},
		"DeploymentNotFound":                {404, "no_model"},
		"server_error":                      {500, "failed"},
	} {
		body := `{"error":{"message":"no","type":"` + word + `","code":"` + word + `"}}`
		for form, reply := range map[string]http.HandlerFunc{
			"an error":             lbtest.Says(c.status, body),
			"a whole 200":          lbtest.Says(200, body),
			"a stream's beginning": lbtest.Streams(responsesPreamble, "data: "+body+"\n\n"),
		} {
			lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(reply)
				responses(w, `{"model":"gpt-4o"}`)
				got := w.Logged("attempt")[0].ContextMap()["class"]
				want := c.class
				if form != "an error" && want == "client_error" {
					want = "served" // it is passed on
				}
				if got != want {
					t.Errorf("%s as %s is %v, want %s", word, form, got, want)
				}
			})
		}
	}
}

// TestEchoesOfARequestAreNoContent has streams that repeat the instructions of
// the request, up to eight times, before an error comes. Whatever these are
// long, they are held back until it is known what comes after them.
func TestEchoesOfARequestAreNoContent(t *testing.T) {
	echo := func(kind string, length int) string {
		return fmt.Sprintf("event: %s\ndata: {\"type\":%q,\"response\":{\"id\":\"resp_1\",\"instructions\":%q}}\n\n", kind, kind, strings.Repeat("x", length))
	}
	overloaded := failedEvent("server_is_overloaded", strings.Repeat("x", 1000))
	capacity := "event: error\ndata: {\"type\":\"error\",\"error\":{\"message\":\"Selected model is at capacity. Please try a different model.\"}}\n\n"
	keepalive := "event: keepalive\ndata: {\"type\":\"keepalive\",\"sequence_number\":2}\n\n"
	// a failed response repeats the instructions, too, before or after its
	// error
	const failed, before, after = `"type":"response.failed"`, `"error":{"code":"server_is_overloaded","message":"no"},`, `,"error":{"code":"server_is_overloaded","message":"no"}`
	long := func(length int) string {
		return fmt.Sprintf(`"id":"resp_1","instructions":%q`, strings.Repeat("x", length))
	}
	data := func(text string) string { return "data: {" + text + "}\n\n" }
	for name, c := range map[string]struct {
		stream string
		want   string
	}{
		"a long failure":                   {"event: response.failed\n" + data(failed+`,"response":{`+before+long(100_000)+"}"), "b"},
		"a long failure without a name":    {data(failed + `,"response":{` + before + long(100_000) + "}"), "b"},
		"its error is at its end":          {echo("response.created", 1_000_000) + "event: response.failed\n" + data(failed+`,"response":{`+long(1_000_000)+after+"}"), "b"},
		"its type is at its end":           {"event: response.failed\n" + data(`"response":{`+long(100_000)+after+"},"+failed), "b"},
		"a long message":                   {data(`"error":{"code":503,"message":"` + strings.Repeat("x", 100_000) + `"}`), "b"},
		"a long failure of the client's":   {"event: response.failed\n" + data(failed+`,"response":{"error":{"code":"invalid_prompt","message":"no"},`+long(100_000)+"}"), "a"},
		"more of a failure than is held":   {"event: response.failed\n" + data(failed+`,"response":{`+before+long(9_000_000)+"}"), "a"},
		"an error inside of a long answer": {data(`"choices":[{"delta":{"content":"x","error":{"a":1}}}],"x":"`+strings.Repeat("x", 100_000)+`"`) + "data: [DONE]\n\n", "a"},
		"40 KB of instructions":            {echo("response.created", 40_000) + echo("response.in_progress", 40_000) + overloaded, "b"},
		"1 MB of instructions":             {echo("response.created", 1_000_000) + echo("response.in_progress", 1_000_000) + overloaded, "b"},
		"an error without a code":          {echo("response.created", 100_000) + keepalive + capacity, "b"},
		"signs of life":                    {strings.Repeat(keepalive, 5000) + overloaded, "b"},
		"more than is held":                {echo("response.created", 5_000_000) + echo("response.in_progress", 5_000_000) + overloaded, "a"},
		"an event of unknown kind":         {echo("response.created", 1000) + echo("response.strange", 100_000) + overloaded, "a"},
		"content after the echoes":         {echo("response.created", 1_000_000) + responsesContent + "event: response.completed\ndata: {\"type\":\"response.completed\"}\n\n", "a"},
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.InOrder("a b", ""), func(t *testing.T, w *lbtest.World) {
				for _, piece := range []int{1000, 70_000, 1 << 30} {
					var pieces []any
					for rest := c.stream; rest != ""; {
						n := min(piece, len(rest))
						pieces, rest = append(pieces, rest[:n]), rest[n:]
					}
					w.Backends["a"].Replies(lbtest.Streams(pieces...))
					reply := responses(w, `{"model":"gpt-4o","stream":true}`)
					if reply.Backend != c.want || c.want == "a" && reply.Body != c.stream {
						t.Errorf("in pieces of %d bytes, client got %d bytes of %s, want those of %s", piece, len(reply.Body), reply.Backend, c.want)
					}
					time.Sleep(time.Hour)
				}
			})
		})
	}
}

// TestAStreamOfResponsesWithoutItsEndIsCut, also if the backend has sent no end
// before.
func TestAStreamOfResponsesWithoutItsEndIsCut(t *testing.T) {
	for path, stream := range map[string]string{"/v1/responses": responsesPreamble + responsesContent, "/v1/messages": "event: content_block_delta\ndata: {\"type\":\"content_block_delta\"}\n\n"} {
		lbtest.InBubble(t, lbtest.PoolOf("a", ""), func(t *testing.T, w *lbtest.World) {
			w.Backends["a"].Replies(lbtest.Streams(stream))
			if reply := w.Send(w.Request(http.MethodPost, path, strings.NewReader(`{"model":"m","stream":true}`))); reply.Err == nil {
				t.Errorf("%s ends as if it were whole", path)
			}
		})
	}
}
