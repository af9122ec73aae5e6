// Package calleroptions has the types of the options about callers: their
// limits, and the tiers in which they are.
//
// The types are part of the core, so that the handler has these options in
// each build, and the pages of Caddy's site show them. Their meaning is not: a
// module that implements seam.AdmissionModule reads them from a Caddyfile,
// checks them, and applies them to requests.
package calleroptions

// Config has the options about callers.
type Config struct {
	// Callers are the limits of callers: keys with the same name share limits.
	// Default: no limits.
	//
	//	caller <name>|* deny
	//	caller <name>|* {
	Callers []Caller `json:"callers,omitempty"`

	// CallersFile is a file with blocks of `caller` that is read again when it
	// changes: limits, the tier and `deny`. Default: none.
	//
	//	callers_file <path>
	CallersFile *string `json:"callers_file,omitempty"`

	// Tiers are classes of callers, the most important one first; repeatable,
	// at most 8. Default: none.
	//
	//	tier <name> [default]
	//	tier <name> [default] {
	Tiers []Tier `json:"tiers,omitempty"`

	// Timezone is where days and months of limits begin: a name of the IANA
	// database, such as `Europe/Berlin`. Default: UTC.
	//
	//	timezone <name>
	Timezone string `json:"timezone,omitempty"`
}

// Caller is the block of options of one caller.
type Caller struct {
	// Name is the name of its client keys. `*` is each caller without its own
	// entry, counted separately. Required.
	Name string `json:"name"`

	// Allowance has the limits in the caller's block. A line of its tier that
	// its block does not have applies, too.
	Allowance

	// Tier is the tier of the caller's requests. Default: that of its line in
	// client_keys_file, or of its token, or the default tier.
	//
	//	tier <name>
	Tier string `json:"tier,omitempty"`

	// Deny refuses all requests of the caller with a 403, and excludes the
	// other options. With the name `*`, a client key is good only for callers
	// with their own entry. Default: false.
	Deny bool `json:"deny,omitempty"`
}

// Limit is how much a caller may use in a second, a minute, an hour, a day or a
// month.
type Limit struct {
	// Limit is a number and a unit, such as `200k/minute`. The number is a
	// whole number from 1 to 10^15, which may end in k, M or G. The unit is
	// second, minute, hour, day or month. Required.
	Limit string `json:"limit"`

	// Model is the only model whose requests count, by the name that clients
	// send. Default: requests for all models count.
	Model string `json:"model,omitempty"`

	// Then is the tier of requests over the limit. Default: they are refused.
	Then string `json:"then,omitempty"`
}

// Tier is a class of callers.
type Tier struct {
	// Name is the tier's name. Required.
	Name string `json:"name"`

	// Reserve is the share of its backends that the tier keeps for its
	// requests, in percent, while they ask for the model. The shares of all
	// tiers are at most 100%. Default: none; the tier gets what others leave.
	//
	//	reserve <percent>%
	Reserve *int `json:"reserve,omitempty"`

	// Default makes it the tier of callers for which nothing else names one.
	// Default: the last tier is.
	Default bool `json:"default,omitempty"`

	// Allowance has the limits of each caller of the tier. A limit in the
	// caller's own block replaces the same limit here.
	Allowance
}

// Allowance limits one caller, or each caller of a tier.
type Allowance struct {
	// Requests are limits of the number of requests, one for each unit and
	// model. Default: none.
	//
	//	requests <n>/<unit> [<model>] [then <tier>]
	Requests []Limit `json:"requests,omitempty"`

	// Tokens are limits of the number of tokens, one for each unit and model.
	// Default: none.
	//
	//	tokens <n>/<unit> [<model>] [then <tier>]
	Tokens []Limit `json:"tokens,omitempty"`

	// MaxRequests is how many requests a caller may have at a time. Default: no
	// limit.
	//
	//	max_requests <n>
	MaxRequests *int `json:"max_requests,omitempty"`

	// Models are the models that requests may name. Default: all.
	//
	//	models <name...>
	Models []string `json:"models,omitempty"`

	// Backends are the only backends that the requests may use, by their names,
	// in which `*` stands for any characters. Default: all.
	//
	//	backends <name...>
	Backends []string `json:"backends,omitempty"`

	// ServiceTiers are the service tiers that requests may name, also in
	// `x-ms-service-tier`: flex, default, fast (or priority, its older name),
	// ultrafast or auto. Default: all in bodies.
	//
	//	service_tiers <tier...>
	ServiceTiers []string `json:"service_tiers,omitempty"`
}
