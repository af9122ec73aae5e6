package simulator

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net/http"
)

// response is an answer of the Responses API, as far as it goes.
type response struct {
	ID                 string             `json:"id"`
	Object             string             `json:"object"`
	CreatedAt          int64              `json:"created_at"`
	Status             string             `json:"status"`
	Background         bool               `json:"background"`
	Error              *errorDetail       `json:"error"`
	IncompleteDetails  *incompleteDetails `json:"incomplete_details"`
	Instructions       any                `json:"instructions"`
	MaxOutputTokens    *int64             `json:"max_output_tokens"`
	Metadata           struct{}           `json:"metadata"`
	Model              string             `json:"model"`
	Output             []outputItem       `json:"output"`
	ParallelToolCalls  bool               `json:"parallel_tool_calls"`
	PreviousResponseID *string            `json:"previous_response_id"`
	Reasoning          reasoning          `json:"reasoning"`
	Store              bool               `json:"store"`
	Temperature        float64            `json:"temperature"`
	Text               textOptions        `json:"text"`
	ToolChoice         string             `json:"tool_choice"`
	Tools              []struct{}         `json:"tools"`
	TopP               float64            `json:"top_p"`
	Truncation         string             `json:"truncation"`
	Usage              *responseUsage     `json:"usage"`
	User               *string            `json:"user"`
}

type incompleteDetails struct {
	Reason string `json:"reason"`
}

type reasoning struct {
	Effort  *string `json:"effort"`
	Summary *string `json:"summary"`
}

type textOptions struct {
	Format textFormat `json:"format"`
}

type textFormat struct {
	Type string `json:"type"`
}

type outputItem struct {
	ID      string        `json:"id"`
	Type    string        `json:"type"`
	Status  string        `json:"status"`
	Content []contentPart `json:"content"`
	Role    string        `json:"role"`
}

type contentPart struct {
	Type        string     `json:"type"`
	Annotations []struct{} `json:"annotations"`
	Logprobs    []struct{} `json:"logprobs"`
	Text        string     `json:"text"`
}

type responseUsage struct {
	InputTokens         int64         `json:"input_tokens"`
	InputTokensDetails  inputDetails  `json:"input_tokens_details"`
	OutputTokens        int64         `json:"output_tokens"`
	OutputTokensDetails outputDetails `json:"output_tokens_details"`
	TotalTokens         int64         `json:"total_tokens"`
}

type inputDetails struct {
	CachedTokens int64 `json:"cached_tokens"`
}

type outputDetails struct {
	ReasoningTokens int64 `json:"reasoning_tokens"`
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
	Logprobs       *[]struct{}  `json:"logprobs,omitempty"`
}

// respond answers `POST responses`.
func (x *exchange) respond() {
	if previous := x.request.PreviousResponseID; previous != "" && x.h.state.stored(previous) == nil {
		code := "previous_response_not_found"
		x.reply(openaiError(http.StatusBadRequest, "invalid_request_error", &code,
			fmt.Sprintf("Previous response with id '%s' not found.", previous)))
		return
	}
	resp := x.newResponse()
	if x.request.Stream {
		x.streamResponse(resp)
		return
	}
	x.whole(x.outputTokens(), func() any {
		x.finish(resp, outputItem{ID: newMessageID(), Type: "message", Role: "assistant"})
		return resp
	})
}

func (x *exchange) newResponse() *response {
	resp := &response{
		ID:                "resp_" + rand.Text(),
		Object:            "response",
		CreatedAt:         x.h.now().Unix(),
		Status:            "in_progress",
		Instructions:      x.request.Instructions,
		MaxOutputTokens:   x.request.MaxOutputTokens,
		Model:             x.model(),
		Output:            []outputItem{},
		ParallelToolCalls: true,
		Store:             x.request.Store == nil || *x.request.Store,
		Temperature:       1,
		Text:              textOptions{textFormat{"text"}},
		ToolChoice:        "auto",
		Tools:             []struct{}{},
		TopP:              1,
		Truncation:        "disabled",
	}
	if x.request.PreviousResponseID != "" {
		resp.PreviousResponseID = &x.request.PreviousResponseID
	}
	return resp
}

func newMessageID() string { return "msg_" + rand.Text() }

func outputText(text string) contentPart {
	return contentPart{Type: "output_text", Annotations: []struct{}{}, Logprobs: []struct{}{}, Text: text}
}

// finish completes the response and stores it. A response that reached
// max_output_tokens has the status incomplete, as in OpenAI's reference.
func (x *exchange) finish(resp *response, item outputItem) {
	resp.Status = "completed"
	if x.finishReason() == "length" {
		resp.Status = "incomplete"
		resp.IncompleteDetails = &incompleteDetails{"max_output_tokens"}
	}
	item.Status = resp.Status
	item.Content = []contentPart{outputText(text(x.produced))}
	resp.Output = []outputItem{item}
	resp.Usage = &responseUsage{
		InputTokens:        x.cost.prompt,
		InputTokensDetails: inputDetails{CachedTokens: x.cached},
		OutputTokens:       x.produced,
		TotalTokens:        x.cost.prompt + x.produced,
	}
	if resp.Store {
		body, _ := json.Marshal(resp)
		x.h.state.store(resp.ID, body)
	}
}

// streamResponse sends the first events at once and the text after the latency
// of the first token. Chat sends nothing before that latency.
func (x *exchange) streamResponse(resp *response) {
	s := x.startStream()
	index, none := 0, []struct{}{}
	send := func(e responseEvent) {
		e.SequenceNumber = s.sent
		s.send(e.Type, e)
	}
	send(responseEvent{Type: "response.created", Response: resp})
	send(responseEvent{Type: "response.in_progress", Response: resp})
	if !s.ended && !x.wait(x.firstTokenLatency()) {
		x.abort()
	}

	item := outputItem{ID: newMessageID(), Type: "message", Status: "in_progress", Content: []contentPart{}, Role: "assistant"}
	part := outputText("")
	send(responseEvent{Type: "response.output_item.added", OutputIndex: &index, Item: &item})
	send(responseEvent{Type: "response.content_part.added", OutputIndex: &index, ItemID: item.ID, ContentIndex: &index, Part: &part})
	for i := range x.outputTokens() {
		if i > 0 {
			s.pause()
		}
		if s.ended {
			return
		}
		word := token(i)
		x.produced++
		send(responseEvent{Type: "response.output_text.delta", OutputIndex: &index, ItemID: item.ID, ContentIndex: &index, Delta: &word, Logprobs: &none})
	}

	x.finish(resp, item)
	item = resp.Output[0]
	part = item.Content[0]
	send(responseEvent{Type: "response.output_text.done", OutputIndex: &index, ItemID: item.ID, ContentIndex: &index, Text: &part.Text, Logprobs: &none})
	send(responseEvent{Type: "response.content_part.done", OutputIndex: &index, ItemID: item.ID, ContentIndex: &index, Part: &part})
	send(responseEvent{Type: "response.output_item.done", OutputIndex: &index, Item: &item})
	if s.ended || s.unfinished() {
		return
	}
	send(responseEvent{Type: "response." + resp.Status, Response: resp})
}

type deletedResponse struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Deleted bool   `json:"deleted"`
}

// storedResponse returns or deletes a response that was stored before.
func (x *exchange) storedResponse() *reply {
	id := x.route.id
	body := x.h.state.stored(id)
	if body == nil {
		return openaiError(http.StatusNotFound, "invalid_request_error", nil, fmt.Sprintf("Response with id '%s' not found.", id))
	}
	if x.r.Method == http.MethodDelete {
		x.h.state.forget(id)
		return jsonReply(http.StatusOK, deletedResponse{ID: id, Object: "response", Deleted: true})
	}
	return &reply{status: http.StatusOK, contentType: jsonType, body: body}
}
