package verdict

import "net/http"

// Class is the meaning of a reply, or of a missing reply.
type Class string

const (
	// Served is a reply for the client: a success, a redirect, an upgrade.
	Served Class = "served"
	// ClientError is an error in the request. Every other backend would reject
	// the request too.
	ClientError Class = "client_error"
	// Throttled means that the rate limit is used up. The backend says when it
	// accepts requests again.
	Throttled Class = "throttled"
	// Quota means that the account has no budget left. It has to be paid for
	// before the backend can be used again.
	Quota Class = "quota"
	// TooLarge means that this one request exceeds a limit of the backend, and
	// would do so at any time. Smaller requests are served, so it does not
	// count against the backend. There are two kinds, which ContextLength
	// distinguishes.
	TooLarge Class = "too_large"
	// Overloaded means that the backend has no capacity at the moment.
	Overloaded Class = "overloaded"
	// Failed means that the backend tried and did not succeed.
	Failed Class = "failed"
	// Credential means that the backend does not accept the credential that it
	// got.
	Credential Class = "credential"
	// NotPermitted means that the credential is valid, but does not permit the
	// request.
	NotPermitted Class = "not_permitted"
	// NoCredential means that there was no credential to send, or that the
	// refused credential has been replaced since it was sent.
	NoCredential Class = "no_credential"
	// NoModel means that the backend does not have the model or deployment.
	NoModel Class = "no_model"
	// NotHere means that the backend does not offer what was asked for, such as
	// a path, an operation with the model, a service tier, or a feature for
	// which its account had to be verified. Another backend may offer it.
	NotHere Class = "not_here"
	// Loop means that the request came back to a balancer that it had passed,
	// because the backend's URL leads there.
	Loop Class = "loop"
	// Blocked means that a firewall or another server in front of the API did
	// not let this request pass.
	Blocked Class = "blocked"
	// Unclear means that the backend says that the response failed, with an
	// unknown code. Perhaps the request is the reason.
	Unclear Class = "unclear"
	// Unreachable means that there was no connection, so nothing of the request
	// was sent.
	Unreachable Class = "unreachable"
	// Timeout means that no headers arrived in time, or no first byte of a
	// stream.
	Timeout Class = "timeout"
	// Silent means that the backend accepts requests and sends nothing, so the
	// request moved to another backend.
	Silent Class = "silent"
	// BrokenStream means that the reply was cut, or contained an error, after
	// its beginning had gone to the client.
	BrokenStream Class = "broken_stream"
	// ClientLeft means that the client left before it had sent all of its
	// request.
	ClientLeft Class = "client_left"
	// ClientLeftWaiting means that the client left while it waited, before it
	// got anything.
	ClientLeftWaiting Class = "client_left_waiting"
)

// traits are the consequences of a class, except what an operator must do.
type traits struct {
	// failover reports whether the same request may succeed on another backend.
	// If the model's context is too short, that must be a backend with another
	// name for the model: see ContextLength.
	failover bool
	// promise reports whether the backend itself said when it accepts requests
	// again, so that it is not called before. All other classes only make it a
	// suspect.
	promise bool
	// blames reports whether the reply counts against the backend, and may
	// start a cooldown. It is false for Silent, because a slow request is not a
	// failure, and package latency decides what a silence means. It is false
	// for Loop, because the backend's URL is from the config, and requests that
	// do not come back are served there.
	blames bool
	// whole reports whether the class concerns the whole backend, and not only
	// the requested model.
	whole bool
	// credential reports whether the class concerns the credential, with its
	// permissions, limits and budget, rather than the backend.
	credential bool
	// request reports whether the request itself may have caused the failure.
	// It counts as the cause if it fails in this way at a second backend, too.
	request bool
	// shared reports whether replicas share a cooldown for the class. A refused
	// credential is not shared, because another replica may have a newer one.
	// Nor is an unreachable backend, because only this replica's network may be
	// down.
	shared bool
	// client reports whether the client is the cause if a request ends with the
	// class.
	client bool
}

// classes maps each class to its traits.
var classes = map[Class]traits{
	Served:            {},
	ClientError:       {client: true},
	Throttled:         {failover: true, promise: true, blames: true, credential: true, shared: true},
	Quota:             {failover: true, promise: true, blames: true, whole: true, credential: true, shared: true},
	TooLarge:          {failover: true, credential: true, client: true},
	Overloaded:        {failover: true, blames: true, shared: true},
	Failed:            {failover: true, blames: true, request: true, shared: true},
	Credential:        {failover: true, blames: true, whole: true, credential: true},
	NotPermitted:      {failover: true, blames: true, credential: true, shared: true},
	NoCredential:      {failover: true, blames: true, whole: true},
	NoModel:           {failover: true, blames: true, credential: true, request: true, shared: true},
	NotHere:           {failover: true, client: true},
	Loop:              {failover: true},
	Blocked:           {failover: true, client: true},
	Unclear:           {failover: true},
	Unreachable:       {failover: true, blames: true, whole: true},
	Timeout:           {failover: true, blames: true, request: true, shared: true},
	Silent:            {failover: true},
	BrokenStream:      {blames: true, shared: true},
	ClientLeft:        {client: true},
	ClientLeftWaiting: {},
}

// traits returns the traits of a class. An unknown class counts as a failure
// without further traits.
func (c Class) traits() traits {
	if row, ok := classes[c]; ok {
		return row
	}
	return traits{failover: true, blames: true}
}

// Failover reports whether the same request may succeed on another backend.
func (c Class) Failover() bool { return c.traits().failover }

// Promise reports whether the backend itself said when it accepts requests
// again.
func (c Class) Promise() bool { return c.traits().promise }

// Blames reports whether a reply of this class counts against the backend.
func (c Class) Blames() bool { return c.traits().blames }

// WholeBackend reports whether the class holds for all models of the backend.
func (c Class) WholeBackend() bool { return c.traits().whole }

// OfCredential reports whether the class concerns the credential that was used.
func (c Class) OfCredential() bool { return c.traits().credential }

// MayBeOfRequest reports whether the request itself may have caused the
// failure.
func (c Class) MayBeOfRequest() bool { return c.traits().request }

// Shared reports whether replicas share a cooldown for this class.
func (c Class) Shared() bool { return c.traits().shared }

// OfClient reports whether the client is the cause if a request ends with this
// class.
func (c Class) OfClient() bool { return c.traits().client }

// ContextLength reports whether a reply of this class and status means that the
// request is longer than the model's context. Any backend with the same model
// would reject it too. The other kind of TooLarge, a 429 or 402, is about a
// limit or a budget, which any other backend may have set higher.
func (c Class) ContextLength(status int) bool {
	return c == TooLarge && status == http.StatusBadRequest
}
