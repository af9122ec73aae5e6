package model

import (
	"crypto/rand"
	"encoding/json"
	"iter"
	"maps"
	"time"
)

// Session is a realtime session: a conversation over a WebSocket. It has text
// in and text out, and no audio.
type Session struct {
	length int64  // tokens of a response that nothing limits
	fields object // what the client sees of the session
	chars  int64  // of the conversation
}

// NewSession starts a session with a model, of which a response has up to
// length tokens.
func NewSession(model string, length int64) *Session {
	return &Session{length: length, fields: object{
		"object": "realtime.session", "type": "realtime", "id": "sess_" + rand.Text(), "model": model,
		"output_modalities": []string{"text"}, "instructions": "",
	}}
}

func sessionEvent(kind string, e object) Event {
	e["type"], e["event_id"] = kind, "event_"+rand.Text()
	return Event{Data: e}
}

// Created is the first event of the session.
func (s *Session) Created() Event {
	return sessionEvent("session.created", object{"session": s.fields})
}

// Handle returns the events that answer one of the client's, or the turn that
// it asks for.
func (s *Session) Handle(message []byte) ([]Event, *Turn) {
	var e object
	if json.Unmarshal(message, &e) != nil {
		return refuse(nil, "invalid_json", "We could not parse the JSON body of your event."), nil
	}
	switch e["type"] {
	case "session.update":
		fields, _ := e["session"].(object)
		id, model := s.fields["id"], s.fields["model"]
		maps.Copy(s.fields, fields)
		s.fields["id"], s.fields["model"] = id, model
		return []Event{sessionEvent("session.updated", object{"session": s.fields})}, nil
	case "conversation.item.create":
		item, ok := e["item"].(object)
		if !ok {
			return refuse(e, "missing_required_parameter", "Missing required parameter: 'item'."), nil
		}
		s.chars += textLength(item)
		if item["id"] == nil {
			item["id"] = "item_" + rand.Text()
		}
		item["object"], item["status"] = "realtime.item", "completed"
		return []Event{
			sessionEvent("conversation.item.added", object{"item": item}),
			sessionEvent("conversation.item.done", object{"item": item}),
		}, nil
	case "response.create":
		asked, _ := e["response"].(object)
		return nil, s.turn(asked)
	}
	return refuse(e, "invalid_value", "This event is not simulated."), nil
}

// refuse is an error about an event of the client's.
func refuse(about object, code, message string) []Event {
	return []Event{sessionEvent("error", object{"error": object{
		"type": "invalid_request_error", "code": code, "message": message, "param": nil, "event_id": about["event_id"],
	}})}
}

// Turn is a response in a session.
type Turn struct {
	Prompt, Output int64 // tokens of the prompt, and the most that may be generated

	session *Session
	reply   Generation
}

func (s *Session) turn(asked object) *Turn {
	t := &Turn{session: s, Output: defaultOutput}
	t.Prompt = tokensOf(s.chars + textLength(s.fields["instructions"]) + textLength(asked["instructions"]))
	t.reply.Length = s.length
	if most, ok := asked["max_output_tokens"].(float64); ok && most >= 1 {
		t.Output = int64(min(most, 1e9))
		t.reply.Length = min(s.length, t.Output)
	}
	return t
}

func newTurn(status string) object {
	return object{"object": "realtime.response", "id": "resp_" + rand.Text(), "status": status, "status_details": nil,
		"output": []any{}, "usage": nil}
}

// Refused is the event of a turn that a limit turned away.
func (t *Turn) Refused(wait time.Duration) Event {
	failed := newTurn("failed")
	failed["status_details"] = object{"type": "failed", "error": object{"type": "requests", "code": "rate_limit_exceeded",
		"message": "Rate limit reached. Please try again in " + wait.String() + "."}}
	return sessionEvent("response.done", object{"response": failed})
}

// Said records how much of the turn was generated. It belongs to the
// conversation from then on.
func (t *Turn) Said(tokens int64) { t.session.chars += 4 * tokens }

// Events are the turn as it is generated.
func (t *Turn) Events() iter.Seq[Event] {
	return sequence(func(sendEvent func(Event) bool) {
		answer := newTurn("in_progress")
		itemID := answer["id"].(string) + "_item"
		send := func(e Event, kind string, fields object) bool {
			fields["response_id"], fields["item_id"], fields["output_index"], fields["content_index"] = answer["id"],
				itemID, 0, 0
			e.Data = sessionEvent(kind, fields).Data
			return sendEvent(e)
		}
		item := func(status string, content ...any) object {
			return object{"object": "realtime.item", "id": itemID, "type": "message", "role": "assistant",
				"status": status, "content": content}
		}
		text := t.reply.text()
		part := object{"type": "output_text", "text": text}
		send(Event{}, "response.created", object{"response": answer})
		send(Event{Wait: FirstToken}, "response.output_item.added", object{"item": item("in_progress")})
		send(Event{}, "response.content_part.added", object{"part": object{"type": "output_text", "text": ""}})
		for word, wait := range t.reply.tokens() {
			if !send(Event{Wait: wait, Tokens: 1}, "response.output_text.delta", object{"delta": word}) {
				return
			}
		}
		answer["status"], answer["output"] = "completed", []any{item("completed", part)}
		produced := t.reply.Tokens()
		answer["usage"] = object{"total_tokens": t.Prompt + produced, "input_tokens": t.Prompt,
			"output_tokens": produced}
		send(Event{}, "response.output_text.done", object{"text": text})
		send(Event{}, "response.content_part.done", object{"part": part})
		send(Event{}, "response.output_item.done", object{"item": item("completed", part)})
		send(Event{}, "response.done", object{"response": answer})
	})
}
