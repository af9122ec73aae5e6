package simulator

import (
	"crypto/rand"
	"encoding/json"
)

// usage is what a reply cost, in the words of chat and completions.
type usage struct {
	PromptTokens            int64             `json:"prompt_tokens"`
	CompletionTokens        int64             `json:"completion_tokens"`
	TotalTokens             int64             `json:"total_tokens"`
	PromptTokensDetails     promptDetails     `json:"prompt_tokens_details"`
	CompletionTokensDetails completionDetails `json:"completion_tokens_details"`
}

type promptDetails struct {
	AudioTokens  int64 `json:"audio_tokens"`
	CachedTokens int64 `json:"cached_tokens"`
}

type completionDetails struct {
	AcceptedPredictionTokens int64 `json:"accepted_prediction_tokens"`
	AudioTokens              int64 `json:"audio_tokens"`
	ReasoningTokens          int64 `json:"reasoning_tokens"`
	RejectedPredictionTokens int64 `json:"rejected_prediction_tokens"`
}

// completion is a reply of chat or completions, or a chunk of one.
type completion struct {
	Choices             []choice             `json:"choices"`
	Created             int64                `json:"created"`
	ID                  string               `json:"id"`
	Model               string               `json:"model"`
	Object              string               `json:"object"`
	PromptFilterResults []promptFilterResult `json:"prompt_filter_results,omitempty"`
	SystemFingerprint   *string              `json:"system_fingerprint"`
	Usage               json.RawMessage      `json:"usage,omitempty"`
}

type choice struct {
	Index        int64    `json:"index"`
	Message      *message `json:"message,omitempty"` // whole chat
	Delta        *message `json:"delta,omitempty"`   // streamed chat
	Text         *string  `json:"text,omitempty"`    // completions
	Logprobs     *string  `json:"logprobs"`
	FinishReason *string  `json:"finish_reason"`
}

type message struct {
	Role      string         `json:"role,omitempty"`
	Content   any            `json:"content,omitempty"` // a *string, which is null in a message with a call
	ToolCalls []toolCallPart `json:"tool_calls,omitempty"`
}

// toolCallPart is a call, or what a chunk adds to it.
type toolCallPart struct {
	Index    *int             `json:"index,omitempty"` // of chunks
	ID       string           `json:"id,omitempty"`
	Type     string           `json:"type,omitempty"`
	Function toolCallFunction `json:"function"`
}

type toolCallFunction struct {
	Name      string `json:"name,omitempty"`
	Arguments string `json:"arguments"`
}

type promptFilterResult struct {
	PromptIndex          int      `json:"prompt_index"`
	ContentFilterResults struct{} `json:"content_filter_results"`
}

var (
	fingerprint  = "fp_simulator"
	promptFilter = []promptFilterResult{{}}
)

func (x *exchange) usage() json.RawMessage {
	u, _ := json.Marshal(usage{
		PromptTokens:        x.cost.prompt,
		CompletionTokens:    x.produced,
		TotalTokens:         x.cost.prompt + x.produced,
		PromptTokensDetails: promptDetails{CachedTokens: x.cached},
	})
	return u
}

func (x *exchange) newCompletion(object string) completion {
	prefix := "chatcmpl-"
	if x.route.op == opCompletion {
		prefix, object = "cmpl-", "text_completion"
	}
	return completion{
		Created:           x.h.now().Unix(),
		ID:                prefix + rand.Text(),
		Model:             x.model(),
		Object:            object,
		SystemFingerprint: &fingerprint,
	}
}

func (x *exchange) completion() any {
	c := x.newCompletion("chat.completion")
	content, reason := x.text(x.outputTokens()), x.finishReason()
	for i := range x.request.choices(x.route.op) {
		one := choice{Index: i, FinishReason: &reason}
		switch {
		case x.route.op == opCompletion:
			one.Text = &content
		case x.call != nil:
			one.Message = x.callMessage(content)
		default:
			one.Message = &message{Role: "assistant", Content: &content}
		}
		c.Choices = append(c.Choices, one)
	}
	c.PromptFilterResults = promptFilter
	c.Usage = x.usage()
	return c
}

// callMessage is a message with the call, as far as its arguments go.
func (x *exchange) callMessage(arguments string) *message {
	return &message{Role: "assistant", Content: (*string)(nil), ToolCalls: []toolCallPart{{
		ID: "call_" + rand.Text(), Type: "function", Function: toolCallFunction{x.call.name, arguments},
	}}}
}

// streamCompletion sends what Azure sends: a chunk about the prompt that has
// neither id nor choices, a role, the tokens, the finish, the usage if asked
// for, and the end.
func (x *exchange) streamCompletion() {
	if !x.wait(x.firstTokenLatency()) {
		x.abort()
	}
	s := x.startStream()
	chunk := x.newCompletion("chat.completion.chunk")
	includeUsage := x.request.StreamOptions != nil && x.request.StreamOptions.IncludeUsage
	if includeUsage {
		// "All other chunks will also include a usage field, but with a null
		// value", says OpenAI's API reference.
		chunk.Usage = json.RawMessage("null")
	}

	s.send("", completion{Choices: []choice{}, PromptFilterResults: promptFilter})
	sendEach := func(next func() choice) { // of the choices
		for i := range x.request.choices(x.route.op) {
			one := next()
			one.Index = i
			chunk.Choices = []choice{one}
			s.send("", chunk)
		}
	}
	first := 0 // the index of the only call
	if x.route.op == opChat {
		sendEach(func() choice {
			if x.call == nil {
				return choice{Delta: &message{Role: "assistant", Content: new(string)}}
			}
			delta := x.callMessage("")
			delta.ToolCalls[0].Index = &first
			return choice{Delta: delta}
		})
	}
	for i := range x.outputTokens() {
		if i > 0 {
			s.pause()
		}
		if s.ended {
			return
		}
		word := x.token(i)
		x.produced += x.candidates()
		sendEach(func() choice {
			switch {
			case x.route.op == opCompletion:
				return choice{Text: &word}
			case x.call != nil:
				part := toolCallPart{Index: &first, Function: toolCallFunction{Arguments: word}}
				return choice{Delta: &message{ToolCalls: []toolCallPart{part}}}
			}
			return choice{Delta: &message{Content: &word}}
		})
	}
	reason, empty := x.finishReason(), ""
	sendEach(func() choice {
		if x.route.op == opCompletion {
			return choice{FinishReason: &reason, Text: &empty}
		}
		return choice{FinishReason: &reason, Delta: &message{}}
	})
	if includeUsage {
		chunk.Choices, chunk.Usage = []choice{}, x.usage()
		s.send("", chunk)
	}
	s.done()
}
