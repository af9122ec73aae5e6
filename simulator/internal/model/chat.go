package model

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"iter"
)

// completion is a reply of chat or completions, or a chunk of one.
type completion struct {
	Choices             []choice        `json:"choices"`
	Created             int64           `json:"created"`
	ID                  string          `json:"id"`
	Model               string          `json:"model"`
	Object              string          `json:"object"`
	PromptFilterResults json.RawMessage `json:"prompt_filter_results,omitempty"`
	SystemFingerprint   *string         `json:"system_fingerprint"`
	Usage               json.RawMessage `json:"usage,omitempty"`
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

var (
	fingerprint  = "fp_simulator"
	promptFilter = json.RawMessage(`[{"prompt_index":0,"content_filter_results":{}}]`)
)

// usage is what a reply cost, in the words of chat and completions.
func (g *Generation) usage() json.RawMessage {
	produced := g.Candidates() * g.Tokens()
	return fmt.Appendf(nil, `{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"audio_tokens":0,"cached_tokens":%d},`+
		`"completion_tokens_details":{"accepted_prediction_tokens":0,"audio_tokens":0,"reasoning_tokens":0,"rejected_prediction_tokens":0}}`,
		g.Prompt, produced, g.Prompt+produced, g.Cached)
}

func (g *Generation) newCompletion(object string) completion {
	prefix := "chatcmpl-"
	if g.Op == OpCompletion {
		prefix, object = "cmpl-", "text_completion"
	}
	return completion{
		Created:           g.Now().Unix(),
		ID:                prefix + rand.Text(),
		Model:             g.Model,
		Object:            object,
		SystemFingerprint: &fingerprint,
	}
}

func (g *Generation) completion() completion {
	c := g.newCompletion("chat.completion")
	content, reason := g.text(), g.finishReason()
	for i := range g.Request.choices(g.Op) {
		one := choice{Index: i, FinishReason: &reason}
		switch {
		case g.Op == OpCompletion:
			one.Text = &content
		case g.call != nil:
			one.Message = g.call.message(content)
		default:
			one.Message = &message{Role: "assistant", Content: &content}
		}
		c.Choices = append(c.Choices, one)
	}
	c.PromptFilterResults = promptFilter
	c.Usage = g.usage()
	return c
}

// message is a message with the call, as far as its arguments go.
func (c *toolCall) message(arguments string) *message {
	return &message{Role: "assistant", Content: (*string)(nil), ToolCalls: []toolCallPart{{
		ID: "call_" + rand.Text(), Type: "function", Function: toolCallFunction{c.name, arguments},
	}}}
}

// Events are the reply of chat and completions as Azure streams it. Chat begins with a chunk
// about the prompt that has neither id nor choices, and a role. Completions have what is about
// the prompt in their first chunk: their clients read a choice of every chunk. Then come the
// tokens, the finish, the usage if asked for, and the end.
func (g *Generation) Events() iter.Seq[Event] {
	return sequence(func(send func(Event) bool) {
		before := FirstToken // the wait before the first event
		chunk := g.newCompletion("chat.completion.chunk")
		chunk.PromptFilterResults = promptFilter
		if g.Op == OpChat {
			send(Event{Wait: before, Data: completion{Choices: []choice{}, PromptFilterResults: promptFilter}})
			before, chunk.PromptFilterResults = NoWait, nil
		}
		includeUsage := g.Request.StreamOptions != nil && g.Request.StreamOptions.IncludeUsage
		if includeUsage {
			// "All other chunks will also include a usage field, but with a null
			// value", says OpenAI's API reference.
			chunk.Usage = json.RawMessage("null")
		}
		sendEach := func(e Event, next func() choice) (ok bool) { // of the choices
			e.Wait = max(e.Wait, before)
			for i := range g.Request.choices(g.Op) {
				one := next()
				one.Index = i
				chunk.Choices = []choice{one}
				e.Data = chunk
				ok = send(e)
				e.Wait, e.Tokens = NoWait, 0 // they are those of all choices
				before, chunk.PromptFilterResults = NoWait, nil
			}
			return ok
		}
		first := 0 // the index of the only call
		if g.Op == OpChat {
			sendEach(Event{}, func() choice {
				if g.call == nil {
					return choice{Delta: &message{Role: "assistant", Content: new(string)}}
				}
				delta := g.call.message("")
				delta.ToolCalls[0].Index = &first
				return choice{Delta: delta}
			})
		}
		for word, wait := range g.tokens() {
			if !sendEach(Event{Wait: wait, Tokens: g.Candidates()}, func() choice {
				switch {
				case g.Op == OpCompletion:
					return choice{Text: &word}
				case g.call != nil:
					part := toolCallPart{Index: &first, Function: toolCallFunction{Arguments: word}}
					return choice{Delta: &message{ToolCalls: []toolCallPart{part}}}
				}
				return choice{Delta: &message{Content: &word}}
			}) {
				return
			}
		}
		reason, empty := g.finishReason(), ""
		sendEach(Event{}, func() choice {
			if g.Op == OpCompletion {
				return choice{FinishReason: &reason, Text: &empty}
			}
			return choice{FinishReason: &reason, Delta: &message{}}
		})
		if includeUsage {
			chunk.Choices, chunk.Usage = []choice{}, g.usage()
			send(Event{Data: chunk})
		}
		send(Event{Last: true})
	})
}
