package simulator

import (
	"cmp"
	"fmt"
	"iter"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/openai-lb/caddy-openai-lb/simulator/internal/model"
	"github.com/openai-lb/caddy-openai-lb/simulator/internal/wire"
)

// answer answers a request that was not refused.
func (x *exchange) answer() {
	if x.tier == flex && !x.client.Wait(time.Duration(x.h.FlexLatency)) {
		x.client.Leave()
	}
	switch op := x.route.op; {
	case op == model.OpModels:
		x.reply(wire.JSON(http.StatusOK, x.models()))
	case op == model.OpStoredResponse:
		if rep := x.storedResponse(); rep != nil {
			x.reply(rep)
		}
	case op == model.OpRealtime:
		x.open("realtime", x.converse)
	case op == model.OpResponses:
		x.open("", x.takeRequests)
	case op == model.OpObject:
		x.reply(x.object())
	case op == model.OpResponse:
		x.respond()
	case x.request.Stream && op == model.OpChat:
		x.stream(x.generation().Events(), 0)
	default:
		g := x.generation()
		x.whole(g, g.Whole)
	}
}

func (x *exchange) generation() *model.Generation {
	return model.New(model.Task{
		Op:      x.route.op,
		Request: x.request,
		Model:   cmp.Or(x.request.Model, x.route.deployment),
		Tier:    x.tier,
		Length:  int64(x.h.OutputTokens),
		Prompt:  x.charge.cost.Prompt,
		Cached:  x.charge.cached,
		Now:     x.h.now,
	})
}

// whole generates a reply and sends it in one piece. If the client leaves
// before the end, the tokens generated until then count.
func (x *exchange) whole(g *model.Generation, build func() any) {
	first, each, n := x.firstTokenLatency(), time.Duration(x.h.TokenLatency), g.Tokens()
	start := x.h.now()
	if !x.client.Wait(first + time.Duration(n)*each) {
		if each > 0 {
			x.charge.produced = min(n, max(0, int64((x.h.now().Sub(start)-first)/each)))
		}
		x.client.Leave()
	}
	x.charge.produced = n
	x.settle()
	x.reply(wire.JSON(http.StatusOK, build()))
}

// normalP95 is the 95th percentile of the normal distribution.
const normalP95 = 1.6448536

func (x *exchange) firstTokenLatency() time.Duration {
	latency := time.Duration(x.h.FirstTokenLatency)
	if p95 := time.Duration(x.h.FirstTokenLatencyP95); p95 > 0 && latency > 0 {
		spread := math.Log(float64(p95)/float64(latency)) / normalP95
		latency = time.Duration(float64(latency) * math.Exp(spread*x.h.normal()))
	}
	return model.FirstTokenLatency(latency, x.charge.cost.Prompt, x.charge.cached)
}

// latency is how long an event waits.
func (x *exchange) latency(wait model.Wait) time.Duration {
	if wait == model.FirstToken {
		return x.firstTokenLatency()
	}
	return time.Duration(x.h.TokenLatency)
}

// stream sends the events of a reply, but for the first ones that it skips. A
// response in the background counts in full until its first token is due.
func (x *exchange) stream(events iter.Seq[model.Event], skip int) {
	var s *wire.Stream
	counts, produced := false, int64(0)
	for e := range events {
		if e.Wait != model.NoWait && !x.client.Wait(x.latency(e.Wait)) {
			x.client.Leave()
		}
		if s == nil {
			x.header(http.StatusOK)
			s = x.client.Stream()
			s.Named, s.Skip = x.route.op == model.OpResponse, skip
		}
		produced += e.Tokens
		if counts = counts || e.Wait == model.FirstToken; counts {
			x.charge.produced = produced
		}
		s.Send(e.Name, e.Data)
		x.store(e.Stored)
		if s.Ended {
			x.charge.produced = produced
			return
		}
	}
}

func (x *exchange) store(all model.Stored) {
	for id, body := range all {
		x.h.state.store(id, body)
	}
}

// respond answers `POST responses`.
func (x *exchange) respond() {
	if missing := x.missing(); missing != nil {
		x.reply(missing)
		return
	}
	g := x.generation()
	resp := g.NewResponse()
	switch {
	case x.request.Background:
		x.respondInBackground(g, resp)
	case x.request.Stream:
		x.stream(resp.Events(), 0)
	default:
		x.whole(g, func() any {
			x.store(resp.Finish())
			return resp.Body()
		})
	}
}

// respondInBackground stores the whole response at once, so that its client may
// leave and come back. A client that reads it finds it finished.
func (x *exchange) respondInBackground(g *model.Generation, resp *model.Response) {
	begun := *resp
	x.charge.produced = g.Tokens()
	x.store(resp.Finish())
	if x.request.Stream {
		x.stream(begun.Events(), 0)
		return
	}
	x.reply(wire.JSON(http.StatusOK, begun.Queued()))
}

// storedResponse answers requests about a response that was stored before. It
// returns nil after it has streamed one.
func (x *exchange) storedResponse() *wire.Reply {
	id := x.route.object.id
	body := x.h.state.stored(id)
	resp, ok := model.ReadResponse(id, body)
	if !ok {
		return wire.Invalid(http.StatusNotFound, fmt.Sprintf("Response with id '%s' not found.", id))
	}
	switch x.r.Method + " " + x.route.object.part {
	case "GET ":
		if query := x.r.URL.Query(); query.Get("stream") == "true" {
			x.resume(resp, query.Get("starting_after"))
			return nil
		}
		return stored(body)
	case "DELETE ":
		return x.remove(id, id, "response")
	case "GET input_items":
		return wire.JSON(http.StatusOK,
			object{"object": "list", "data": []object{}, "has_more": false, "first_id": nil, "last_id": nil})
	case "POST cancel":
		if !resp.InBackground() {
			return wire.Invalid(http.StatusBadRequest, "Only background responses can be cancelled.")
		}
		cancelled := resp.Cancelled()
		x.h.state.store(id, cancelled)
		return stored(cancelled)
	}
	return x.notFound()
}

// resume streams a stored response, from the event after a number on.
func (x *exchange) resume(resp *model.Response, after string) {
	skip := 0
	if number, err := strconv.Atoi(after); err == nil {
		skip = max(0, number+1)
	}
	x.stream(resp.Resume(int64(x.h.OutputTokens), x.h.now).Events(), skip)
}

// models lists the models.
func (x *exchange) models() object {
	models := []object{}
	for _, id := range x.h.Deployments {
		models = append(models, object{"id": id, "object": "model", "created": 0, "owned_by": x.h.Name})
	}
	return object{"object": "list", "data": models}
}

// The service tiers. A request asks for one in its body or, at Azure, in a
// header.
const (
	flex     = "flex"
	standard = "default"
	priority = "priority"
	fast     = "fast" // the newer name of priority
)

// chooseTier chooses the tier that serves the request. It returns the error
// reply if there is none.
func (x *exchange) chooseTier() *wire.Reply {
	if op := x.route.op; op != model.OpChat && op != model.OpResponse {
		return nil
	}
	asked := x.request.ServiceTier
	if header := x.r.Header.Get("x-ms-service-tier"); header != "" && !x.route.openai {
		asked = header
	}
	switch {
	case asked == flex && !x.h.NoFlex && x.h.PTU == 0:
		if !x.hasCapacity(flex, x.h.FlexCapacity) {
			return x.noFlexNow()
		}
		x.tier = flex
	case (asked == priority || asked == fast) && x.hasCapacity(priority, x.h.PriorityCapacity):
		x.tier = asked
	case asked == "" || asked == "auto" || asked == standard || asked == priority || asked == fast:
		x.tier = standard
	default:
		return wire.InvalidParam("service_tier",
			fmt.Sprintf("Invalid service_tier argument: '%s' is not available for this model.", asked))
	}
	return nil
}

// hasCapacity reports whether this request for a tier belongs to the percentage
// that is served in it.
func (x *exchange) hasCapacity(tier string, percent *int) bool {
	n := x.h.state.next(tier)
	served := func(n int64) int64 { return (n*int64(*percent) + 50) / 100 }
	return served(n) > served(n-1)
}

// noFlexNow is the 429 of flex. OpenAI's "Flex processing" has it cost nothing,
// and Azure's, too.
func (x *exchange) noFlexNow() *wire.Reply {
	x.h.state.count(func(s *Status) { s.Throttled.add(flex) })
	rep := wire.OpenAIError(http.StatusTooManyRequests, "resource_unavailable", "resource_unavailable",
		"There is no flex capacity now. You were not charged. Try again later, or with another service_tier.")
	rep.Header = make(http.Header)
	x.charge.deployment.SetHeaders(rep.Header, x.h.now())
	return rep
}
