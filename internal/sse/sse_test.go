package sse

import (
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
		{"a comment", ": OPENROUTER PROCESSING\n\n", false, Preamble, 0, ""},
		{"a ping", "event: ping\ndata: {\"type\": \"ping\"}\n\n", false, Preamble, 0, ""},
		{"Azure's filter results", azurePreamble, false, Preamble, 0, ""},
		{"the role", azurePreamble + role, false, Preamble, 0, ""},
		{"content", azurePreamble + role + content, false, Content, 0, ""},
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
		{"an error over several lines", "data: {\"error\":\ndata: {\"code\":\"slow_down\"}}\n\n", false, Failure, 429, "{\"error\":{\"code\":\"slow_down\"}}"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, failure := Open([]byte(c.begin), c.atEnd)
			if got != c.want || (failure != nil) != (c.want == Failure) {
				t.Fatalf("it opens with %d, %v, want %d", got, failure, c.want)
			}
			if failure != nil && (failure.Status != c.status || string(failure.Body) != c.body) {
				t.Errorf("it stands for %d %s, want %d %s", failure.Status, failure.Body, c.status, c.body)
			}
			// more bytes never take back what was certain
			for n := range len(c.begin) {
				if early, _ := Open([]byte(c.begin[:n]), false); early != Preamble && early != c.want {
					t.Fatalf("after %d bytes it opened with %d", n, early)
				}
			}
		})
	}
}

func TestAWholeReplyIsAnErrorOnlyIfItSaysSo(t *testing.T) {
	for body, status := range map[string]int{
		`{"error":{"code":429,"message":"x"}}`:                                    429,
		`{"object":"error","error":{"type":"server_error"}}`:                      500,
		`{"object":"response","status":"failed","error":{"code":"server_error"}}`: 500,
		`{"object":"response","status":"completed","error":null}`:                 0,
		`{"object":"fine_tuning.job","error":{"code":null}}`:                      0,
		`{"choices":[{"message":{"content":"{\"error\":{}}"}}]}`:                  0,
		`{"object":"chat.completion"}`:                                            0,
		`{"error":`:                                                               0,
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
		{"event: error\ndata: {\"error\":{\"code\":429,\"message\":\"" + strings.Repeat("x", maxEvent) + "\"}}\n\n", 500}, // too long
	} {
		for size := range len(c.event) {
			var w Watcher
			w.Watch([]byte(content))
			w.Watch([]byte(c.event[:size]))
			w.Watch([]byte(c.event[size:]))
			w.Finish()
			if w.Failure == nil || w.Failure.Status != c.status {
				t.Fatalf("%.60q, cut after %d bytes: saw %v, want a %d", c.event, size, w.Failure, c.status)
			}
		}
	}
}

func FuzzOpen(f *testing.F) {
	f.Add([]byte(azurePreamble+role+content), 40)
	f.Add([]byte(created+"event: error\ndata: {\"error\":{}}\n\n"), 3)
	f.Add([]byte("data: [DONE]\r\n\r\n"), 13)
	f.Fuzz(func(t *testing.T, stream []byte, cut int) {
		whole, failure := Open(stream, false)
		if (failure != nil) != (whole == Failure) {
			t.Fatalf("%q opens with %d, %v", stream, whole, failure)
		}
		if cut >= 0 && cut < len(stream) {
			// a CR that ends what is there may be half of a line's end
			if early, _ := Open(stream[:cut], false); early != Preamble && early != whole && stream[cut-1] != '\r' {
				t.Fatalf("%q opens with %d, and %d bytes of it with %d", stream, whole, cut, early)
			}
		}
		var w Watcher
		w.Watch(stream)
		w.Finish()
	})
}
