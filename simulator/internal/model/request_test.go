package model

import "testing"

func TestCostIsEstimatedFromTheText(t *testing.T) {
	type cost struct{ prompt, output int64 }
	limit := func(n int64) *int64 { return &n }
	text := func(s string) any { return []any{map[string]any{"role": "user", "content": s}} }
	for name, tc := range map[string]struct {
		op   Operation
		req  Request
		want cost
	}{
		"an empty request may generate 16":  {OpChat, Request{}, cost{0, 16}},
		"four characters are a token":       {OpChat, Request{Messages: text("12345678")}, cost{2, 16}},
		"a fifth one begins another":        {OpChat, Request{Messages: text("12345")}, cost{2, 16}},
		"characters, not bytes":             {OpChat, Request{Messages: text("äöüß")}, cost{1, 16}},
		"max_tokens":                        {OpChat, Request{MaxTokens: limit(300)}, cost{0, 300}},
		"max_completion_tokens":             {OpChat, Request{MaxCompletionTokens: limit(5)}, cost{0, 5}},
		"max_output_tokens":                 {OpResponse, Request{MaxOutputTokens: limit(7), Input: "1234", Instructions: "5678"}, cost{2, 7}},
		"content parts":                     {OpChat, Request{Messages: []any{map[string]any{"content": []any{map[string]any{"type": "text", "text": "1234"}, map[string]any{"type": "image_url", "image_url": map[string]any{"url": "data:image/png;base64,AAAAAAAAAAAA"}}}}}}, cost{1, 16}},
		"embeddings generate nothing":       {OpEmbedding, Request{Input: []any{"1234", "5678"}}, cost{2, 0}},
		"a number is a token":               {OpEmbedding, Request{Input: []any{1.0, 2.0, 3.0}}, cost{3, 0}},
		"tools weigh what their JSON does":  {OpChat, Request{Tools: []any{map[string]any{"type": "function", "function": map[string]any{"name": "<f>"}}}}, cost{15, 16}}, // 57 characters, of which < and > are six each
		"so does a call of a function":      {OpChat, Request{Messages: []any{map[string]any{"tool_calls": []any{map[string]any{"function": map[string]any{"name": "f", "arguments": "12345678"}}}}}}, cost{2, 16}},
		"and its result":                    {OpResponse, Request{Input: []any{map[string]any{"type": "function_call", "arguments": "1234"}, map[string]any{"type": "function_call_output", "output": "5678"}}}, cost{2, 16}},
		"transcriptions are not in advance": {OpTranscription, Request{}, cost{0, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			var got cost
			if got.prompt, got.output = tc.req.Cost(tc.op); got != tc.want {
				t.Errorf("got %+v, want %+v", got, tc.want)
			}
		})
	}
}
