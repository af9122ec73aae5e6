package model

import (
	"crypto/rand"
	"encoding/json"
	"iter"
	"slices"
	"time"
)

// Response is a reply of the Responses API: what a client sees of it, and how it is
// generated.
type Response struct {
	*Generation
	body response
	item outputItem // the message, or the call
}

// response is the JSON of a response, as far as it goes. Its parts follow each other
// as OpenAI's fields do.
type response struct {
	responseStatus
	Instructions       any          `json:"instructions"`
	MaxOutputTokens    *int64       `json:"max_output_tokens"`
	Metadata           struct{}     `json:"metadata"`
	Model              string       `json:"model"`
	Output             []outputItem `json:"output"`
	ParallelToolCalls  bool         `json:"parallel_tool_calls"`
	PreviousResponseID *string      `json:"previous_response_id"`
	responseSettings
	Usage *responseUsage `json:"usage"`
	User  *string        `json:"user"`
}

type responseStatus struct {
	ID                string          `json:"id"`
	Object            string          `json:"object"`
	CreatedAt         int64           `json:"created_at"`
	Status            string          `json:"status"`
	Background        bool            `json:"background"`
	Error             *struct{}       `json:"error"` // none fails
	IncompleteDetails json.RawMessage `json:"incomplete_details"`
}

type responseSettings struct {
	Reasoning   json.RawMessage `json:"reasoning"`
	Store       bool            `json:"store"`
	Temperature float64         `json:"temperature"`
	Text        json.RawMessage `json:"text"`
	ToolChoice  string          `json:"tool_choice"`
	Tools       []struct{}      `json:"tools"`
	TopP        float64         `json:"top_p"`
	Truncation  string          `json:"truncation"`
}

type outputItem struct {
	ID      string        `json:"id"`
	Type    string        `json:"type"`
	Status  string        `json:"status,omitempty"`
	Content []contentPart `json:"content,omitzero"`
	Role    string        `json:"role,omitempty"`
	// Of a call of a function.
	CallID    string  `json:"call_id,omitempty"`
	Name      string  `json:"name,omitempty"`
	Arguments *string `json:"arguments,omitempty"`
	// Of reasoning.
	Summary          *[]struct{} `json:"summary,omitempty"`
	EncryptedContent string      `json:"encrypted_content,omitempty"`
}

type contentPart struct {
	Type        string     `json:"type"`
	Annotations []struct{} `json:"annotations"`
	Logprobs    []struct{} `json:"logprobs"`
	Text        string     `json:"text"`
}

type responseUsage struct {
	InputTokens         int64            `json:"input_tokens"`
	InputTokensDetails  map[string]int64 `json:"input_tokens_details"`
	OutputTokens        int64            `json:"output_tokens"`
	OutputTokensDetails map[string]int64 `json:"output_tokens_details"`
	TotalTokens         int64            `json:"total_tokens"`
}

// responseEvent is any event of a streamed response.
type responseEvent struct {
	Type           string       `json:"type"`
	SequenceNumber int          `json:"sequence_number"`
	Response       *response    `json:"response,omitempty"`
	OutputIndex    *int         `json:"output_index,omitempty"`
	Item           *outputItem  `json:"item,omitempty"`
	ItemID         string       `json:"item_id,omitempty"`
	ContentIndex   *int         `json:"content_index,omitempty"`
	Part           *contentPart `json:"part,omitempty"`
	Delta          *string      `json:"delta,omitempty"`
	Text           *string      `json:"text,omitempty"`
	Arguments      *string      `json:"arguments,omitempty"`
	Logprobs       *[]struct{}  `json:"logprobs,omitempty"`
}

// NewResponse begins the response to a request.
func (g *Generation) NewResponse() *Response {
	r := &Response{Generation: g, item: outputItem{ID: NewMessageID(), Type: "message", Role: "assistant"}}
	if g.call != nil {
		r.item = outputItem{ID: "fc_" + rand.Text(), Type: "function_call", CallID: g.call.id, Name: g.call.name}
	}
	r.body = response{
		responseStatus: responseStatus{
			ID:         "resp_" + rand.Text(),
			Object:     "response",
			CreatedAt:  g.Now().Unix(),
			Status:     "in_progress",
			Background: g.Request.Background,
		},
		Instructions:      g.Request.Instructions,
		MaxOutputTokens:   g.Request.MaxOutputTokens,
		Model:             g.Model,
		Output:            []outputItem{},
		ParallelToolCalls: true,
		responseSettings: responseSettings{
			Reasoning:   json.RawMessage(`{"effort":null,"summary":null}`),
			Store:       g.Request.Store == nil || *g.Request.Store,
			Temperature: 1,
			Text:        json.RawMessage(`{"format":{"type":"text"}}`),
			ToolChoice:  "auto",
			Tools:       []struct{}{},
			TopP:        1,
			Truncation:  "disabled",
		},
	}
	if previous := g.Request.PreviousResponseID; previous != "" {
		r.body.PreviousResponseID = &previous
	}
	return r
}

// NewMessageID returns the id of a message.
func NewMessageID() string { return "msg_" + rand.Text() }

func outputText(text string) contentPart {
	return contentPart{Type: "output_text", Annotations: []struct{}{}, Logprobs: []struct{}{}, Text: text}
}

// Body is what a client sees of the response now.
func (r *Response) Body() any { return r.body }

// Queued is what a client sees of a response that goes on in the background.
func (r *Response) Queued() any {
	queued := r.body
	queued.Status = "queued"
	return queued
}

// Finish completes the response and returns what is to be stored of it. A response
// that reached max_output_tokens has the status incomplete, as in OpenAI's
// reference.
func (r *Response) Finish() (stored []Stored) {
	r.body.Status = "completed"
	if r.finishReason() == "length" {
		r.body.Status = "incomplete"
		r.body.IncompleteDetails = json.RawMessage(`{"reason":"max_output_tokens"}`)
	}
	item := r.item
	item.Status = r.body.Status
	if said := r.text(); r.call != nil {
		item.Arguments = &said
	} else {
		item.Content = []contentPart{outputText(said)}
	}
	r.body.Output = nil
	if slices.Contains(r.Request.Include, "reasoning.encrypted_content") {
		// Only this simulator can read it.
		content := "gAAAAA" + rand.Text() + rand.Text()
		stored = append(stored, Stored{content, []byte("{}")})
		r.body.Output = []outputItem{{ID: "rs_" + rand.Text(), Type: "reasoning", Summary: &[]struct{}{}, EncryptedContent: content}}
	}
	r.body.Output = append(r.body.Output, item)
	r.body.Usage = &responseUsage{
		InputTokens:         r.Prompt,
		InputTokensDetails:  map[string]int64{"cached_tokens": r.Cached},
		OutputTokens:        r.Tokens(),
		OutputTokensDetails: map[string]int64{"reasoning_tokens": 0},
		TotalTokens:         r.Prompt + r.Tokens(),
	}
	if r.body.Store {
		body, _ := json.Marshal(r.body)
		stored = append(stored, Stored{r.body.ID, body})
		for _, item := range r.body.Output {
			stored = append(stored, Stored{item.ID, []byte("{}")})
		}
	}
	return stored
}

// Events are the response as it is streamed: the first events at once, and the text
// after the latency of the first token. Chat sends nothing before that latency.
func (r *Response) Events() iter.Seq[Event] {
	return sequence(func(sendEvent func(Event) bool) {
		number := 0
		send := func(e Event, data responseEvent) bool {
			data.SequenceNumber = number
			number++
			e.Name, e.Data = data.Type, data
			return sendEvent(e)
		}
		item, index, none := r.item, 0, []struct{}{}
		item.Status = "in_progress"
		if r.call != nil {
			item.Arguments = new(string)
		} else {
			item.Content = []contentPart{}
		}
		part := outputText("")
		send(Event{}, responseEvent{Type: "response.created", Response: &r.body})
		send(Event{}, responseEvent{Type: "response.in_progress", Response: &r.body})
		send(Event{Wait: FirstToken}, responseEvent{Type: "response.output_item.added", OutputIndex: &index, Item: &item})
		if r.call == nil {
			send(Event{}, responseEvent{Type: "response.content_part.added", OutputIndex: &index, ItemID: item.ID, ContentIndex: &index, Part: &part})
		}
		left := r.Tokens()
		for word, wait := range r.tokens() {
			delta := responseEvent{Type: "response.function_call_arguments.delta", OutputIndex: &index, ItemID: item.ID, Delta: &word}
			if r.call == nil {
				delta.Type, delta.ContentIndex, delta.Logprobs = "response.output_text.delta", &index, &none
			}
			e := Event{Wait: wait, Tokens: 1}
			if left--; left == 0 {
				e.Stored = r.Finish() // also if a fault ends the stream here
			}
			if !send(e, delta) {
				return
			}
		}

		item = r.body.Output[len(r.body.Output)-1]
		if r.call != nil {
			send(Event{}, responseEvent{Type: "response.function_call_arguments.done", OutputIndex: &index, ItemID: item.ID, Arguments: item.Arguments})
		} else {
			part = item.Content[0]
			send(Event{}, responseEvent{Type: "response.output_text.done", OutputIndex: &index, ItemID: item.ID, ContentIndex: &index, Text: &part.Text, Logprobs: &none})
			send(Event{}, responseEvent{Type: "response.content_part.done", OutputIndex: &index, ItemID: item.ID, ContentIndex: &index, Part: &part})
		}
		for i := range r.body.Output {
			send(Event{}, responseEvent{Type: "response.output_item.done", OutputIndex: &i, Item: &r.body.Output[i]})
		}
		send(Event{Last: true}, responseEvent{Type: "response." + r.body.Status, Response: &r.body})
	})
}

// ReadResponse reads a stored response. It reports whether body is that of the id.
func ReadResponse(id string, body []byte) (*Response, bool) {
	r := new(Response)
	err := json.Unmarshal(body, &r.body)
	return r, err == nil && r.body.ID == id
}

// InBackground reports whether the response was generated in the background.
func (r *Response) InBackground() bool { return r.body.Background }

// Cancelled is what is to be stored of the response when it is cancelled.
func (r *Response) Cancelled() []byte {
	r.body.Status = "cancelled"
	body, _ := json.Marshal(r.body)
	return body
}

// Resume generates a stored response again.
func (r *Response) Resume(length int64, now func() time.Time) *Response {
	limit := r.body.Usage.OutputTokens
	item := r.body.Output[len(r.body.Output)-1]
	g := &Generation{Task: Task{Request: Request{MaxOutputTokens: &limit}, Length: length, Prompt: r.body.Usage.InputTokens, Now: now}}
	if item.Arguments != nil {
		g.call = newCall(item.CallID, item.Name, *item.Arguments)
	}
	begun := r.body
	begun.Status, begun.Output, begun.Usage = "in_progress", []outputItem{}, nil
	return &Response{g, begun, item}
}
