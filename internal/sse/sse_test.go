package sse

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
)

const (
	azurePreamble = "data: {\"choices\":[],\"created\":0,\"id\":\"\",\"model\":\"\",\"object\":\"\",\"prompt_filter_results\":[{\"prompt_index\":0}]}\n\n"
	role          = "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n"
	content       = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"Hi\"},\"finish_reason\":null}]}\n\n"
	created       = "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"resp_1\",\"error\":null}}\n\n"
	inProgress    = "event: response.in_progress\ndata: {\"type\":\"response.in_progress\",\"response\":{\"id\":\"resp_1\",\"error\":null}}\n\n"
)

// open returns what a stream that begins with these bytes opens with, and its
// error if that is a Failure. Only whole events count, unless the stream ends
// with the bytes (atEnd).
func open(begin []byte, atEnd bool) (Opening, *Error) {
	var w Watcher
	w.Watch(begin)
	if atEnd {
		w.Finish()
	}
	if w.Opening != Failure {
		return w.Opening, nil
	}
	return w.Opening, w.Failure
}

func TestWhatAStreamOpensWith(t *testing.T) {
	for _, c := range []struct {
		name   string
		begin  string
		atEnd  bool
		want   Opening
		status int
		body   string
	}{
		{"nothing yet", "", false, Preamble, 0, ""},
		{"nothing at all", "", true, Preamble, 0, ""},
		{"half an event", "data: {\"choices\":[{\"del", false, Preamble, 0, ""},
		{"an event without its blank line", strings.TrimSuffix(content, "\n\n"), false, Preamble, 0, ""},
		{"a last event without its blank line", strings.TrimSuffix(content, "\n\n"), true, Content, 0, ""},
		{"a last event that breaks off in its JSON", "data: {\"choices\":[{\"del", true, Preamble, 0, ""},
		{"a last event that is text", "data: so", true, Content, 0, ""},
		{"a comment", ": OPENROUTER PROCESSING\n\n", false, Preamble, 0, ""},
		{"a ping", "event: ping\ndata: {\"type\": \"ping\"}\n\n", false, Preamble, 0, ""},
		{"Azure's filter results", azurePreamble, false, Preamble, 0, ""},
		{"the role", azurePreamble + role, false, Preamble, 0, ""},
		{"content", azurePreamble + role + content, false, Content, 0, ""},
		{"content that is white space", `data: {"choices":[{"index":0,"delta":{"content":" "}}]}` + "\n\n", false, Preamble, 0, ""},
		{"content in a chunk with an error", `data: {"error":{"code":"server_error"},"choices":[{"index":0,"delta":{"content":"so"}}]}` + "\n\n", false, Failure, 500, `{"error":{"code":"server_error"}}`},
		{"content with CRLF", strings.ReplaceAll(role+content, "\n", "\r\n"), false, Content, 0, ""},
		{"content with CR", strings.ReplaceAll(role+content, "\n", "\r"), false, Content, 0, ""},
		{"content without spaces", strings.ReplaceAll(content, "data: ", "data:"), false, Content, 0, ""},
		{"content after a byte order mark", "\ufeff" + content, false, Content, 0, ""},
		{"a tool call", "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"index\":0}]}}]}\n\n", false, Content, 0, ""},
		{"a refusal", "data: {\"choices\":[{\"delta\":{\"refusal\":\"no\"}}]}\n\n", false, Content, 0, ""},
		{"an answer that is only finished", "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"content_filter\"}]}\n\n", false, Content, 0, ""},
		{"a completion's text", "data: {\"choices\":[{\"text\":\"x\",\"finish_reason\":null}]}\n\n", false, Content, 0, ""},
		{"usage alone", "data: {\"choices\":[],\"usage\":{\"total_tokens\":1}}\n\n", false, Content, 0, ""},
		{"responses being made", created + inProgress, false, Preamble, 0, ""},
		{"a response's first item", created + inProgress + "event: response.output_item.added\ndata: {\"type\":\"response.output_item.added\"}\n\n", false, Content, 0, ""},
		{"what is not known", "data: hello\n\n", false, Content, 0, ""},
		{"a null error", "data: {\"error\":null,\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n", false, Content, 0, ""},
		{"an end without anything", "data: [DONE]\n\n", false, End, 0, ""},
		{"an end after the preamble", azurePreamble + role + "data: [DONE]\n\n", false, End, 0, ""},
		{"chat's error", "data: {\"error\":{\"message\":\"sorry\",\"type\":\"server_error\",\"param\":null,\"code\":null}}\n\n", false, Failure, 500, `{"error":{"message":"sorry","type":"server_error","param":null,"code":null}}`},
		{"an error after the preamble", azurePreamble + "data: {\"error\":{\"code\":\"rate_limit_exceeded\"}}\n\n", false, Failure, 429, `{"error":{"code":"rate_limit_exceeded"}}`},
		{"Azure's no_capacity", "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"too_many_requests\",\"code\":\"no_capacity\",\"message\":\"x\"},\"sequence_number\":1}\n\n", false, Failure, 429, `{"error":{"type":"too_many_requests","code":"no_capacity","message":"x"}}`},
		{"an error event with its fields at the top", "event: error\ndata: {\"type\":\"error\",\"code\":\"server_error\",\"message\":\"x\"}\n\n", false, Failure, 500, `{"error":{"type":"error","code":"server_error","message":"x"}}`},
		{"a failed response", created + "event: response.failed\ndata: {\"type\":\"response.failed\",\"response\":{\"status\":\"failed\",\"error\":{\"code\":\"server_is_overloaded\",\"message\":\"x\"}}}\n\n", false, Failure, 503, `{"error":{"code":"server_is_overloaded","message":"x"}}`},
		{"a failed response that gives no reason", "event: response.failed\ndata: {\"type\":\"response.failed\",\"response\":{\"error\":null}}\n\n", false, Failure, 500, `{"error":{"message":"The backend's stream failed.","type":"server_error","param":null,"code":null}}`},
		{"Azure's user_error", "data: {\"error\":{\"type\":\"user_error\"}}\n\n", false, Failure, 400, `{"error":{"type":"user_error"}}`},
		{"Azure's forbidden", "data: {\"error\":{\"type\":\"forbidden\"}}\n\n", false, Failure, 403, `{"error":{"type":"forbidden"}}`},
		{"a numeric code", "data: {\"error\":{\"code\":529,\"message\":\"x\"}}\n\n", false, Failure, 529, `{"error":{"code":529,"message":"x"}}`},
		{"a number as a string", "data: {\"error\":{\"code\":\"429\"}}\n\n", false, Failure, 429, `{"error":{"code":"429"}}`},
		{"an error that is a string", "data: {\"error\":\"broken\"}\n\n", false, Failure, 500, `{"error":"broken"}`},
		{"an error event that is plain text", "event: error\ndata: oops\n\n", false, Failure, 500, `{"error":{"message":"The backend's stream failed.","type":"server_error","param":null,"code":null}}`},
		{"an error event of a type of its own", "event: error\ndata: {\"type\":\"server_error\",\"message\":\"x\"}\n\n", false, Failure, 500, `{"error":{"type":"server_error","message":"x"}}`},
		{"an error event that only its data names", "data: {\"message\":\"x\",\"code\":\"slow_down\",\"type\":\"error\"}\n\n", false, Failure, 429, `{"error":{"message":"x","code":"slow_down","type":"error"}}`},
		{"a failed response that only its data names", "event: message\ndata: {\"sequence_number\":1,\"type\":\"response.failed\",\"response\":{\"error\":{\"code\":\"invalid_prompt\"}}}\n\n", false, Failure, 400, `{"error":{"code":"invalid_prompt"}}`},
		{"an error that is not the first member", "data: {\"id\":\"\",\"choices\":[],\"error\":{\"code\":503}}\n\n", false, Failure, 503, `{"error":{"code":503}}`},
		{"an error too long to be read", "event: error\ndata: {\"error\":{\"message\":\"" + strings.Repeat("x", MaxEvent) + "\"}}\n\n", false, Content, 0, ""},
		{"a response with long instructions", "event: response.created\ndata: {\"instructions\":\"" + strings.Repeat("x", MaxEvent) + "\"}\n\n", false, Preamble, 0, ""},
		{"an event without data", "event: error\n\n", false, Preamble, 0, ""},
		{"an empty string for an error", "data: {\"error\":\"\",\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n", false, Content, 0, ""},
		{"a filter that could not be asked", "data: {\"choices\":[{\"delta\":{\"content\":\"x\"},\"content_filter_results\":{\"error\":{\"code\":\"content_filter_error\"}}}]}\n\n", false, Content, 0, ""},
		{"an error over several lines", "data: {\"error\":\ndata: {\"code\":\"slow_down\"}}\n\n", false, Failure, 429, "{\"error\":{\"code\":\"slow_down\"}}"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, failure := open([]byte(c.begin), c.atEnd)
			if got != c.want || (failure != nil) != (c.want == Failure) {
				t.Fatalf("it opens with %d, %v, want %d", got, failure, c.want)
			}
			if failure != nil && (failure.Status != c.status || string(failure.Body) != c.body) {
				t.Errorf("it stands for %d %s, want %d %s", failure.Status, failure.Body, c.status, c.body)
			}
			if len(c.begin) > 1<<12 {
				return
			}
			// more bytes never take back what was certain
			for n := range len(c.begin) {
				if early, _ := open([]byte(c.begin[:n]), false); early != Preamble && early != c.want {
					t.Fatalf("after %d bytes it opened with %d", n, early)
				}
			}
		})
	}
}

func TestAWholeReplyIsAnErrorOnlyIfItSaysSo(t *testing.T) {
	for body, status := range map[string]int{
		`{"error":{"code":429,"message":"x"}}`:                                     429,
		`{"object":"error","error":{"type":"server_error"}}`:                       500,
		`{"object":"response","status":"failed","error":{"code":"server_error"}}`:  500,
		`{"object":"response","status":"completed","error":null}`:                  0,
		`{"object":"fine_tuning.job","error":{"code":null}}`:                       0,
		`{"choices":[{"message":{"content":"{\"error\":{}}"}}]}`:                   0,
		`{"object":"chat.completion"}`:                                             0,
		`{"error":`:                                                                0,
		`{"object":"response","status":"failed","error":{"code":"invalid_image"}}`: 400,
		`{"object":"chat.completion","error":{"code":"x"}}`:                        0,
		`{"id":"x","error" : "broken"}`:                                            500,
		`{"error":""}`:                                                             0,
		`{"error":[]}`:                                                             0,
		`{"error":{ }}`:                                                            0,
		`{"error":0}`:                                                              0,
		`{"error":false,"choices":[]}`:                                             0,
		`{"choices":[{"error":{"code":"x"}}]}`:                                     0,
		`{"choices":[{"error":{"code":"x"}}],"error":{"code":"slow_down"}}`:        429,
		`["error"]`: 0,
	} {
		got := 0
		if e := Whole([]byte(body), true); e != nil {
			got = e.Status
		}
		if got != status {
			t.Errorf("%s stands for %d, want %d", body, got, status)
		}
	}
}

func TestAWatcherSeesErrorsAndEndsHoweverTheStreamIsSplit(t *testing.T) {
	for _, c := range []struct {
		name          string
		stream        string
		failed, ended bool
	}{
		{"a whole chat", role + content + "data: [DONE]\n\n", false, true},
		{"a chat cut off", role + content, false, false},
		{"a chat with an error", content + "data: {\"error\":{\"code\":\"x\"}}\n\n", true, false},
		{"a chat with an error after other members", content + "data: {\"id\":\"x\",\"choices\":[],\"error\" : {\"code\":\"x\"}}\n\n", true, false},
		{"a chat with an empty error in each chunk", content + "data: {\"error\":\"\",\"choices\":[]}\n\ndata: {\"error\":{},\"choices\":[]}\n\ndata: {\"error\": false}\n\ndata: {\"error\":[]}\n\ndata: {\"error\":0}\n\ndata: {\"error\":{ }}\n\ndata: [DONE]\n\n", false, true},
		{"a chat whose filter could not be asked", content + "data: {\"choices\":[{\"content_filter_results\":{\"error\":{\"code\":\"content_filter_error\"}}}]}\n\n", false, false},
		{"a chat about errors", content + "data: {\"choices\":[{\"delta\":{\"content\":\"{\\\"error\\\":{\\\"code\\\":500}}\"}}]}\n\ndata: {\"choices\":[{\"delta\":{\"content\":\"error\"}}]}\n\n", false, false},
		{"a tool whose argument is an error", content + "data: {\"type\":\"response.output_item.done\",\"item\":{\"type\":\"mcp_call\",\"error\":\"refused\"}}\n\n", false, false},
		{"a chat with lone CRs", strings.ReplaceAll(role+content, "\n", "\r") + "data: [DONE]\r\r", false, true},
		{"a failed response with lone CRs", strings.ReplaceAll(created+content, "\n", "\r") + "event: response.failed\rdata: {}\r\r", true, true},
		{"lines that end in every way", created + "event: response.created\rdata: {}\r\n\r" + content + "event: response.completed\r\ndata: {}\n\r\n", false, true},
		{"a response that only its data names", created + content + "data: {\"type\": \"response.completed\"}\n\n", false, true},
		{"a response without a name that failed", created + content + "data: {\"sequence_number\":3,\"type\":\"response.failed\",\"response\":{\"error\":{\"code\":\"server_error\"}}}\n\n", true, false},
		{"a response of more than is kept", created + content + "event: response.completed\ndata: {\"error\":{\"x\":\"" + strings.Repeat("y", MaxEvent) + "\"}}\n\n", false, true},
		{"a message of Anthropic's", "event: content_block_delta\ndata: {\"type\":\"content_block_delta\"}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n", false, true},
		{"a chat with a null error", content + "data: {\"error\":null,\"choices\":[]}\n\n", false, false},
		{"a response completed", created + "event: response.completed\ndata: {}\n\n", false, true},
		{"a response incomplete", created + "event: response.incomplete\r\ndata: {}\r\n\r\n", false, true},
		{"a response failed", created + "event: response.failed\ndata: {}\n\n", true, true},
		{"an error event", "event:error\ndata: {}\n\n", true, true},
		{"content that speaks of an error", "data: {\"choices\":[{\"delta\":{\"content\":\"event: error\"}}]}\n\n", false, false},
		{"a last line without an end", content + "data: [DONE]", false, true},
		{"a megabyte in one line", "data: {\"x\":\"" + strings.Repeat("y", 1<<20) + "\"}\n\ndata: [DONE]\n\n", false, true},
	} {
		for _, size := range []int{1 << 30, 4096, 7, 1} {
			if size == 1 && len(c.stream) > 1<<16 {
				continue
			}
			var w Watcher
			for rest := []byte(c.stream); len(rest) > 0; {
				n := min(size, len(rest))
				w.Watch(rest[:n])
				rest = rest[n:]
			}
			w.Finish()
			if (w.Failure != nil) != c.failed || w.Ended != c.ended {
				t.Errorf("%s, %d bytes at a time: failed %v and ended %v, want %v and %v", c.name, size, w.Failure, w.Ended, c.failed, c.ended)
			}
		}
	}
}

func TestAWatcherReadsTheErrorThatItSaw(t *testing.T) {
	for _, c := range []struct {
		event  string
		status int
	}{
		{"data: {\"error\":{\"code\":\"rate_limit_exceeded\"}}\n\n", 429},
		{"data: {\"error\":\r\ndata: {\"code\":\"slow_down\"}}\r\n\r\n", 429},
		{"id: 7\nevent: error\ndata: {\"type\":\"error\",\"code\":\"invalid_prompt\"}\n\n", 400},
		{"event: response.failed\ndata: {\"response\":{\"error\":{\"code\":\"server_is_overloaded\"}}}", 503},
		{"event: response.failed\ndata: {\"response\":{\"instructions\":\"" + strings.Repeat("x", 60<<10) + "\",\"error\":{\"code\":\"rate_limit_exceeded\"}}}\n\n", 429},
		{"event: error\ndata: {\"error\":{\"code\":429,\"message\":\"" + strings.Repeat("x", MaxEvent) + "\"}}\n\n", 0}, // it cannot be read
		{"data: {\"error\":{\"code\":429,\"message\":\"" + strings.Repeat("x", MaxEvent) + "\"}}\n\n", 0},
	} {
		for size := 0; size < len(c.event); size += 1 + len(c.event)/200 {
			var w Watcher
			w.Watch([]byte(content))
			w.Watch([]byte(c.event[:size]))
			w.Watch([]byte(c.event[size:]))
			w.Finish()
			status := 0
			if w.Failure != nil {
				status = w.Failure.Status
			}
			if status != c.status {
				t.Fatalf("%.60q, cut after %d bytes: saw %v, want a %d", c.event, size, w.Failure, c.status)
			}
		}
	}
}

// The codes of a failed response are those of openai-python's
// types/responses/response_error.py.
func TestWhoseFaultAFailedResponseIs(t *testing.T) {
	for code, status := range map[string]int{
		"server_error":                   500,
		"vector_store_timeout":           504,
		"rate_limit_exceeded":            429,
		"invalid_prompt":                 400,
		"invalid_image":                  400,
		"invalid_image_format":           400,
		"invalid_base64_image":           400,
		"invalid_image_url":              400,
		"invalid_image_mode":             400,
		"image_too_large":                400,
		"image_too_small":                400,
		"image_parse_error":              400,
		"image_content_policy_violation": 400,
		"image_file_too_large":           400,
		"image_file_not_found":           400,
		"unsupported_image_media_type":   400,
		"empty_image_file":               400,
		"failed_to_download_image":       400,

		// These are not on the list, but have been seen.
		"context_length_exceeded": 400,
		"content_filter":          400,
		"server_is_overloaded":    503,
		"slow_down":               429,
		"insufficient_quota":      429,
		"no word that we know":    500,
	} {
		response := `{"object":"response","status":"failed","error":{"code":"` + code + `","message":"x"}}`
		event := "event: response.failed\ndata: {\"type\":\"response.failed\",\"response\":" + response + "}\n\n"
		opening, first := open([]byte(created+event), false)
		if opening != Failure || first.Status != status {
			t.Errorf("%s: the stream opens with %d, %+v, want a %d", code, opening, first, status)
		}
		var w Watcher
		w.Watch([]byte(created + content + event))
		if w.Opening != Content || w.Failure == nil || w.Failure.Status != status {
			t.Errorf("%s: after content it is %+v, want a %d", code, w.Failure, status)
		}
		if e := Whole([]byte(response), true); e == nil || e.Status != status {
			t.Errorf("%s: a whole reply is %+v, want a %d", code, e, status)
		}
	}
}

func TestAWatcherShowsEveryEvent(t *testing.T) {
	var seen []string
	w := Watcher{Each: func(e Event) { seen = append(seen, string(e.Kind())+" "+string(e.Data)) }}
	w.Watch([]byte(created[:30]))
	w.Watch([]byte(created[30:] + "data: {\"usage\":{}}\r\rdata: [DO"))
	w.Watch([]byte("NE]"))
	w.Finish()
	want := []string{
		`response.created {"type":"response.created","response":{"id":"resp_1","error":null}}`,
		` {"usage":{}}`,
		` [DONE]`,
	}
	if !slices.Equal(seen, want) {
		t.Errorf("it showed %q, want %q", seen, want)
	}
}

func FuzzOpen(f *testing.F) {
	f.Add([]byte(azurePreamble+role+content), 40)
	f.Add([]byte(created+"event: error\ndata: {\"error\":{}}\n\n"), 3)
	f.Add([]byte("data: [DONE]\r\n\r\n"), 13)
	f.Add([]byte("data: {\"type\" : \"error\",\"error\" :\rdata: {\"code\":400}}\r\r"), 30)
	f.Fuzz(func(t *testing.T, stream []byte, cut int) {
		whole, failure := open(stream, false)
		if (failure != nil) != (whole == Failure) {
			t.Fatalf("%q opens with %d, %v", stream, whole, failure)
		}
		if failure != nil && (failure.Status < 400 || failure.Status > 599 || !json.Valid(failure.Body)) {
			t.Fatalf("%q fails with %d %s", stream, failure.Status, failure.Body)
		}
		if cut >= 0 && cut < len(stream) {
			if early, _ := open(stream[:cut], false); early != Preamble && early != whole {
				t.Fatalf("%q opens with %d, and %d bytes of it with %d", stream, whole, cut, early)
			}
		}
		if e := Whole(stream, true); e != nil && !json.Valid(e.Body) {
			t.Fatalf("%q is the error %s", stream, e.Body)
		}
	})
}

func TestAWatcherSaysWhetherAnErrorHasBegun(t *testing.T) {
	for stream, want := range map[string]bool{
		"":                                          false,
		content:                                     false,
		content + "data: {\"choices\":[{\"del":      false,
		content + "data: {\"error\":null,\"choi":    false,
		content + "data: {\"error\":{\"mess":        true,
		content + "data:{\"error\":\"no":            true,
		content + "event: error\n":                  true,
		content + "event: response.failed\ndata":    true,
		content + "data: {\"type\":\"error\",\"me":  true,
		content + "data: {\"error\":\ndata: {\"co":  true,
		content + "data: {\"error\":{}}\n":          false,
		content + "data: {\"error\":{\"x\":1}}\n":   true, // its empty line has yet to come
		content + "data: {\"error\":{\"x\":1}}\n\n": false,
		content + "data: {\"error\":{\"x\":\"" + strings.Repeat("x", MaxEvent+len(content)):  false, // it cannot be read
		content + "data: {\"choices\":[{\"delta\":{\"content\":\"{\\\"error\\\":{\\\"x\\\":": false,
	} {
		for size := range min(len(stream), len(content)) + 1 {
			var w Watcher
			w.Watch([]byte(stream[:size]))
			w.Watch([]byte(stream[size:]))
			if got := w.Failing(); got != want {
				t.Fatalf("%.80q, cut after %d bytes: %v, want %v", stream, size, got, want)
			}
		}
	}
}

func TestTheOpeningOfAResponseIsFoundWithoutDecodingIt(t *testing.T) {
	w, e := new(Watcher), Event{Data: []byte(`{"type":"response.completed","response":{"id":"resp_1","error":null,"output":[{"type":"message"}]}}`)}
	if n := testing.AllocsPerRun(100, func() { *w = Watcher{}; w.Take(e) }); n != 0 || w.Opening != Content || w.Failure != nil {
		t.Errorf("it allocates %v times, and is %d, %+v", n, w.Opening, w.Failure)
	}
}
