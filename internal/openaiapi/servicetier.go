package openaiapi

import (
	"cmp"
	"net/http"
	"slices"
	"strings"
)

// TierHeader is Azure's header for the service tier of a request. It overrides
// the tier in the body.
const TierHeader = "X-Ms-Service-Tier"

const (
	// Flex is the service tier that costs less, may be refused at any time and
	// may take many minutes.
	Flex = "flex"
	// Fast is the service tier that costs more. A request for it may be served
	// as [DefaultTier].
	Fast = "fast"
	// Priority is the older name of Fast, which many servers still use.
	Priority = "priority"
	// Ultrafast is the service tier that costs most, and has separate limits.
	Ultrafast = "ultrafast"
	// DefaultTier is the service tier of most requests.
	DefaultTier = "default"
	// OtherTier is the name for all unknown service tiers.
	OtherTier = "other"
)

// serviceTiers are the service tiers that requests may name.
var serviceTiers = []string{"auto", DefaultTier, Flex, Fast, Priority, Ultrafast}

// SynonymOf returns the other name of a service tier that has two names, else
// an empty string.
func SynonymOf(tier string) string {
	switch tier {
	case Fast:
		return Priority
	case Priority:
		return Fast
	}
	return ""
}

// IsServiceTier reports whether a request may name the service tier.
func IsServiceTier(tier string) bool { return slices.Contains(serviceTiers, tier) }

// ServiceTierNames lists the service tiers for an error.
func ServiceTierNames() string { return strings.Join(serviceTiers, ", ") }

// TierName returns the name of a service tier in logs and metrics. All tiers
// that a request may not name are OtherTier. Without a tier, the name is empty.
func TierName(tier string) string {
	if tier == "" {
		return ""
	}
	if i := slices.Index(serviceTiers, tier); i >= 0 {
		return serviceTiers[i]
	}
	return OtherTier
}

func readTier(value []byte) string {
	if string(value) == "null" {
		return ""
	}
	text := ""
	if value[0] == '"' {
		text, _ = unquote(value)
	}
	return TierName(cmp.Or(text, OtherTier))
}

// addTier records a service tier of the body. again reports whether it is not
// the first one. If two tiers differ, servers may use either, so the request's
// tier is OtherTier.
func (b *Body) addTier(tier string, again bool) {
	if b.OddTier = b.OddTier || again; b.OddTier && b.ServiceTier != tier {
		tier = OtherTier
	}
	b.ServiceTier = tier
}

// TakesServiceTier reports whether the API has service tiers for the request.
// It has them for chats and responses.
func (q *Request) TakesServiceTier() bool {
	return q.Kind.Infers() && inferenceOf(q.Route.Operation).hasServiceTiers
}

// ServiceTier returns the service tier that the client asks for. It is empty if
// the client names none, or the API has none for the request.
func (q *Request) ServiceTier() string {
	return q.TierIfTaken(cmp.Or(q.HeaderTier, q.Body.ServiceTier))
}

// TierIfTaken returns tier if the API has service tiers for the request, else
// an empty string.
func (q *Request) TierIfTaken(tier string) string {
	if tier == "" || !q.TakesServiceTier() {
		return ""
	}
	return tier
}

// MayTakeServiceTier reports whether a server may read a service tier in the
// request. It may in a chat, a response, or an unknown operation.
func (q *Request) MayTakeServiceTier() bool {
	switch strings.TrimSuffix(mostCommon(q.Route.Operation), "/") {
	case "/chat/completions", "/responses", "/responses/compact":
		return q.NeedsModel
	}
	return q.MayInfer
}

// ReadHeaderTier reads the service tier of the client's header. Its value may
// be a list or any other text.
func (q *Request) ReadHeaderTier(header http.Header) {
	if tiers := header[TierHeader]; len(tiers) > 0 && q.TakesServiceTier() {
		q.HeaderTier = TierName(cmp.Or(strings.Join(tiers, ","), OtherTier))
	}
}

// HidesServiceTier reports whether the request may name another service tier
// than those that were found.
func (q *Request) HidesServiceTier(body []byte) bool {
	return !q.Whole && !q.Body.Whole || q.Clarity == Unclear || q.HidesModel(body) || q.Body.OddTier
}
