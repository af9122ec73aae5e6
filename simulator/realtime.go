package simulator

import (
	"cmp"
	"context"
	"net/http"

	"github.com/openai-lb/caddy-openai-lb/simulator/internal/limits"
	"github.com/openai-lb/caddy-openai-lb/simulator/internal/model"
	"github.com/openai-lb/caddy-openai-lb/simulator/internal/wire"
)

// open answers the handshake of a WebSocket, and has it served.
func (x *exchange) open(subprotocol string, serve func(*wire.Socket)) {
	if !wire.AsksWebSocket(x.r) {
		rep := wire.Invalid(http.StatusUpgradeRequired, "You must use a WebSocket for this endpoint.")
		rep.Header = http.Header{"Upgrade": {"websocket"}, "Connection": {"Upgrade"}}
		x.reply(rep)
		return
	}
	x.header(http.StatusSwitchingProtocols)
	x.client.Socket(subprotocol, func(socket *wire.Socket) {
		defer context.AfterFunc(x.h.ctx, socket.GoAway)()
		serve(socket)
	})
}

// takeRequests answers the requests of the Responses API that come as messages,
// until the client leaves.
func (x *exchange) takeRequests(socket *wire.Socket) {
	for message := range socket.Messages {
		asked := &exchange{h: x.h, r: x.r, client: x.client, arrived: x.h.now(), route: x.route,
			body: body{bytes: message}}
		asked.route.op, asked.route.deployment = model.OpResponse, ""
		if !asked.respondIn(socket) {
			return
		}
	}
}

// respondIn answers a request by events. It reports whether the client is still
// there.
func (x *exchange) respondIn(socket *wire.Socket) bool {
	rep := x.parseBody(wire.JSONType)
	if x.findDeployment(); rep == nil {
		rep = cmp.Or(x.admit(), x.missing())
	}
	defer x.settle()
	if rep != nil {
		return socket.Send(rep.Event())
	}
	for e := range x.generation().NewResponse().Events() {
		if e.Wait != model.NoWait && !socket.Wait(x.latency(e.Wait)) || !socket.Send(e.Data) {
			return false
		}
		x.charge.produced += e.Tokens
		x.store(e.Stored)
	}
	return true
}

// converse answers the client's events until it leaves.
func (x *exchange) converse(socket *wire.Socket) {
	session := model.NewSession(x.route.deployment, int64(x.h.OutputTokens))
	if !socket.Send(session.Created().Data) {
		return
	}
	for message := range socket.Messages {
		events, turn := session.Handle(message)
		for _, e := range events {
			if !socket.Send(e.Data) {
				return
			}
		}
		if turn != nil && !x.takeTurn(socket, turn) {
			return
		}
	}
}

// takeTurn generates a response in a session. It reports whether the session
// goes on.
func (x *exchange) takeTurn(socket *wire.Socket, turn *model.Turn) bool {
	cost := limits.Cost{Prompt: turn.Prompt, Output: turn.Output}
	if refused, ok := x.admitCost(cost); !ok {
		return socket.Send(turn.Refused(refused.Wait).Data)
	}
	x.h.state.count(func(s *Status) { s.Tokens.Input += cost.Prompt })
	produced := int64(0)
	defer func() {
		x.settleCost(cost, produced)
		turn.Said(produced)
	}()
	for e := range turn.Events() {
		if e.Wait != model.NoWait && !socket.Wait(x.latency(e.Wait)) || !socket.Send(e.Data) {
			return false
		}
		produced += e.Tokens
	}
	return true
}
