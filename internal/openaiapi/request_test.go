package openaiapi

import (
	"net/http/httptest"
	"strings"
	"testing"
)

// parse parses a request whose header has these names and values, of whose body
// this many bytes were received, or all of it if received is 0.
func parse(method, target, body string, received int, header ...string) Request {
	r := httptest.NewRequest(method, "http://h"+target, strings.NewReader(body))
	for i := 0; i < len(header); i += 2 {
		r.Header.Add(header[i], header[i+1])
	}
	whole := received == 0
	if whole {
		received = len(body)
	}
	return Parse(r, ParsePath(r.URL.EscapedPath()), Received{Bytes: []byte(body[:received]), Whole: whole, Length: int64(len(body))}, nil)
}

func TestWhatABackendDoesForARequest(t *testing.T) {
	handshake := []string{"Upgrade", "websocket", "Connection", "upgrade"}
	for _, c := range []struct {
		method, target string
		header         []string
		want           Kind
	}{
		{"POST", "/v1/chat/completions", nil, Inference},
		{"POST", "/openai/deployments/d/embeddings", nil, Inference},
		{"POST", "/v1/responses", nil, Inference},
		{"GET", "/v1/responses", handshake, InferenceWebSocket},
		{"GET", "/v1/realtime?model=m", handshake, InferenceWebSocket},
		{"GET", "/v1/else", handshake, WebSocket},
		{"POST", "/v1/files", handshake, Once},
		{"GET", "/v1/realtime", nil, Safe},
		{"HEAD", "/v1/files", nil, Safe},
		{"POST", "/v1/files", nil, Once},
		{"POST", "/v1/Chat/Completions", nil, Once},
		{"DELETE", "/v1/files/file-12345", nil, Once},
	} {
		q := parse(c.method, c.target, "", 0, c.header...)
		if q.Kind != c.want {
			t.Errorf("%s %s %v is of kind %d, want %d", c.method, c.target, c.header, q.Kind, c.want)
		}
		if infers := c.want == Inference || c.want == InferenceWebSocket; q.Kind.Infers() != infers || q.Kind.Repeatable() != (c.want != Once) {
			t.Errorf("%s %s: infers: %t, repeatable: %t", c.method, c.target, q.Kind.Infers(), q.Kind.Repeatable())
		}
		if q.Kind.IsHandshake() != (c.want == WebSocket || c.want == InferenceWebSocket) {
			t.Errorf("%s %s opens a WebSocket: %t", c.method, c.target, q.Kind.IsHandshake())
		}
	}
}

func TestAResponseThatGoesOnOrActsMustNotBeDoneTwice(t *testing.T) {
	for _, c := range []struct {
		operation, body string
		want            Kind
	}{
		{"/responses", `{"background":true}`, Acting},
		{"/responses", `{"background":true,"background":false}`, Acting},
		{"/responses", `{"background":false}`, Inference},
		{"/responses", `{"background":null}`, Inference},
		{"/responses", `{"background":1}`, Acting},
		{"/responses", `{"background":"true"}`, Acting},
		{"/responses", `{"tools":[{"type":"mcp"}]}`, Acting},
		{"/responses", `{"tools":[{"name":"x","\u0074ype":"\u006dcp"}]}`, Acting},
		{"/chat/completions", `{"tools":[{"type":"function"},{"server_label":"x","type":"mcp"}]}`, Acting},
		{"/messages", `{"tools":[{"type":"mcp_toolset"}]}`, Acting},
		{"/messages", `{"mcp_servers":[{"url":"x"}]}`, Acting},
		{"/messages", `{"mcp_servers":[ ]}`, Inference},
		{"/messages", `{"mcp_servers":null}`, Inference},
		{"/responses", `{"tools":[{"type":"function","parameters":{"type":"mcp"}}],"input":[{"content":[{"type":"mcp"}]}],"type":"mcp"}`, Inference},
		{"/batches", `{"background":true}`, Once},
		// what is stored
		{"/responses", `{"conversation":"conv_123"}`, Acting},
		{"/responses", `{"conversation":{"id":"conv_123"}}`, Acting},
		{"/responses", `{"conversation":null}`, Inference},
		{"/responses", `{"prompt":{"id":"pmpt_123"}}`, Acting},
		{"/responses", `{"prompt":null,"previous_response_id":"resp_123"}`, Inference},
		{"/responses", `{"response":{"conversation":"conv_123"}}`, Acting},
		{"/responses", `{"response":{"background":true}}`, Acting},
		{"/completions", `{"prompt":{"id":"x"}}`, Inference},
		{"/messages", `{"container":"container_123"}`, Acting},
		{"/messages", `{"container":{"skills":[{"type":"anthropic","skill_id":"xlsx"}]}}`, Inference},
		// containers
		{"/responses", `{"tools":[{"type":"code_interpreter","container":{"type":"auto","file_ids":["file-1"]}}]}`, Inference},
		{"/responses", `{"tools":[{"type":"code_interpreter","container":"cntr_123"}]}`, Acting},
		{"/responses", `{"tools":[{"type":"code_interpreter","container":null}]}`, Inference},
		{"/responses", `{"tools":[{"type":"code_interpreter","container":{"type":"auto","id":"cntr_123"}}]}`, Acting},
		{"/responses", `{"tools":[{"type":"code_interpreter","container":{"type":"auto","network_policy":{"type":"allowlist"}}}]}`, Acting},
		{"/responses", `{"tools":[{"type":"shell","environment":{"type":"container_reference","container_id":"cntr_123"}}]}`, Acting},
		{"/responses", `{"tools":[{"type":"shell","environment":{"type":"container_auto"}}]}`, Inference},
		{"/responses", `{"tools":[{"type":"shell","environment":{"type":"local"}}]}`, Inference},
		// tools, wherever they are
		{"/responses", `{"tools":[{"type":"web_search_2025_08_26"},{"type":"file_search","vector_store_ids":["vs_1"]},{"type":"image_generation"}]}`, Inference},
		{"/responses", `{"tools":[{"type":"teleport"}]}`, Acting},
		{"/responses", `{"tools":[{"type":7}]}`, Acting},
		{"/responses", `{"tools":[{"type":"namespace","tools":[{"type":"function"}]}]}`, Inference},
		{"/responses", `{"tools":[{"type":"namespace","tools":[{"type":"mcp"}]}]}`, Acting},
		{"/responses", `{"input":[{"type":"tool_search_output","tools":[{"type":"mcp"}]}]}`, Acting},
		{"/responses", `{"input":[{"type":"tool_search_output","tools":[{"type":"function"}]}]}`, Inference},
		{"/responses", `{"input":[{"type":"mcp_list_tools","tools":[{"name":"f","input_schema":{}}]}]}`, Inference},
		{"/responses", `{"input":[{"type":"teleport"}]}`, Acting},
		{"/responses", `{"input":[{"role":"user","content":"x"},{"type":"reasoning","id":"rs_123"}]}`, Inference},
		{"/responses", `{"Tools":[{"type":"mcp"}]}`, Acting},
		{"/responses", `{"tools":[{"Type":"mcp"}]}`, Acting},
		{"/responses", `{"input":[{"Type":"teleport"}]}`, Acting},
		{"/responses", `{"BACKGROUND":true}`, Acting},
		{"/responses", `{"tools":` + strings.Repeat(`[{"type":"namespace","tools":`, 20) + `[{"type":"mcp"}]` + strings.Repeat("}]", 20) + "}", Acting},
		{"/messages", `{"tools":[{"name":"f","input_schema":{}},{"type":"bash_20250124"},{"type":"web_search_20250305"}]}`, Inference},
		// parameters
		{"/chat/completions", `{"a_new_switch":true,"a_new_limit":5,"a_new_word":"x","a_new_list":["x"],"A-New-One":0,"nothing":{}}`, Inference},
		{"/chat/completions", `{"response_format":{"type":"json_object"},"metadata":{"type":"mcp"},"logit_bias":{"1":2}}`, Inference},
		{"/chat/completions", `{"a_new_object":{"type":"x"}}`, Acting},
		{"/chat/completions", `{"new_tools":[{"type":"x"}]}`, Acting},
		{"/embeddings", `{"tools":[{"type":"x"}],"input":[{"type":"text"}],"a_new_object":{"x":1}}`, Inference},
		{"/images/generations", `{"background":"transparent"}`, Inference},
		// what cannot be read
		{"/responses", "\xff\xfe{\x00}\x00", Acting},
		{"/chat/completions", `{"messages":[`, Acting},
		{"/embeddings", `{"input":[`, Inference},
	} {
		q := parse("POST", "/v1"+c.operation, c.body, 0)
		if q.Kind != c.want || q.Kind.Infers() != (c.want != Once) || q.Kind.Repeatable() != (c.want == Inference) || q.Kind.IsHandshake() {
			t.Errorf("%s %s is of kind %d, want %d", c.operation, c.body, q.Kind, c.want)
		}
	}
	for _, operation := range []string{"/responses", "/messages", "/chat/completions"} {
		if q := parse("POST", "/v1"+operation, "?", 0, "Content-Encoding", "br"); q.Kind != Acting {
			t.Errorf("%s of which nothing can be read is of kind %d", operation, q.Kind)
		}
	}
	r := httptest.NewRequest("POST", "http://h/v1/chat/completions", nil)
	r.Header.Set("Content-Encoding", "zstd")
	if q := Parse(r, ParsePath("/v1/chat/completions"), Received{Bytes: []byte(`{"model":"m"}`), Whole: true, Length: 13, Decoded: true}, nil); q.Kind != Inference || q.Model != "m" || q.Clarity != Clear {
		t.Errorf("a chat that was decoded: kind %d, model %q, clarity %d", q.Kind, q.Model, q.Clarity)
	}
}

func TestHowClearTheModelIs(t *testing.T) {
	const form = "--X\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--X--\r\n"
	for _, c := range []struct {
		name, target, body string
		received           int
		header             []string
		model              string
		want               Clarity
		cutOff             bool
	}{
		{"JSON", "/v1/responses", `{"model":"m"}`, 0, nil, "m", Clear, false},
		{"a form", "/v1/audio/transcriptions", form, 0, []string{"Content-Type", "multipart/form-data; boundary=X"}, "m", Clear, false},
		{"no body", "/v1/responses", "", 0, nil, "", Clear, false},
		{"a list", "/v1/responses", `["m"]`, 0, nil, "", Unclear, false},
		{"a list to an operation without a model", "/v1/files", `["m"]`, 0, nil, "", Clear, false},
		{"an odd spelling that a server may read as inference", "/v1/Responses", `["m"]`, 0, nil, "", Unclear, false},
		{"a model in other letters", "/v1/responses", `{"Model":"m"}`, 0, nil, "", Unclear, false},
		{"JSON that does not end", "/v1/responses", `{"model":"m"`, 0, nil, "m", Unclear, false},
		{"another type", "/v1/responses", `{"model":"m"}`, 0, []string{"Content-Type", "multipart/mixed"}, "m", Unclear, false},
		{"compressed", "/v1/responses", `{"model":"m"}`, 0, []string{"Content-Encoding", "gzip"}, "", Opaque, false},
		{"compressed and cut off", "/v1/responses", `{"model":"m"}`, 5, []string{"Content-Encoding", "gzip"}, "", Opaque, true},
		{"cut off before the model", "/v1/responses", `{"input":"x","model":"m"}`, 15, nil, "", Clear, true},
		{"cut off after the model", "/v1/responses", `{"model":"m","input":"x"}`, 15, nil, "m", Clear, false},
		{"unclear before it was cut off", "/v1/responses", `{"Model":"x","model":"m"}`, 15, nil, "", Unclear, true},
	} {
		q := parse("POST", c.target, c.body, c.received, c.header...)
		if q.Model != c.model || q.Clarity != c.want || q.CutOff() != c.cutOff {
			t.Errorf("%s: model %q, clarity %d, cut off: %t", c.name, q.Model, q.Clarity, q.CutOff())
		}
	}
}

func TestWhereTheModelIs(t *testing.T) {
	handshake := []string{"Upgrade", "websocket", "Connection", "upgrade"}
	for _, c := range []struct {
		method, target, body string
		header               []string
		model                string
		inPath, needed       bool
	}{
		{"POST", "/openai/deployments/d%2F1/chat/completions?model=q", `{"model":"m"}`, nil, "d/1", true, true},
		{"POST", "/v1/chat/completions?model=q", `{"model":"m"}`, nil, "m", false, true},
		{"POST", "/v1/chat/completions?deployment=d&model=q", `{}`, nil, "q", false, true},
		{"POST", "/v1/chat/completions?deployment=d", "", nil, "d", false, true},
		{"POST", "/v1/chat/completions?model=q", `["m"]`, nil, "", false, true}, // a server may read another one
		{"POST", "/v1/files", `{"model":"m"}`, nil, "m", false, false},
		{"GET", "/v1/realtime?model=q", "", handshake, "q", false, true},
		{"GET", "/v1/realtime?call_id=rtc_12345", "", handshake, "", false, false},
	} {
		if q := parse(c.method, c.target, c.body, 0, c.header...); q.Model != c.model || q.ModelInPath() != c.inPath || q.NeedsModel != c.needed {
			t.Errorf("%s %s: model %q, in the path: %t, needed: %t", c.method, c.target, q.Model, q.ModelInPath(), q.NeedsModel)
		}
	}
}

func TestWhichStreamsCanBeAskedForTheirUsage(t *testing.T) {
	const stream = `{"model":"m","stream":true,"messages":[]}`
	for _, c := range []struct {
		target, body string
		received     int
		want         bool
	}{
		{"/v1/chat/completions", stream, 0, true},
		{"/v1/chat/completions", stream, len(stream) - 1, false},
		{"/v1/chat/completions", `{"model":"m"}`, 0, false},
		{"/v1/chat/completions", `{"stream":true,"stream_options":{"include_usage":true}}`, 0, false},
		{"/v1/responses", stream, 0, false}, // which shows it anyway
	} {
		if q := parse("POST", c.target, c.body, c.received); q.CanAskUsage() != c.want {
			t.Errorf("%s %s can be asked: %t", c.target, c.body, !c.want)
		}
	}
}

func TestAFileIsNoPrompt(t *testing.T) {
	form := "--X\r\nContent-Disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\n" + strings.Repeat("x", 4000) + "\r\n--X--\r\n"
	if q := parse("POST", "/v1/audio/transcriptions", form, 0, "Content-Type", "multipart/form-data; boundary=X"); q.Cost != 0 || PromptCost(q.PromptLength) != 0 {
		t.Errorf("a file costs %d, and its prompt %d", q.Cost, PromptCost(q.PromptLength))
	}
	chat := `{"max_tokens":10,"prompt":"` + strings.Repeat("x", 4000) + `"}`
	for _, received := range []int{0, 100} {
		if q := parse("POST", "/v1/completions", chat, received); q.Cost != 1017 || PromptCost(q.PromptLength) != 1007 {
			t.Errorf("with %d bytes received, a chat costs %d, and its prompt %d", received, q.Cost, PromptCost(q.PromptLength))
		}
	}
}

func TestParsingAnOrdinaryChatAllocatesNothing(t *testing.T) {
	r := httptest.NewRequest("POST", "/v1/chat/completions", nil)
	r.Header.Set("Content-Type", "application/json")
	route := ParsePath(r.URL.EscapedPath())
	body := Received{Bytes: []byte(`{"model":"gpt-4o","messages":[{"role":"user","content":"hi"}]}`), Whole: true, Length: -1}
	if n := testing.AllocsPerRun(100, func() { Parse(r, route, body, nil) }); n > 0 {
		t.Errorf("it takes %v allocations", n)
	}
}
