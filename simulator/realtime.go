package simulator

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"net/http"
	"strings"
	"time"
)

// session is a realtime session: a conversation over a WebSocket. It has text in and
// text out, and no audio.
type session struct {
	x      *exchange
	socket *socket
	// beta makes the names of events those of the API before its general availability.
	beta   bool
	fields map[string]any // what the client sees of the session
	chars  int64          // of the conversation
	sent   int            // events so far
	left   chan struct{}  // closed when nothing more can be received
}

// event is one of the client's or of ours.
type event map[string]any

// realtime answers the handshake, and then the client's events until it leaves.
func (x *exchange) realtime() {
	if !asksWebSocket(x.r) {
		rep := openaiError(http.StatusUpgradeRequired, "invalid_request_error", nil, "You must use a WebSocket for this endpoint.")
		rep.header = http.Header{"Upgrade": {"websocket"}, "Connection": {"Upgrade"}}
		x.reply(rep)
		return
	}
	socket, err := x.accept("realtime")
	if err != nil {
		x.abort()
	}
	s := &session{x: x, socket: socket, left: make(chan struct{}), beta: x.route.classic || strings.Contains(x.r.Header.Get("OpenAI-Beta"), "realtime=v1")}
	s.fields = map[string]any{
		"object": "realtime.session", "type": "realtime", "id": "sess_" + rand.Text(), "model": x.route.deployment,
		"output_modalities": []string{"text"}, "instructions": "",
	}
	messages := make(chan []byte)
	over := make(chan struct{})
	defer func() {
		close(over)
		socket.close(closeNormal)
	}()
	unload := context.AfterFunc(x.h.ctx, func() { socket.close(closeGoingAway) })
	defer unload()
	go s.receive(messages, over)
	if !s.send("session.created", event{"session": s.fields}) {
		return
	}
	for {
		select {
		case message := <-messages:
			if !s.handle(message) {
				return
			}
		case <-s.left:
			return
		}
	}
}

// receive passes the client's messages on until there are no more, or the session is over.
func (s *session) receive(messages chan<- []byte, over <-chan struct{}) {
	defer close(s.left)
	for {
		message, err := s.socket.receive()
		if code, ok := codeOf(err); ok {
			s.socket.close(code)
		}
		if err != nil {
			return
		}
		select {
		case messages <- message:
		case <-over:
			return
		}
	}
}

// handle answers an event of the client's. It reports whether the session goes on.
func (s *session) handle(message []byte) bool {
	var e event
	if json.Unmarshal(message, &e) != nil {
		return s.refuse(nil, "invalid_json", "We could not parse the JSON body of your event.")
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
		return s.send("session.updated", event{"session": s.fields})
	case "conversation.item.create":
		item, ok := e["item"].(map[string]any)
		if !ok {
			return s.refuse(e, "missing_required_parameter", "Missing required parameter: 'item'.")
		}
		s.chars += textLength(item)
		if item["id"] == nil {
			item["id"] = "item_" + rand.Text()
		}
		item["object"], item["status"] = "realtime.item", "completed"
		if s.beta {
			return s.send("conversation.item.created", event{"item": item})
		}
		return s.send("conversation.item.added", event{"item": item}) && s.send("conversation.item.done", event{"item": item})
	case "response.create":
		asked, _ := e["response"].(map[string]any)
		return s.respond(asked)
	case "response.cancel":
		return s.refuse(e, "response_cancel_not_active", "Cancellation failed: no active response found.")
	}
	return s.refuse(e, "invalid_value", "This event is not simulated.")
}

// respond generates a response.
func (s *session) respond(asked map[string]any) bool {
	limit := int64(s.x.h.OutputTokens)
	c := cost{prompt: (s.chars + textLength(s.fields["instructions"]) + textLength(asked["instructions"]) + 3) / 4, output: 16}
	if most, ok := asked["max_output_tokens"].(float64); ok && most >= 1 {
		limit, c.output = min(limit, int64(min(most, 1e9))), int64(min(most, 1e9))
	}
	response := func(status string, output []any) event {
		return event{"object": "realtime.response", "id": "resp_" + rand.Text(), "status": status, "status_details": nil, "output": output, "usage": nil}
	}
	if refused, ok := s.x.limiter.admit(s.x.h.now(), c); !ok {
		s.x.h.state.count(func(st *Status) { st.Throttled.add(refused.limit) })
		failed := response("failed", []any{})
		failed["status_details"] = event{"type": "failed", "error": event{"type": "requests", "code": "rate_limit_exceeded",
			"message": "Rate limit reached. Please try again in " + refused.wait.String() + "."}}
		return s.send("response.done", event{"response": failed})
	}
	s.x.h.state.count(func(st *Status) {
		st.Tokens.Estimated += c.tokens()
		st.Tokens.Input += c.prompt
	})
	produced := int64(0)
	defer func() {
		s.x.limiter.settle(s.x.h.now(), c, produced)
		s.x.h.state.count(func(st *Status) { st.Tokens.Output += produced })
		s.chars += 4 * produced
	}()

	answer := response("in_progress", []any{})
	item := func(status string, content ...any) event {
		return event{"object": "realtime.item", "id": answer["id"].(string) + "_item", "type": "message", "role": "assistant", "status": status, "content": content}
	}
	about := func(more event) event {
		more["response_id"], more["item_id"], more["output_index"], more["content_index"] = answer["id"], answer["id"].(string)+"_item", 0, 0
		return more
	}
	delta, kind := "response.output_text", "output_text"
	if s.beta {
		delta, kind = "response.text", "text"
	}
	if !s.send("response.created", event{"response": answer}) || !s.wait(time.Duration(s.x.h.FirstTokenLatency)) ||
		!s.send("response.output_item.added", event{"response_id": answer["id"], "output_index": 0, "item": item("in_progress")}) ||
		!s.send("response.content_part.added", about(event{"part": event{"type": kind, "text": ""}})) {
		return false
	}
	for ; produced < limit; produced++ {
		if produced > 0 && !s.wait(time.Duration(s.x.h.TokenLatency)) || !s.send(delta+".delta", about(event{"delta": token(produced)})) {
			return false
		}
	}
	part := event{"type": kind, "text": text(produced)}
	answer["status"], answer["output"] = "completed", []any{item("completed", part)}
	answer["usage"] = event{"total_tokens": c.prompt + produced, "input_tokens": c.prompt, "output_tokens": produced}
	return s.send(delta+".done", about(event{"text": text(produced)})) &&
		s.send("response.content_part.done", about(event{"part": part})) &&
		s.send("response.output_item.done", event{"response_id": answer["id"], "output_index": 0, "item": item("completed", part)}) &&
		s.send("response.done", event{"response": answer})
}

// refuse sends an error about an event of the client's.
func (s *session) refuse(about event, code, message string) bool {
	return s.send("error", event{"error": event{"type": "invalid_request_error", "code": code, "message": message, "param": nil, "event_id": about["event_id"]}})
}

// send sends an event, and applies the fault before it. It reports whether the session
// goes on.
func (s *session) send(kind string, e event) bool {
	if s.disturb() {
		return false
	}
	e["type"], e["event_id"] = kind, "event_"+rand.Text()
	data, err := json.Marshal(e)
	if err != nil {
		panic("simulator: " + err.Error()) // cannot happen: all values come from JSON, or are of this package
	}
	s.sent++
	return s.socket.send(opcodeText, data) == nil
}

// disturb applies the fault of the session, if its event is the next one. It reports
// whether the session has ended.
func (s *session) disturb() bool {
	if s.sent != s.x.fault.n {
		return false
	}
	switch s.x.fault.kind {
	case faultTruncateRST:
		s.x.acted()
		s.socket.reset()
	case faultTruncateEOF:
		s.x.acted()
		s.socket.conn.Close()
	case faultHangAfter:
		s.x.acted()
		<-s.left
	default:
		return false
	}
	return true
}

// wait waits for d. It reports whether the client is still connected.
func (s *session) wait(d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-s.left:
		s.x.cancelled = true
	}
	return false
}
