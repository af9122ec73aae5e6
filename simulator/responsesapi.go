package simulator

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
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
	Arguments      *string      `json:"arguments,omitempty"`
	Logprobs       *[]struct{}  `json:"logprobs,omitempty"`
}

// respond answers `POST responses`.
func (x *exchange) respond() {
	if previous := x.request.PreviousResponseID; previous != "" && x.h.state.stored(previous) == nil {
		x.reply(openaiError(http.StatusBadRequest, "invalid_request_error", new("previous_response_not_found"),
			fmt.Sprintf("Previous response with id '%s' not found.", previous)))
		return
	}
	if missing := x.missing(x.fields); missing != nil {
		x.reply(missing)
		return
	}
	resp := x.newResponse()
	item := outputItem{ID: newMessageID(), Type: "message", Role: "assistant"}
	if x.call != nil {
		item = outputItem{ID: "fc_" + rand.Text(), Type: "function_call", CallID: x.call.id, Name: x.call.name}
	}
	if resp.Background {
		x.respondInBackground(resp, item)
		return
	}
	if x.request.Stream {
		x.streamResponse(resp, item, -1)
		return
	}
	x.whole(x.outputTokens(), func() any {
		x.finish(resp, item)
		return resp
	})
}

// respondInBackground stores the whole response at once, so that its client may
// leave and come back. A client that reads it finds it finished.
func (x *exchange) respondInBackground(resp *response, item outputItem) {
	begun := *resp
	x.produced = x.outputTokens()
	x.finish(resp, item)
	if x.request.Stream {
		x.streamResponse(&begun, item, -1)
		return
	}
	begun.Status = "queued"
	x.reply(jsonReply(http.StatusOK, begun))
}

func (x *exchange) newResponse() *response {
	resp := &response{
		ID:                "resp_" + rand.Text(),
		Object:            "response",
		CreatedAt:         x.h.now().Unix(),
		Status:            "in_progress",
		Background:        x.request.Background,
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
	if said := x.text(x.produced); x.call != nil {
		item.Arguments = &said
	} else {
		item.Content = []contentPart{outputText(said)}
	}
	resp.Output = x.reasoning()
	resp.Output = append(resp.Output, item)
	resp.Usage = &responseUsage{
		InputTokens:        x.cost.prompt,
		InputTokensDetails: inputDetails{CachedTokens: x.cached},
		OutputTokens:       x.produced,
		TotalTokens:        x.cost.prompt + x.produced,
	}
	if resp.Store {
		body, _ := json.Marshal(resp)
		x.h.state.store(resp.ID, body)
		for _, item := range resp.Output {
			x.h.state.store(item.ID, []byte("{}"))
		}
	}
}

// reasoning is the output that comes before the message if the request asks for
// its encrypted content, which only this simulator can read.
func (x *exchange) reasoning() []outputItem {
	if !slices.Contains(x.request.Include, "reasoning.encrypted_content") {
		return nil
	}
	content := "gAAAAA" + rand.Text() + rand.Text()
	x.h.state.store(content, []byte("{}"))
	return []outputItem{{ID: "rs_" + rand.Text(), Type: "reasoning", Summary: &[]struct{}{}, EncryptedContent: content}}
}

// streamResponse sends the first events at once and the text after the latency
// of the first token. Chat sends nothing before that latency. It leaves out the
// events up to the number after.
func (x *exchange) streamResponse(resp *response, item outputItem, after int) {
	s := x.startStream()
	index, none, number := 0, []struct{}{}, 0
	send := func(e responseEvent) {
		e.SequenceNumber = number
		if number++; e.SequenceNumber > after {
			s.send(e.Type, e)
		}
	}
	send(responseEvent{Type: "response.created", Response: resp})
	send(responseEvent{Type: "response.in_progress", Response: resp})
	if !s.ended && !x.wait(x.firstTokenLatency()) {
		x.abort()
	}

	item.Status, x.produced = "in_progress", 0
	if x.call != nil {
		item.Arguments = new(string)
	} else {
		item.Content = []contentPart{}
	}
	send(responseEvent{Type: "response.output_item.added", OutputIndex: &index, Item: &item})
	part := outputText("")
	if x.call == nil {
		send(responseEvent{Type: "response.content_part.added", OutputIndex: &index, ItemID: item.ID, ContentIndex: &index, Part: &part})
	}
	for i := range x.outputTokens() {
		if i > 0 {
			s.pause()
		}
		if s.ended {
			return
		}
		word := x.token(i)
		x.produced++
		delta := responseEvent{Type: "response.function_call_arguments.delta", OutputIndex: &index, ItemID: item.ID, Delta: &word}
		if x.call == nil {
			delta.Type, delta.ContentIndex, delta.Logprobs = "response.output_text.delta", &index, &none
		}
		send(delta)
	}

	x.finish(resp, item)
	item = resp.Output[len(resp.Output)-1]
	if x.call != nil {
		send(responseEvent{Type: "response.function_call_arguments.done", OutputIndex: &index, ItemID: item.ID, Arguments: item.Arguments})
	} else {
		part = item.Content[0]
		send(responseEvent{Type: "response.output_text.done", OutputIndex: &index, ItemID: item.ID, ContentIndex: &index, Text: &part.Text, Logprobs: &none})
		send(responseEvent{Type: "response.content_part.done", OutputIndex: &index, ItemID: item.ID, ContentIndex: &index, Part: &part})
	}
	for i := range resp.Output {
		send(responseEvent{Type: "response.output_item.done", OutputIndex: &i, Item: &resp.Output[i]})
	}
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

// storedResponse answers requests about a response that was stored before.
func (x *exchange) storedResponse() {
	id := x.route.id
	body := x.h.state.stored(id)
	var resp response
	if body == nil || json.Unmarshal(body, &resp) != nil || resp.ID != id {
		x.reply(openaiError(http.StatusNotFound, "invalid_request_error", nil, fmt.Sprintf("Response with id '%s' not found.", id)))
		return
	}
	query := x.r.URL.Query()
	switch {
	case x.r.Method == http.MethodDelete:
		x.h.state.forget(id)
		x.reply(jsonReply(http.StatusOK, deletedResponse{ID: id, Object: "response", Deleted: true}))
	case x.route.about == "input_items":
		x.reply(jsonReply(http.StatusOK, object{"object": "list", "data": []object{}, "has_more": false, "first_id": nil, "last_id": nil}))
	case x.route.about == "cancel" && !resp.Background:
		x.reply(openaiError(http.StatusBadRequest, "invalid_request_error", nil, "Only background responses can be cancelled."))
	case x.route.about == "cancel":
		resp.Status = "cancelled"
		body, _ = json.Marshal(resp)
		x.h.state.store(id, body)
		x.reply(jsonReply(http.StatusOK, resp))
	case query.Get("stream") == "true":
		x.resume(&resp, query.Get("starting_after"))
	default:
		x.reply(&reply{status: http.StatusOK, contentType: jsonType, body: body})
	}
}

// resume streams a stored response from the event after a number on.
func (x *exchange) resume(resp *response, after string) {
	number := -1
	if after != "" {
		var err error
		if number, err = strconv.Atoi(after); err != nil || number < 0 {
			x.reply(openaiError(http.StatusBadRequest, "invalid_request_error", nil, "Invalid value for 'starting_after': expected an integer."))
			return
		}
	}
	limit := resp.Usage.OutputTokens
	x.request.MaxOutputTokens = &limit
	x.cost.prompt = resp.Usage.InputTokens
	item := resp.Output[len(resp.Output)-1]
	if item.Arguments != nil {
		x.call = newCall(item.CallID, item.Name, *item.Arguments)
	}
	begun := *resp
	begun.Status, begun.Output, begun.Usage = "in_progress", []outputItem{}, nil
	x.streamResponse(&begun, item, number)
}
