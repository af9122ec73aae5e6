package simulator

import (
	"errors"
	"fmt"
	"io"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/simulator/internal/wire"
)

const (
	streamBody    = `{"model":"gpt-4o","stream":true,"messages":[{"role":"user","content":"Say hello."}]}`
	responsesBody = `{"model":"gpt-4o","stream":true,"input":"Say hello."}`
)

// events are the `data` of a stream, and what ended it.
func events(t *testing.T, srv *httptest.Server, path, body, fault string) ([]string, error) {
	t.Helper()
	resp, err := roundTrip(srv, "POST", path, body, "X-Simulator-Fault", fault)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if got := resp.Header.Get("Content-Type"); resp.StatusCode != 200 || got != "text/event-stream; charset=utf-8" {
		t.Fatalf("got %d %s", resp.StatusCode, got)
	}
	raw, err := io.ReadAll(resp.Body)
	var data []string
	for event := range strings.SplitSeq(string(raw), "\n\n") {
		if event != "" {
			data = append(data, event)
		}
	}
	return data, err
}

// about describes an event by what distinguishes it from the others.
func about(event string) string {
	for _, mark := range []struct{ text, name string }{
		{"event: error\ndata: {\"error\":{", "named error"},
		{`data: {"error":{`, "error"},
		{"data: [DONE]", "done"},
		{`data: {"choices":[],"created":0,"id":"","model":"","object":"","prompt_filter_results"`, "filter"},
		{`data: {"choices":[{"delta":{"content":"","role":"assistant"}`, "role"},
		{`data: {"choices":[{"delta":{"content":"`, "token"},
		{`data: {"choices":[{"delta":{},"finish_reason":"stop"`, "stop"},
		{`data: {"choices":[{"delta":{},"finish_reason":"length"`, "length"},
		{`data: {"choices":[],"created":`, "usage"},
	} {
		if strings.HasPrefix(event, mark.text) {
			return mark.name
		}
	}
	if name, data, ok := strings.Cut(event, "\n"); ok && strings.HasPrefix(name, "event: response.") {
		name = strings.TrimPrefix(name, "event: ")
		if strings.Contains(data, `"type":"`+name+`"}`) {
			return strings.TrimPrefix(name, "response.")
		}
	}
	return event
}

func summary(events []string) string {
	var names []string
	for _, event := range events {
		names = append(names, about(event))
	}
	return strings.Join(names, " ")
}

func TestStreamsAreCompleteAndFaultsChangeThem(t *testing.T) {
	srv := listen(t, &Handler{AllowFaultHeader: true, OutputTokens: 3})
	const (
		chat      = "/v1/chat/completions"
		responses = "/v1/responses"
		whole     = "created in_progress output_item.added content_part.added output_text.delta output_text.delta output_text.delta " +
			"output_text.done content_part.done output_item.done"
	)
	for name, tc := range map[string]struct {
		path, body, fault string
		want              string
		cut               bool
	}{
		"chat":            {chat, streamBody, "", "filter role token token token stop done", false},
		"chat with usage": {chat, `{"model":"m","stream":true,"stream_options":{"include_usage":true}}`, "", "filter role token token token stop usage done", false},
		"chat cut short":  {chat, `{"model":"m","stream":true,"max_completion_tokens":1}`, "", "filter role token length done", false},
		"responses":       {responses, responsesBody, "", whole + " completed", false},
		"an incomplete one": {responses, `{"model":"m","stream":true,"max_output_tokens":1}`, "",
			"created in_progress output_item.added content_part.added output_text.delta output_text.done content_part.done output_item.done incomplete", false},

		"an error first":              {chat, streamBody, "sse_error_first:server_error:null", "error", false},
		"an error first, responses":   {responses, responsesBody, "sse_error_first:too_many_requests:no_capacity", "named error", false},
		"an error after 2":            {chat, streamBody, "sse_error_after:2", "filter role error", false},
		"an error after 4":            {chat, streamBody, "sse_error_after:4", "filter role token token error", false},
		"an error after 5, responses": {responses, responsesBody, "sse_error_after:5", "created in_progress output_item.added content_part.added output_text.delta named error", false},
		"a reset after headers":       {chat, streamBody, "truncate_rst:0", "", true},
		"a reset after the preamble":  {chat, streamBody, "truncate_rst:2", "filter role", true},
		"a reset after content":       {chat, streamBody, "truncate_rst:3", "filter role token", true},
		"an end after headers":        {chat, streamBody, "truncate_eof:0", "", false},
		"an end after content":        {chat, streamBody, "truncate_eof:4", "filter role token token", false},
		"an end, responses":           {responses, responsesBody, "truncate_eof:2", "created in_progress", false},
		"the end mark is missing":     {chat, streamBody, "truncate_eof:6", "filter role token token token stop", false},
		"an end never reached":        {chat, streamBody, "truncate_eof:99", "filter role token token token stop done", false},
		"not for streams":             {chat, streamBody, "json_cut", "filter role token token token stop done", false},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := events(t, srv, tc.path, tc.body, tc.fault)
			if s := summary(got); s != tc.want {
				t.Errorf("got  %s\nwant %s", s, tc.want)
			}
			if cut := errors.Is(err, io.ErrUnexpectedEOF); cut != tc.cut || !cut && err != nil {
				t.Errorf("got %v, want a cut: %t", err, tc.cut)
			}
		})
	}
}

func TestAStreamsErrorHasTheTypeAndCodeAskedFor(t *testing.T) {
	srv := listen(t, &Handler{AllowFaultHeader: true})
	got, _ := events(t, srv, "/v1/responses", responsesBody, "sse_error_first:too_many_requests:no_capacity")
	want := "event: error\ndata: " + `{"error":{"message":"The system is currently experiencing high demand and cannot process your request.","type":"too_many_requests","param":null,"code":"no_capacity"},"sequence_number":0,"type":"error"}`
	if len(got) != 1 || got[0] != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	got, _ = events(t, srv, "/v1/chat/completions", streamBody, "sse_error_first:server_error:null")
	want = `data: {"error":{"message":"The server had an error while processing your request. Sorry about that!","type":"server_error","param":null,"code":null}}`
	if len(got) != 1 || got[0] != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestSequenceNumbersCountEveryEvent(t *testing.T) {
	srv := listen(t, &Handler{OutputTokens: 2})
	got, _ := events(t, srv, "/v1/responses", responsesBody, "")
	for i, event := range got {
		if !strings.Contains(event, fmt.Sprintf(`"sequence_number":%d,`, i)) {
			t.Errorf("event %d: %s", i, event)
		}
	}
	if last := got[len(got)-1]; !strings.Contains(last, `"usage":{"input_tokens":3,"input_tokens_details":{"cached_tokens":0},"output_tokens":2,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":5}`) {
		t.Errorf("no usage in %s", last)
	}
}

func TestAFaultTakesThePlaceOfTheAnswer(t *testing.T) {
	srv := listen(t, &Handler{AllowFaultHeader: true, RequestsPerMinute: 6})
	for fault, want := range map[string]struct {
		status           int
		retryAfter, body string
	}{
		"status:500":        {500, "", `{"error":{"message":"The server had an error while processing your request. Sorry about that!","type":"server_error","param":null,"code":null}}`},
		"status:503:30":     {503, "30", `{"error":{"code":"ServiceUnavailable",`},
		"status:503:0.5":    {503, "0.5", `{"error":{"code":"ServiceUnavailable",`},
		"status:529":        {529, "", `{"error":{"message":"The server had an error`},
		"status:401":        {401, "", `{"error":{"code":"401",`},
		"status:404":        {404, "", `{"error":{"code":"DeploymentNotFound",`},
		"status:418":        {418, "", `{"error":{"message":"The request was refused with status 418.",`},
		"status:429":        {429, "", `{"error":{"code":"429","message":"Requests to the ChatCompletions_Create Operation under Azure OpenAI API version 2024-10-21 have exceeded call rate limit of your current OpenAI S0 pricing tier. Please go here`},
		"status:429:7":      {429, "7", `{"error":{"code":"429","message":"Requests to the ChatCompletions_Create Operation under Azure OpenAI API version 2024-10-21 have exceeded call rate limit of your current OpenAI S0 pricing tier. Please retry after 7 seconds. Please go here`},
		"content_filter":    {400, "", wire.ContentFilterBody},
		"error_200":         {200, "", `{"error":{"code":502,"message":"Provider returned error"}}`},
		"boom":              {400, "", `{"error":{"message":"X-Simulator-Fault: fault 'boom' is not one of status`},
		"sse_error_first:x": {400, "", `{"error":{"message":"X-Simulator-Fault: fault 'sse_error_first' requires`},
		"status:503:Wed, 21 Oct 2026 07:28:30 GMT": {503, "Wed, 21 Oct 2026 07:28:30 GMT", `{"error":`},
	} {
		t.Run(fault, func(t *testing.T) {
			resp, body := call(t, srv, "POST", chatPath, chatBody, "X-Simulator-Fault", fault)
			if resp.StatusCode != want.status || !strings.HasPrefix(body, want.body) {
				t.Errorf("got %d %s, want %d %s", resp.StatusCode, body, want.status, want.body)
			}
			if got := resp.Header.Get("Retry-After"); got != want.retryAfter {
				t.Errorf("got retry-after %q, want %q", got, want.retryAfter)
			}
			if got := resp.Header.Get("Retry-After-Ms"); got != "" {
				t.Errorf("got retry-after-ms %q", got)
			}
		})
	}
	if got := status(t, srv); got.Faults != 12 || got.Admitted != 0 {
		t.Errorf("got %d faults and %d admitted, want 12 and 0", got.Faults, got.Admitted)
	}
	// None of them was charged to the one request that is allowed.
	if resp, _ := call(t, srv, "POST", chatPath, chatBody); resp.StatusCode != 200 {
		t.Errorf("got %d for the first true request", resp.StatusCode)
	}
}

func TestAFaultOf429IsAPromiseToo(t *testing.T) {
	srv := listen(t, &Handler{Fault: []Fault{{Action: "status:429:3600", Every: 2}}})
	for _, want := range []int{200, 429, 200} {
		if resp, _ := call(t, srv, "POST", chatPath, chatBody); resp.StatusCode != want {
			t.Errorf("got %d, want %d", resp.StatusCode, want)
		}
	}
	if got := status(t, srv).Early; got != 1 {
		t.Errorf("got %d early, want the third request", got)
	}
}

func TestAConfiguredFaultHitsEveryNthRequestWithAKey(t *testing.T) {
	srv := listen(t, &Handler{APIKey: []string{"k"}, Fault: []Fault{{Action: "status:503", Every: 3}, {Action: "status:500", Every: 2}}})
	var got []int
	for range 6 {
		call(t, srv, "POST", chatPath, chatBody) // counts for nothing
		resp, _ := call(t, srv, "POST", chatPath, chatBody, "api-key", "k", "X-Simulator-Fault", "status:418")
		got = append(got, resp.StatusCode)
	}
	if want := "[200 500 503 500 200 503]"; fmt.Sprint(got) != want {
		t.Errorf("got %v, want %s", got, want)
	}
}

func TestAConnectionIsResetBeforeItsHeaders(t *testing.T) {
	srv := listen(t, &Handler{AllowFaultHeader: true})
	resp, err := roundTrip(srv, "POST", chatPath, chatBody, "X-Simulator-Fault", "reset")
	if err == nil {
		t.Fatalf("got %d", resp.StatusCode)
	}
	if got := status(t, srv); got.Faults != 1 || got.Last[0].Status != 0 || got.Last[0].BodyBytes != int64(len(chatBody)) {
		t.Errorf("got %+v", got)
	}
}

func TestAWholeReplyIsCutShortOfItsLength(t *testing.T) {
	srv := listen(t, &Handler{AllowFaultHeader: true})
	resp, err := roundTrip(srv, "POST", chatPath, chatBody, "X-Simulator-Fault", "json_cut")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if !errors.Is(err, io.ErrUnexpectedEOF) || len(body) == 0 || int64(len(body)) >= resp.ContentLength {
		t.Errorf("got %d of %d bytes and %v", len(body), resp.ContentLength, err)
	}
}

func TestTheFaultHeaderIsIgnoredUnlessAllowed(t *testing.T) {
	srv := listen(t, &Handler{})
	if resp, _ := call(t, srv, "POST", chatPath, chatBody, "X-Simulator-Fault", "status:500"); resp.StatusCode != 200 {
		t.Errorf("got %d", resp.StatusCode)
	}
}

func TestStreamFaultsLeaveWholeRepliesAlone(t *testing.T) {
	srv := listen(t, &Handler{AllowFaultHeader: true})
	for _, fault := range []string{"sse_error_first:a:b", "sse_error_after:0", "truncate_rst:0", "truncate_eof:0", "hang_after:0"} {
		if resp, body := call(t, srv, "POST", chatPath, chatBody, "X-Simulator-Fault", fault); resp.StatusCode != 200 || !strings.HasSuffix(body, `"total_tokens":19}}`) {
			t.Errorf("%s: got %d %s", fault, resp.StatusCode, body)
		}
	}
	if got := status(t, srv).Faults; got != 0 {
		t.Errorf("%d faults were counted that did not happen", got)
	}
}
