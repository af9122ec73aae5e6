package pool

import "slices"

// ServiceTiers is a group of service tiers whose requests a backend refuses
// together, because they share limits or are not known to have separate ones. A
// cooldown of a model covers one group. So a backend without capacity for flex,
// or with a used-up limit of ultrafast, still gets other requests for the
// model.
//
// Flex is cheaper and runs on capacity that other requests leave free. It
// counts towards the limits of the usual tiers, so cooldowns of the usual tiers
// also apply to it. They apply to unknown tiers as well: otherwise a client
// could evade each Retry-After by making up another name. Ultrafast has
// separate limits and computers, so only cooldowns of the whole backend apply
// to it besides its own.
type ServiceTiers uint8

// The groups of service tiers.
const (
	// UsualTiers are default, auto, fast and priority, the older name of fast.
	// A request without a service tier has one of these.
	UsualTiers ServiceTiers = iota
	// Flex is the service tier flex.
	Flex
	// Ultrafast is the service tier ultrafast.
	Ultrafast
	// UnknownTiers are all other names. They share one group, because clients
	// can make up any number of names.
	UnknownTiers
)

// tierNames are the names of the groups in logs, in the admin API and in the
// messages of replicas.
var tierNames = [...]string{Flex: "flex", Ultrafast: "ultrafast", UnknownTiers: "other"}

// TiersOf returns the group of a service tier. tier is a result of
// openaiapi.TierName or of String.
func TiersOf(tier string) ServiceTiers {
	return ServiceTiers(max(0, slices.Index(tierNames[:], tier)))
}

// String returns the name of the group. It is empty for the usual tiers.
func (t ServiceTiers) String() string { return tierNames[t] }

// meetUsual reports whether cooldowns of the usual tiers also apply to t.
func (t ServiceTiers) meetUsual() bool { return t != Ultrafast }

// ShareLimits reports whether t is certain to count towards the limits of the
// usual tiers, so that a reply's statement about a limit is true for all of
// them.
func (t ServiceTiers) ShareLimits() bool { return t == UsualTiers || t == Flex }

// HaveOwnLimits reports whether t is certain to have separate limits, and to
// use up no others.
func (t ServiceTiers) HaveOwnLimits() bool { return t == Ultrafast }

// Meets reports whether the cooldown can apply to requests that the member
// gets.
func (m *Member) Meets(c Cooldown) bool {
	if m.ServiceTier == "" || c.Whole || c.Unreachable {
		return true
	}
	tiers := TiersOf(m.ServiceTier)
	return tiers == c.Tiers || c.Tiers == UsualTiers && tiers.meetUsual()
}

// Spares reports whether the cooldown leaves the member its usual requests. It
// does so if it covers only one operation, or only service tiers that the
// member does not have or that are unusual for it.
func (m *Member) Spares(c Cooldown) bool {
	if c.Operation != "" {
		return true
	}
	if m.ServiceTier == "" {
		return c.Tiers != UsualTiers
	}
	return !m.Meets(c)
}
