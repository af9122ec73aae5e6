package openaiapi

import (
	"slices"
	"strings"
)

// TierHeader is Azure's header for the service tier of a request. It overrides the one in the body.
const TierHeader = "X-Ms-Service-Tier"

// Flex is the service tier that costs less, may be refused at any time and may take many minutes.
const Flex = "flex"

// serviceTiers are the service tiers that requests may name.
var serviceTiers = []string{"auto", "default", Flex, "priority"}

// IsServiceTier reports whether a request may name the service tier.
func IsServiceTier(tier string) bool { return slices.Contains(serviceTiers, tier) }

// ServiceTierNames lists the service tiers for an error.
func ServiceTierNames() string { return strings.Join(serviceTiers, ", ") }

// TakesServiceTier reports whether the API has a service tier for the request: for chats and responses.
func (q *Request) TakesServiceTier() bool {
	switch strings.TrimSuffix(q.Route.Operation, "/") {
	case "/chat/completions", "/responses":
		return q.Kind.Infers()
	}
	return false
}
