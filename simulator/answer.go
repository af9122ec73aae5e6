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
	switch op := x.route.op; {
	case op == model.OpModels:
		x.reply(wire.JSON(http.StatusOK, x.models()))
	case op == model.OpStoredResponse:
		x.storedResponse()
	case op == model.OpRealtime:
		x.realtime()
	case op == model.OpObject:
		x.reply(x.object())
	case op == model.OpResponse:
		x.respond()
	case x.request.Stream && (op == model.OpChat || op == model.OpCompletion):
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
		Length:  int64(x.h.OutputTokens),
		Prompt:  x.charge.cost.Prompt,
		Cached:  x.charge.cached,
		Now:     x.h.now,
	})
}

// whole generates a reply and sends it in one piece. If the client leaves before the
// end, the tokens generated until then count.
func (x *exchange) whole(g *model.Generation, build func() any) {
	first, each, n := x.firstTokenLatency(), time.Duration(x.h.TokenLatency), g.Tokens()
	start := x.h.now()
	if !x.client.Wait(generationTime(first, each, n)) {
		if each > 0 {
			x.charge.produced = g.Candidates() * min(n, max(0, int64((x.h.now().Sub(start)-first)/each)))
		}
		x.client.Leave()
	}
	x.charge.produced = g.Candidates() * n
	x.settle()
	x.reply(wire.JSON(http.StatusOK, build()))
}

// generationTime is how long n tokens take. It is bounded, so that a long reply
// with a long latency does not overflow and come at once.
func generationTime(first, each time.Duration, n int64) time.Duration {
	if n > 0 && each > (math.MaxInt64-first)/time.Duration(n) {
		return math.MaxInt64
	}
	return first + time.Duration(n)*each
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
		if e.Last {
			s.Last(e.Name, e.Data)
		} else {
			s.Send(e.Name, e.Data)
		}
		x.store(e.Stored)
		if s.Ended() {
			x.charge.produced = produced
			return
		}
	}
}

func (x *exchange) store(all []model.Stored) {
	for _, o := range all {
		x.h.state.store(o.ID, o.Body)
	}
}

// respond answers `POST responses`.
func (x *exchange) respond() {
	if previous := x.request.PreviousResponseID; previous != "" && x.h.state.stored(previous) == nil {
		x.reply(wire.OpenAIError(http.StatusBadRequest, "invalid_request_error", new("previous_response_not_found"),
			fmt.Sprintf("Previous response with id '%s' not found.", previous)))
		return
	}
	if missing := x.missing(x.body.fields); missing != nil {
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

// storedResponse answers requests about a response that was stored before.
func (x *exchange) storedResponse() {
	id := x.route.id
	body := x.h.state.stored(id)
	resp, ok := model.ReadResponse(id, body)
	if !ok {
		x.reply(notFound(fmt.Sprintf("Response with id '%s' not found.", id)))
		return
	}
	query := x.r.URL.Query()
	switch {
	case x.r.Method == http.MethodDelete:
		x.h.state.forget(id)
		x.reply(stored(fmt.Appendf(nil, `{"id":%q,"object":"response","deleted":true}`, id)))
	case x.route.about == "input_items":
		x.reply(wire.JSON(http.StatusOK, object{"object": "list", "data": []object{}, "has_more": false, "first_id": nil, "last_id": nil}))
	case x.route.about == "cancel" && !resp.InBackground():
		x.reply(badRequest("Only background responses can be cancelled."))
	case x.route.about == "cancel":
		cancelled := resp.Cancelled()
		x.h.state.store(id, cancelled)
		x.reply(stored(cancelled))
	case query.Get("stream") == "true":
		x.resume(resp, query.Get("starting_after"))
	default:
		x.reply(stored(body))
	}
}

// stored is a reply with JSON such as that of a stored object.
func stored(body []byte) *wire.Reply {
	return &wire.Reply{Status: http.StatusOK, ContentType: wire.JSONType, Body: body}
}

// resume streams a stored response from the event after a number on.
func (x *exchange) resume(resp *model.Response, after string) {
	skip := 0
	if after != "" {
		number, err := strconv.Atoi(after)
		if err != nil || number < 0 {
			x.reply(badRequest("Invalid value for 'starting_after': expected an integer."))
			return
		}
		skip = number + 1
	}
	x.stream(resp.Resume(int64(x.h.OutputTokens), x.h.now).Events(), skip)
}

// models lists the models as OpenAI does, with the fields in the same order.
func (x *exchange) models() any {
	type model struct {
		ID      string `json:"id"`
		Object  string `json:"object"`
		Created int64  `json:"created"`
		OwnedBy string `json:"owned_by"`
	}
	models := []model{}
	for _, id := range x.h.Deployments {
		models = append(models, model{ID: id, Object: "model", OwnedBy: x.h.Name})
	}
	return struct {
		Object string  `json:"object"`
		Data   []model `json:"data"`
	}{"list", models}
}
