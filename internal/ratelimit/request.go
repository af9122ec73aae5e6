package ratelimit

import "time"

// Estimate describes a request before it is sent, so that its cost can be
// estimated.
type Estimate struct {
	// Prompt is the length of the prompt, in units of about a token. It is
	// multiplied by the caller's own ratio of tokens to length. It is 0 if the
	// request costs no tokens, so that no limit of tokens applies.
	Prompt int64
	// Output is the largest output that the request allows, in tokens. It is
	// Undeclared if the request sets no maximum, and 0 if its API has no
	// output.
	Output int64
	// Model is the requested model, and Replies the number of requested
	// replies. They determine how large the output may be.
	Model   string
	Replies int64
	// IsPart reports whether the request is part of another one that is in
	// flight, so that it does not count towards MaxRequests.
	IsPart bool
}

// Undeclared is the Output of a request that does not limit it.
const Undeclared = -1

// Cost is the final cost of a request. The zero Cost is that of a request that
// was not sent.
type Cost struct {
	Requests       int64
	Prompt, Output int64
	// Counted reports whether a backend counted the tokens. Estimates learn
	// only from such counts.
	Counted bool
	// Model is the model of the estimate.
	Model string
}

// Reason says why a request was refused.
type Reason uint8

// The reasons.
const (
	// OverRate means that a sliding window is used up. The request will be
	// admitted after Refusal.Wait.
	OverRate Reason = iota
	// OverQuota means that the limit of a day or a month is used up.
	OverQuota
	// TooLarge means that the prompt alone exceeds a limit.
	TooLarge
	// TooMany means that the caller has its maximum of concurrent requests, or
	// that this replica has its part of them. In the latter case, Used is less
	// than Allowed, and [Limiter.Await] may admit the request.
	TooMany
	// OverPart means that this replica's part of the remaining limit is used
	// up. It gets another part when the other replicas know of its use.
	OverPart
	// Unheard means that the request is larger than this replica's part of the
	// remaining limit. [Limiter.Await] may admit it.
	Unheard
	// InFlight means that this request and the requests in flight together
	// might exceed the limit.
	InFlight
)

// Refusal says why a request was refused.
type Refusal struct {
	Reason Reason
	// Limit is the limit that refused the request. If there are several, it is
	// the one with the longest wait.
	Limit Limit
	// Allowed is how much of the limit this replica may use: all of it, or its
	// share. Used is how much is used, and Requested is how much the request
	// needs. With TooMany, they are numbers of requests. With InFlight, Used
	// includes what the requests in flight may still use.
	Allowed, Used, Requested int64
	// Wait is the time until the request can be admitted, if nothing else is
	// used. With OverQuota, it ends when the next day or month begins.
	Wait time.Duration
}

// Names returns the names of the limit's kind and of its window. The limit of
// concurrent requests has no window.
func (r *Refusal) Names() (kind, window string) {
	if r.Reason == TooMany {
		return "max_requests", ""
	}
	return r.Limit.Kind.String(), r.Limit.Unit.String()
}

// MayClaim reports whether a claim, which [Limiter.Await] makes, may admit the
// request.
func (r *Refusal) MayClaim() bool { return r.Reason == OverPart || r.PassesSoon() }

// PassesSoon reports whether the request should wait for the other replicas,
// even if another request has a claim: it may pass as soon as they know of
// that.
func (r *Refusal) PassesSoon() bool {
	return r.Reason == Unheard || r.Reason == TooMany && r.Used < r.Allowed
}

// The numbers of the things besides limits that can refuse a request.
const (
	// ByMaxRequests means that the caller had its maximum of concurrent
	// requests.
	ByMaxRequests = MaxLimits + iota
	// ByModel and ByServiceTier mean that the request's model or service tier
	// is not certain to be allowed for the caller.
	ByModel
	ByServiceTier
	// ByDeny means that all requests of the caller are refused.
	ByDeny
	// ByReserve means that the rest of the backends' limits is reserved for
	// other tiers.
	ByReserve
)
