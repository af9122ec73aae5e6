package simulator

import (
	"encoding/json"
	"regexp"
	"strings"
	"testing"
)

const (
	weather = `{"type":"object","properties":{"city":{"type":"string"},"days":{"type":"integer","minimum":2},"units":{"enum":["C","F"]}},"required":["city","days"]}`
	// chatTools and responseTools offer the same functions.
	chatTools     = `"tools":[{"type":"web_search"},{"type":"function","function":{"name":"weather","parameters":` + weather + `}},{"type":"function","function":{"name":"time"}}]`
	responseTools = `"tools":[{"type":"web_search"},{"type":"function","name":"weather","parameters":` + weather + `},{"type":"function","name":"time"}]`
	weatherArgs   = `{\"city\":\"simulated\",\"days\":2}`
)

// toolCallPart is what the tests read of a call, or of a chunk of one.
type toolCallPart struct {
	Index    *int
	ID       string
	Function struct{ Name, Arguments string }
}

func TestAChatWithToolsIsAnsweredWithACall(t *testing.T) {
	srv := listen(t, &Handler{OutputTokens: 3})
	const (
		asks   = `{"role":"system","content":"x"},{"role":"user","content":"x"}`
		called = asks + `,{"role":"assistant","tool_calls":[{"id":"call_1","type":"function","function":{"name":"weather","arguments":"{}"}}]},{"role":"tool","tool_call_id":"call_1","content":"x"}`
	)
	for name, c := range map[string]struct{ messages, options, want string }{
		"the user asks":            {asks, chatTools, `"function":{"arguments":"` + weatherArgs + `","name":"weather"}`},
		"a result is there":        {called, chatTools, `"content":"This reply comes"`},
		"the user asks again":      {called + "," + asks, chatTools, `"name":"weather"`},
		"a call is required":       {called, chatTools + `,"tool_choice":"required"`, `"name":"weather"`},
		"a function is required":   {called, chatTools + `,"tool_choice":{"type":"function","function":{"name":"time"}}`, `"function":{"arguments":"{}","name":"time"}`},
		"an unknown one is":        {asks, chatTools + `,"tool_choice":{"type":"function","function":{"name":"other"}}`, `"content":"This reply comes"`},
		"no call is allowed":       {asks, chatTools + `,"tool_choice":"none"`, `"content":"This reply comes"`},
		"there is no function":     {asks, `"tools":[{"type":"web_search"}]`, `"content":"This reply comes"`},
		"max_tokens cuts the call": {asks, chatTools + `,"max_tokens":2`, `"arguments":"{\"city\":"`},
	} {
		_, body := call(t, srv, "POST", "/v1/chat/completions", `{"model":"m","messages":[`+c.messages+`],`+c.options+`}`)
		reason, content := "tool_calls", `"content":null,"role":"assistant","tool_calls":[{`
		switch {
		case strings.HasPrefix(c.want, `"content"`):
			reason, content = "stop", c.want
		case strings.Contains(c.options, "max_tokens"):
			reason = "length"
		}
		if !strings.Contains(body, c.want) || !strings.Contains(body, content) || !strings.Contains(body, `"finish_reason":"`+reason+`"`) {
			t.Errorf("%s: got %s, want %s and %s", name, body, c.want, reason)
		}
	}
}

// TestACallIsStreamedInPieces as OpenAI streams it: first its name, then its
// arguments.
func TestACallIsStreamedInPieces(t *testing.T) {
	srv := listen(t, &Handler{})
	_, body := call(t, srv, "POST", "/v1/chat/completions", `{"model":"m","stream":true,"messages":[{"role":"user","content":"x"}],`+chatTools+`}`)
	var name, arguments, finish string
	pieces := 0
	for line := range strings.Lines(body) {
		data, ok := strings.CutPrefix(line, "data: ")
		var chunk struct {
			Choices []struct {
				Delta        struct{ ToolCalls []toolCallPart } `json:"delta"`
				FinishReason string                             `json:"finish_reason"`
			}
		}
		if !ok || strings.HasPrefix(data, "[DONE]") {
			continue
		}
		data = strings.ReplaceAll(data, "tool_calls\":[", "ToolCalls\":[")
		if err := json.Unmarshal([]byte(data), &chunk); err != nil {
			t.Fatal(err)
		}
		for _, c := range chunk.Choices {
			finish += c.FinishReason
			for _, part := range c.Delta.ToolCalls {
				if part.Index == nil || *part.Index != 0 || (pieces == 0) != (part.ID != "") {
					t.Errorf("a piece is %s", data)
				}
				name += part.Function.Name
				arguments += part.Function.Arguments
				pieces++
			}
		}
	}
	if name != "weather" || arguments != strings.ReplaceAll(weatherArgs, `\`, "") || finish != "tool_calls" || pieces < 5 {
		t.Errorf("got %s(%s) in %d pieces, which ends with %s", name, arguments, pieces, finish)
	}
}

func TestAResponseWithToolsIsACall(t *testing.T) {
	srv := listen(t, &Handler{})
	_, body := call(t, srv, "POST", "/v1/responses", `{"model":"m","input":"x",`+responseTools+`}`)
	var first response
	if err := json.Unmarshal([]byte(body), &first); err != nil || len(first.Output) != 1 {
		t.Fatalf("%v in %s", err, body)
	}
	item := first.Output[0]
	if item.Type != "function_call" || item.Name != "weather" || item.CallID == "" || *item.Arguments != strings.ReplaceAll(weatherArgs, `\`, "") || first.Status != "completed" {
		t.Errorf("got %s", body)
	}
	result := `{"type":"function_call_output","call_id":"` + item.CallID + `","output":"x"}`
	sent, _ := json.Marshal(item)
	for _, next := range []string{
		`"previous_response_id":"` + first.ID + `","input":[` + result + `]`,
		`"input":[{"role":"user","content":"x"},` + string(sent) + `,` + result + `]`,
	} {
		if _, body := call(t, srv, "POST", "/v1/responses", `{"model":"m",`+next+`,`+responseTools+`}`); !strings.Contains(body, `"output_text"`) {
			t.Errorf("got %s for %s", body, next)
		}
	}
}

func TestACallInAResponseIsStreamedAndResumed(t *testing.T) {
	srv := listen(t, &Handler{})
	_, body := call(t, srv, "POST", "/v1/responses", `{"model":"m","stream":true,"background":true,"input":[{"role":"user","content":"x"}],`+responseTools+`}`)
	kinds := regexp.MustCompile(`(?m)^event: (.*)$`).FindAllString(body, -1)
	var deltas strings.Builder
	for _, m := range regexp.MustCompile(`"delta":("(?:[^"\\]|\\.)*")`).FindAllStringSubmatch(body, -1) {
		var text string
		_ = json.Unmarshal([]byte(m[1]), &text)
		deltas.WriteString(text)
	}
	if deltas.String() != strings.ReplaceAll(weatherArgs, `\`, "") || strings.Contains(body, "output_text") {
		t.Errorf("got %s", body)
	}
	want := []string{"created", "in_progress", "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done", "completed"}
	for _, kind := range kinds {
		if len(want) > 1 && kind == "event: response."+want[1] {
			want = want[1:]
		}
		if kind != "event: response."+want[0] {
			t.Fatalf("%s is not %s, in %s", kind, want[0], kinds)
		}
	}
	id := regexp.MustCompile(`"resp_[^"]*`).FindString(body)[1:]
	_, rest := call(t, srv, "GET", "/v1/responses/"+id+"?stream=true&starting_after=5", "")
	if rest == "" || !strings.HasSuffix(body, rest) {
		t.Errorf("the rest of\n%s is\n%s", body, rest)
	}
}
