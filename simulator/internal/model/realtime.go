package model

import (
	"crypto/rand"
	"encoding/json"
	"iter"
	"time"
)

// Session is a realtime session: a conversation over a WebSocket. It has text in and
// text out, and no audio.
type Session struct {
	length int64 // tokens of a response that nothing limits
	// beta makes the names of events those of the API before its general availability.
	beta   bool
	fields map[string]any // what the client sees of the session
	chars  int64          // of the conversation
}

// NewSession starts a session with a model, of which a response has up to length
// tokens.
func NewSession(model string, length int64, beta bool) *Session {
	return &Session{length: length, beta: beta, fields: map[string]any{
		"object": "realtime.session", "type": "realtime", "id": "sess_" + rand.Text(), "model": model,
		"output_modalities": []string{"text"}, "instructions": "",
	}}
}

// event is one of the client's or of ours.
type event map[string]any

func sessionEvent(kind string, e event) Event {
	e["type"], e["event_id"] = kind, "event_"+rand.Text()
	return Event{Data: e}
}

// Created is the first event of the session.
func (s *Session) Created() Event { return sessionEvent("session.created", event{"session": s.fields}) }

// Handle returns the events that answer one of the client's, or the turn that it asks
// for.
func (s *Session) Handle(message []byte) ([]Event, *Turn) {
	var e event
	if json.Unmarshal(message, &e) != nil {
		return refuse(nil, "invalid_json", "We could not parse the JSON body of your event."), nil
	}
	switch e["type"] {
	case "session.update":
		if fields, ok := e["session"].(map[string]any); ok {
			for name, value := range fields {
				if name != "id" && name != "object" && name != "model" {
					s.fields[name] = value
				}
			}
		}
		return []Event{sessionEvent("session.updated", event{"session": s.fields})}, nil
	case "conversation.item.create":
		item, ok := e["item"].(map[string]any)
		if !ok {
			return refuse(e, "missing_required_parameter", "Missing required parameter: 'item'."), nil
		}
		s.chars += textLength(item)
		if item["id"] == nil {
			item["id"] = "item_" + rand.Text()
		}
		item["object"], item["status"] = "realtime.item", "completed"
		if s.beta {
			return []Event{sessionEvent("conversation.item.created", event{"item": item})}, nil
		}
		return []Event{
			sessionEvent("conversation.item.added", event{"item": item}),
			sessionEvent("conversation.item.done", event{"item": item}),
		}, nil
	case "response.create":
		asked, _ := e["response"].(map[string]any)
		return nil, s.turn(asked)
	case "response.cancel":
		return refuse(e, "response_cancel_not_active", "Cancellation failed: no active response found."), nil
	}
	return refuse(e, "invalid_value", "This event is not simulated."), nil
}

// refuse is an error about an event of the client's.
func refuse(about event, code, message string) []Event {
	return []Event{sessionEvent("error", event{"error": event{
		"type": "invalid_request_error", "code": code, "message": message, "param": nil, "event_id": about["event_id"],
	}})}
}

// Turn is a response in a session.
type Turn struct {
	Prompt, Output int64 // tokens of the prompt, and the most that may be generated

	session *Session
	length  int64
}

func (s *Session) turn(asked map[string]any) *Turn {
	t := &Turn{session: s, length: s.length, Output: 16}
	t.Prompt = tokensOf(s.chars + textLength(s.fields["instructions"]) + textLength(asked["instructions"]))
	if most, ok := asked["max_output_tokens"].(float64); ok && most >= 1 {
		t.Output = int64(min(most, 1e9))
		t.length = min(t.length, t.Output)
	}
	return t
}

func newTurn(status string, output []any) event {
	return event{"object": "realtime.response", "id": "resp_" + rand.Text(), "status": status, "status_details": nil, "output": output, "usage": nil}
}

// Refused is the event of a turn that a limit turned away.
func (t *Turn) Refused(wait time.Duration) Event {
	failed := newTurn("failed", []any{})
	failed["status_details"] = event{"type": "failed", "error": event{"type": "requests", "code": "rate_limit_exceeded",
		"message": "Rate limit reached. Please try again in " + wait.String() + "."}}
	return sessionEvent("response.done", event{"response": failed})
}

// Said records how much of the turn was generated. It belongs to the conversation
// from then on.
func (t *Turn) Said(tokens int64) { t.session.chars += 4 * tokens }

// Events are the turn as it is generated.
func (t *Turn) Events() iter.Seq[Event] {
	return sequence(func(sendEvent func(Event) bool) {
		send := func(e Event, kind string, fields event) bool {
			e.Data = sessionEvent(kind, fields).Data
			return sendEvent(e)
		}
		answer := newTurn("in_progress", []any{})
		itemID := answer["id"].(string) + "_item"
		item := func(status string, content ...any) event {
			return event{"object": "realtime.item", "id": itemID, "type": "message", "role": "assistant", "status": status, "content": content}
		}
		about := func(more event) event {
			more["response_id"], more["item_id"], more["output_index"], more["content_index"] = answer["id"], itemID, 0, 0
			return more
		}
		delta, kind := "response.output_text", "output_text"
		if t.session.beta {
			delta, kind = "response.text", "text"
		}
		send(Event{}, "response.created", event{"response": answer})
		send(Event{Wait: FirstToken}, "response.output_item.added", event{"response_id": answer["id"], "output_index": 0, "item": item("in_progress")})
		send(Event{}, "response.content_part.added", about(event{"part": event{"type": kind, "text": ""}}))
		for word, wait := range tokens(t.length, token) {
			if !send(Event{Wait: wait, Tokens: 1}, delta+".delta", about(event{"delta": word})) {
				return
			}
		}
		said := text(t.length)
		part := event{"type": kind, "text": said}
		answer["status"], answer["output"] = "completed", []any{item("completed", part)}
		answer["usage"] = event{"total_tokens": t.Prompt + t.length, "input_tokens": t.Prompt, "output_tokens": t.length}
		send(Event{}, delta+".done", about(event{"text": said}))
		send(Event{}, "response.content_part.done", about(event{"part": part}))
		send(Event{}, "response.output_item.done", event{"response_id": answer["id"], "output_index": 0, "item": item("completed", part)})
		send(Event{}, "response.done", event{"response": answer})
	})
}
