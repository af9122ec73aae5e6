package pool

import "slices"

// ServiceTiers are service tiers whose requests a backend refuses together:
// they have the same limits, or it is not known that they have others. A
// cooldown of a model covers one such group. So a backend without capacity for
// flex, or one whose low limit of ultrafast is used up, still gets the other
// requests for the model.
//
// Flex costs less and waits for what other requests leave. It counts towards
// their limits, and meets their cooldowns. So do tiers of which nothing is
// known: otherwise a client could escape from each Retry-After by another name,
// which it makes up. Ultrafast has limits and computers of its own, and meets
// only the cooldowns of the whole backend.
type ServiceTiers uint8

// The groups of service tiers.
const (
	// UsualTiers are default, auto, fast and its older name priority. Requests
	// without a service tier have one of them.
	UsualTiers ServiceTiers = iota
	// Flex is the service tier flex.
	Flex
	// Ultrafast is the service tier ultrafast.
	Ultrafast
	// UnknownTiers are all that are not known. They share a group, because
	// clients can make up any number of names.
	UnknownTiers
)

// tierNames are the names of the groups in logs, in the admin API and in the
// messages of replicas.
var tierNames = [...]string{Flex: "flex", Ultrafast: "ultrafast", UnknownTiers: "other"}

// TiersOf returns the group of a service tier, by a name of openaiapi.TierName,
// or of String.
func TiersOf(tier string) ServiceTiers {
	return ServiceTiers(max(0, slices.Index(tierNames[:], tier)))
}

// String returns the name of the group. It is empty for the usual tiers.
func (t ServiceTiers) String() string { return tierNames[t] }

// meetUsual reports whether the cooldowns of the usual tiers hold for t, too.
func (t ServiceTiers) meetUsual() bool { return t != Ultrafast }

// ShareLimits reports whether these tiers are certain to count towards the
// limits that the usual ones have, so that what a reply says about a limit
// holds for all of them.
func (t ServiceTiers) ShareLimits() bool { return t == UsualTiers || t == Flex }

// HaveOwnLimits reports whether these tiers are certain to have limits of their
// own, and to use up no other ones.
func (t ServiceTiers) HaveOwnLimits() bool { return t == Ultrafast }

// Meets reports whether the cooldown may keep requests away from the member.
func (m *Member) Meets(c Cooldown) bool {
	if m.ServiceTier == "" || c.Whole || c.Unreachable {
		return true
	}
	its := TiersOf(m.ServiceTier)
	return its == c.Tiers || c.Tiers == UsualTiers && its.meetUsual()
}

// Spares reports whether the cooldown leaves the member the requests that it
// usually gets: it is about one operation, about other service tiers than those
// of the member, or about unusual ones, of a member that gets requests as
// clients send them.
func (m *Member) Spares(c Cooldown) bool {
	if c.Operation != "" {
		return true
	}
	if m.ServiceTier == "" {
		return c.Tiers != UsualTiers
	}
	return !m.Meets(c)
}
