package simulator

import (
	"fmt"
	"net/http"

	"github.com/openai-lb/caddy-openai-lb/simulator/internal/model"
	"github.com/openai-lb/caddy-openai-lb/simulator/internal/wire"
)

// The service tiers. A request asks for one in its body or, at Azure, in a header.
const (
	flex     = "flex"
	standard = "default"
	priority = "priority"
)

// chooseTier chooses the tier that serves the request. It returns the error reply if there is none.
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
	case asked == priority && x.hasCapacity(priority, x.h.PriorityCapacity):
		x.tier = priority
	case asked == "" || asked == "auto" || asked == standard || asked == priority:
		x.tier = standard
	default:
		return wire.InvalidParam("service_tier", fmt.Sprintf("Invalid service_tier argument: '%s' is not available for this model.", asked))
	}
	return nil
}

// hasCapacity reports whether this request for a tier belongs to the percentage that is served in it.
func (x *exchange) hasCapacity(tier string, percent *int) bool {
	n := x.h.state.next(tier)
	served := func(n int64) int64 { return (n*int64(*percent) + 50) / 100 }
	return served(n) > served(n-1)
}

// noFlexNow is the 429 of flex. OpenAI's "Flex processing" has it cost nothing, and Azure's, too.
func (x *exchange) noFlexNow() *wire.Reply {
	x.h.state.count(func(s *Status) { s.Throttled.add(flex) })
	rep := wire.OpenAIError(http.StatusTooManyRequests, "resource_unavailable", "resource_unavailable",
		"There is no flex capacity now. You were not charged. Try again later, or with another service_tier.")
	rep.Header = make(http.Header)
	x.charge.deployment.SetHeaders(rep.Header, x.h.now())
	return rep
}
