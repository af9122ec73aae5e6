package model

import (
	"crypto/rand"
	"encoding/json"
	"iter"
	"maps"
	"time"
)

// Response is a reply of the Responses API: what a client sees of it, and how
// it is generated.
type Response struct {
	*Generation
	body object
	item object // the message, or the call
}

// NewResponse begins the response to a request.
func (g *Generation) NewResponse() *Response {
	asked := g.Request
	r := &Response{Generation: g, item: object{"id": "msg_" + rand.Text(), "type": "message", "role": "assistant"}}
	if g.call != nil {
		r.item = object{"id": "fc_" + rand.Text(), "type": "function_call", "call_id": g.call.id, "name": g.call.name}
	}
	r.body = object{
		"id": "resp_" + rand.Text(), "object": "response", "created_at": g.Now().Unix(), "status": "in_progress", "model": g.Model,
		"error": nil, "incomplete_details": nil, "output": []any{}, "usage": nil, "user": nil, "metadata": object{},
		"background": asked.Background, "service_tier": g.Tier, "store": asked.Store == nil || *asked.Store, "instructions": asked.Instructions,
		"max_output_tokens": asked.MaxOutputTokens, "previous_response_id": nil,
		// what a request that does not set these gets
		"parallel_tool_calls": true, "temperature": 1, "top_p": 1, "truncation": "disabled", "tool_choice": "auto", "tools": []any{},
		"reasoning": object{"effort": nil, "summary": nil}, "text": object{"format": object{"type": "text"}},
	}
	if asked.PreviousResponseID != "" {
		r.body["previous_response_id"] = asked.PreviousResponseID
	}
	return r
}

func outputText(text string) object {
	return object{"type": "output_text", "annotations": []any{}, "logprobs": []any{}, "text": text}
}

// content returns the name of what the item says, and its value.
func (r *Response) content(text string) (name string, value any) {
	switch {
	case r.call != nil:
		return "arguments", text
	case text == "":
		return "content", []any{}
	}
	return "content", []any{outputText(text)}
}

// Body returns the response as a client sees it now.
func (r *Response) Body() any { return r.body }

// Queued returns the response as a client sees it while it goes on in the
// background.
func (r *Response) Queued() any { return r.with("queued") }

// Cancelled returns the response as it is stored when it is cancelled.
func (r *Response) Cancelled() []byte { return encode(r.with("cancelled")) }

// with returns the body with another status.
func (r *Response) with(status string) object {
	body := maps.Clone(r.body)
	body["status"] = status
	return body
}

func encode(v any) []byte {
	text, _ := json.Marshal(v) // it is made of JSON
	return text
}

// Finish completes the response and returns what is to be stored of it. A
// response that reached max_output_tokens has the status incomplete, as in
// OpenAI's reference.
func (r *Response) Finish() Stored {
	r.body = r.with("completed")
	if r.finishReason() == "length" {
		r.body["status"], r.body["incomplete_details"] = "incomplete", object{"reason": "max_output_tokens"}
	}
	item := maps.Clone(r.item)
	name, content := r.content(r.text())
	item["status"], item[name] = r.body["status"], content
	r.body["output"] = []any{item}
	r.body["usage"] = object{
		"input_tokens": r.Prompt, "input_tokens_details": object{"cached_tokens": r.Cached},
		"output_tokens": r.Tokens(), "output_tokens_details": object{"reasoning_tokens": 0}, "total_tokens": r.Prompt + r.Tokens(),
	}
	if r.body["store"] == true {
		return Stored{r.body["id"].(string): encode(r.body), item["id"].(string): []byte("{}")}
	}
	return nil
}

// Events are the response as it is streamed: the first events at once, and the
// text after the latency of the first token. Chat sends nothing before that
// latency.
func (r *Response) Events() iter.Seq[Event] {
	return sequence(func(sendEvent func(Event) bool) {
		number := 0
		send := func(e Event, kind string, fields object) bool {
			e.Name, e.Data = "response."+kind, fields
			fields["type"], fields["sequence_number"] = e.Name, number
			number++
			return sendEvent(e)
		}
		about := func(fields object) object { // the item, or its text
			fields["output_index"], fields["item_id"] = 0, r.item["id"]
			if r.call == nil {
				fields["content_index"] = 0
			}
			return fields
		}
		item := maps.Clone(r.item)
		name, nothing := r.content("")
		item["status"], item[name] = "in_progress", nothing
		kind, field := "output_text", "text"
		if r.call != nil {
			kind, field = "function_call_arguments", "arguments"
		}
		send(Event{}, "created", object{"response": r.body})
		send(Event{}, "in_progress", object{"response": r.body})
		send(Event{Wait: FirstToken}, "output_item.added", object{"output_index": 0, "item": item})
		if r.call == nil {
			send(Event{}, "content_part.added", about(object{"part": outputText("")}))
		}
		left := r.Tokens()
		for word, wait := range r.tokens() {
			e := Event{Wait: wait, Tokens: 1}
			if left--; left == 0 {
				e.Stored = r.Finish() // also if a fault ends the stream here
			}
			if !send(e, kind+".delta", about(object{"delta": word, "logprobs": []any{}})) {
				return
			}
		}
		send(Event{}, kind+".done", about(object{field: r.text(), "logprobs": []any{}}))
		if r.call == nil {
			send(Event{}, "content_part.done", about(object{"part": outputText(r.text())}))
		}
		send(Event{}, "output_item.done", object{"output_index": 0, "item": r.body["output"].([]any)[0]})
		send(Event{}, r.body["status"].(string), object{"response": r.body})
	})
}

// ReadResponse reads a stored response. It reports whether body is that of the
// id.
func ReadResponse(id string, body []byte) (*Response, bool) {
	r := new(Response)
	err := json.Unmarshal(body, &r.body)
	return r, err == nil && r.body["id"] == id && r.body["object"] == "response"
}

// InBackground reports whether the response was generated in the background.
func (r *Response) InBackground() bool { return r.body["background"] == true }

// Resume generates a stored response again.
func (r *Response) Resume(length int64, now func() time.Time) *Response {
	output, usage := r.body["output"].([]any), r.body["usage"].(object)
	item := output[0].(object)
	limit, prompt := int64(usage["output_tokens"].(float64)), int64(usage["input_tokens"].(float64))
	g := &Generation{Task: Task{Request: Request{MaxOutputTokens: &limit}, Length: length, Prompt: prompt, Now: now}}
	if arguments, ok := item["arguments"].(string); ok {
		g.call = newCall(item["call_id"].(string), item["name"].(string), arguments)
	}
	begun := r.with("in_progress")
	begun["output"], begun["usage"], begun["incomplete_details"] = []any{}, nil, nil
	return &Response{g, begun, item}
}
