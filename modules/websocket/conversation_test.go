package websocket

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/seam"
	"github.com/openai-lb/caddy-openai-lb/internal/sse"
)

// response is one of a test.
type response struct {
	watcher     sse.Watcher
	mu          sync.Mutex
	settled     int
	failed, cut bool
}

func (r *response) Watcher() *sse.Watcher { return &r.watcher }

func (r *response) Settle(failed, cut bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.settled, r.failed, r.cut = r.settled+1, failed, cut
}

// rules let all messages pass, except those that contain "refuse" or "close".
type rules struct {
	mu      sync.Mutex
	all     []*response
	unasked int
	create  func() // is called by Create
}

func (r *rules) begin() *response {
	r.mu.Lock()
	defer r.mu.Unlock()
	one := new(response)
	r.all = append(r.all, one)
	return one
}

func (r *rules) Create(text []byte) (seam.WebSocketResponse, [][]byte, *seam.WebSocketRefusal) {
	if r.create != nil {
		r.create()
	}
	if refusal := r.Refuse("response.create", text); refusal != nil {
		return nil, nil, refusal
	}
	if strings.Contains(string(text), "instead") {
		return r.begin(), [][]byte{[]byte("another "), []byte("text")}, nil
	}
	return r.begin(), nil, nil
}

func (r *rules) Refuse(_ string, text []byte) *seam.WebSocketRefusal {
	refusal := &seam.WebSocketRefusal{Reply: &http.Response{StatusCode: 401, Body: io.NopCloser(strings.NewReader(`{"error":{"code":"invalid_api_key"}}`))}}
	switch {
	case strings.Contains(string(text), "close"):
		refusal.Close = "the key has expired"
	case !strings.Contains(string(text), "refuse"):
		return nil
	}
	return refusal
}

func (r *rules) Unasked() seam.WebSocketResponse {
	r.unasked++
	return r.begin()
}

const refusedEvent = `{"type":"error","status":401,"error":{"code":"invalid_api_key"}}`

func TestRulesDecideOnEachMessageOfTheClient(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := new(rules)
		p := between(t, seam.WebSocketSession{Rules: r, First: new(response), Holds: true})
		p.client.say(`{"type":"response.create"}`)
		p.client.say(`{"type":"response.create","input":"refuse"}`)
		p.client.say(`{"type":"response.create","input":"instead"}`)
		p.client.send(text(`{"type":"response.`, false), more(`cancel"}`, true))
		p.backend.wants(`{"type":"response.create"}`, "another text", `{"type":"response.cancel"}`)
		p.client.wants(refusedEvent)

		// an event of ours comes between two messages of the backend's
		p.backend.send(text("begin", false))
		p.client.wants("begin…")
		p.client.say(`{"type":"response.create","input":"refuse"}`)
		time.Sleep(time.Second)
		p.backend.send(more("end", true))
		p.client.wants("+end", refusedEvent)

		p.client.say(`{"type":"response.create","input":"close"}`)
		p.client.say(`{"type":"response.create"}`)
		p.client.wants(refusedEvent, "close 1008 the key has expired", "end")
		p.backend.wants("close 1001 ")
		p.backend.Close()
		p.over(t)
		if n := len(r.all); n != 2 {
			t.Errorf("%d responses have begun", n)
		}
		for _, one := range r.all {
			if one.settled != 1 || !one.cut {
				t.Errorf("a response that the end has cut is %+v", one)
			}
		}
	})
}

// TestAnEventWaitsForTheEndOfAMessage but not too many of them.
func TestAnEventWaitsForTheEndOfAMessage(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		p := between(t, seam.WebSocketSession{Rules: new(rules), First: new(response), Holds: true})
		p.backend.send(text("begin", false))
		p.client.wants("begin…")
		for range maxPending + 1 {
			p.client.say(`{"type":"x","input":"refuse"}`)
		}
		p.backend.wants("close 1001 ")
		p.backend.send(more("end", true))
		p.client.wants("+end")
		for range maxPending {
			p.client.wants(refusedEvent)
		}
		p.client.wants("close 1008 too many messages wait for an answer", "end")
		p.over(t)
	})
}

func TestOpenResponsesAreBounded(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		for _, realtime := range []bool{true, false} {
			r, first := new(rules), seam.WebSocketResponse(nil)
			if !realtime {
				first = new(response)
			}
			p := between(t, seam.WebSocketSession{Rules: r, First: first, Holds: true})
			for i := range 1000 { // the backend begins responses by itself, and ends none
				event := fmt.Sprintf(`{"type":"response.created","response":{"id":"resp_%d%s"}}`, i, strings.Repeat("x", 1000))
				p.backend.say(event)
				p.client.wants(event)
			}
			open, last := 0, r.all[len(r.all)-1]
			for _, one := range r.all {
				one.mu.Lock()
				if one.settled == 0 {
					open++
				}
				one.mu.Unlock()
			}
			if open > maxOpen || last.settled > 0 {
				t.Errorf("%d responses are open", open)
			}
			p.client.say(`{"type":"response.create"}`)
			f := <-p.client.frames
			if !strings.Contains(string(f.Payload), "Too many responses are open") {
				t.Errorf("the client got %s", f.Payload)
			}
			p.client.Close()
			p.over(t)
			for _, one := range r.all {
				if one.settled != 1 {
					t.Errorf("a response is settled %d times", one.settled)
				}
			}
		}
	})
}

func TestIdsThatAreTooLongAreRefused(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		p := between(t, seam.WebSocketSession{Rules: strict{new(rules)}, First: new(response), Holds: true})
		for _, member := range []string{"event_id", "stream_id"} {
			p.client.say(`{"type":"response.create","` + member + `":"` + strings.Repeat("x", maxID+1) + `"}`)
			p.client.wants(refusedEvent)
		}
		p.client.Close()
		p.over(t)
	})
}

// strict refuses what is not clear.
type strict struct{ *rules }

func (s strict) Refuse(kind string, text []byte) *seam.WebSocketRefusal {
	if kind == "" {
		return s.rules.Refuse(kind, []byte("refuse"))
	}
	return s.rules.Refuse(kind, text)
}

// TestAPanicEndsOneWebSocket and is logged, whichever goroutine it is in.
func TestAPanicEndsOneWebSocket(t *testing.T) {
	panics := func() { panic("a defect") }
	for name, c := range map[string]struct {
		rules  *rules
		breaks func(p *pair)
	}{
		"the client's goroutine": {&rules{create: panics}, func(p *pair) { p.client.say(`{"type":"response.create"}`) }},
		"the handler's":          {new(rules), func(p *pair) { p.backend.say(`{"type":"response.completed"}`) }},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				first := new(response)
				first.watcher.Each = func(sse.Event) { panics() }
				p := between(t, seam.WebSocketSession{Rules: c.rules, First: first, Holds: true})
				c.breaks(p)
				p.client.wants("end")
				p.backend.wants("end")
				p.over(t)
				if logs := p.logs.FilterMessage("panic in a WebSocket").All(); len(logs) != 1 || logs[0].ContextMap()["error"] != "a defect" {
					t.Errorf("the log has %v", p.logs.All())
				}
			})
		})
	}
}
