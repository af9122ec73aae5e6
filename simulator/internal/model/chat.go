package model

import (
	"crypto/rand"
	"iter"
)

// object is a JSON object. encoding/json sorts its fields, as Azure does.
type object = map[string]any

// usage returns the tokens of a chat.
func (g *Generation) usage() object {
	produced := g.Tokens()
	return object{
		"prompt_tokens": g.Prompt, "completion_tokens": produced, "total_tokens": g.Prompt + produced,
		"prompt_tokens_details":     object{"audio_tokens": 0, "cached_tokens": g.Cached},
		"completion_tokens_details": object{"accepted_prediction_tokens": 0, "audio_tokens": 0, "reasoning_tokens": 0, "rejected_prediction_tokens": 0},
	}
}

var promptFilter = []object{{"prompt_index": 0, "content_filter_results": object{}}}

// newChat returns a chat, or a chunk of one, without choices.
func (g *Generation) newChat(kind string) object {
	return object{"id": "chatcmpl-" + rand.Text(), "object": kind, "created": g.Now().Unix(), "model": g.Model,
		"service_tier": g.Tier, "system_fingerprint": "fp_simulator"}
}

// choices is the only choice, of which message is the "message" or the "delta".
func choices(name string, message object, finish any) []object {
	return []object{{"index": 0, name: message, "logprobs": nil, "finish_reason": finish}}
}

// chat is the whole reply.
func (g *Generation) chat() object {
	message := object{"role": "assistant", "content": g.text()}
	if g.call != nil {
		message = g.call.message(g.text())
	}
	chat := g.newChat("chat.completion")
	chat["choices"], chat["prompt_filter_results"], chat["usage"] = choices("message", message, g.finishReason()),
		promptFilter, g.usage()
	return chat
}

// message is a message with the call, as far as its arguments go.
func (c *toolCall) message(arguments string) object {
	return object{"role": "assistant", "content": nil, "tool_calls": []object{{
		"id": "call_" + rand.Text(), "type": "function", "function": object{"name": c.name, "arguments": arguments},
	}}}
}

// Events are a chat as Azure streams it: a chunk about the prompt that has
// neither id nor choices, the role, the tokens, the finish, the usage if asked
// for, and the end.
func (g *Generation) Events() iter.Seq[Event] {
	return sequence(func(send func(Event) bool) {
		chunk := g.newChat("chat.completion.chunk")
		if g.Request.StreamOptions.IncludeUsage {
			// "All other chunks will also include a usage field, but with a
			// null value", says OpenAI's API reference.
			chunk["usage"] = nil
		}
		add := func(e Event, delta object, finish any) bool {
			chunk["choices"], e.Data = choices("delta", delta, finish), chunk
			return send(e)
		}
		begin := object{"role": "assistant", "content": ""}
		if g.call != nil {
			begin = g.call.message("")
			begin["tool_calls"].([]object)[0]["index"] = 0
		}
		send(Event{Wait: FirstToken,
			Data: object{"choices": []object{}, "created": 0, "id": "", "model": "", "object": "",
				"prompt_filter_results": promptFilter}})
		add(Event{}, begin, nil)
		for word, wait := range g.tokens() {
			delta := object{"content": word}
			if g.call != nil {
				delta = object{"tool_calls": []object{{"index": 0, "function": object{"arguments": word}}}}
			}
			if !add(Event{Wait: wait, Tokens: 1}, delta, nil) {
				return
			}
		}
		add(Event{}, object{}, g.finishReason())
		if g.Request.StreamOptions.IncludeUsage {
			chunk["choices"], chunk["usage"] = []object{}, g.usage()
			send(Event{Data: chunk})
		}
		send(Event{})
	})
}
