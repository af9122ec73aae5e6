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
	// Throttled: the rate limit is used up. The backend says when it accepts
	// requests again.
	Throttled Class = "throttled"
	// Quota: the account has no budget left. It has to be paid for before the
	// backend can be used again.
	Quota Class = "quota"
	// TooLarge: this one request exceeds a limit of the backend, and would do
	// so at any time. Smaller requests are served, so it does not count against
	// the backend. There are two kinds, which ContextLength distinguishes.
	TooLarge Class = "too_large"
	// Overloaded: the backend has no capacity at the moment.
	Overloaded Class = "overloaded"
	// Failed: the backend tried and did not succeed.
	Failed Class = "failed"
	// Credential: the backend does not accept the credential that it was given.
	Credential Class = "credential"
	// NotPermitted: the credential is valid, but does not permit what was asked
	// for.
	NotPermitted Class = "not_permitted"
	// NoCredential: there was no credential to send, or the one that the
	// backend refused has been replaced since it was sent.
	NoCredential Class = "no_credential"
	// NoModel: the backend does not have the model or deployment.
	NoModel Class = "no_model"
	// NotHere: the backend does not offer what was asked for, such as a path,
	// an operation with the model, a service tier, or a feature for which its
	// account had to be verified. Another one may.
	NotHere Class = "not_here"
	// Loop: the request came back to a balancer that it had passed. The
	// backend's URL leads there.
	Loop Class = "loop"
	// Blocked: a firewall or another server in front of the API did not let
	// this request pass.
	Blocked Class = "blocked"
	// Unclear: the backend says that the response failed, in a word that is not
	// known. Perhaps the request is the reason.
	Unclear Class = "unclear"
	// Unreachable: there was no connection, so nothing of the request was sent.
	Unreachable Class = "unreachable"
	// Timeout: no headers came in time, or no first byte of a stream.
	Timeout Class = "timeout"
	// Silent: the backend accepts requests and sends nothing, so the request
	// went on to another one.
	Silent Class = "silent"
	// BrokenStream: the reply was cut, or contained an error, after its
	// beginning had gone to the client.
	BrokenStream Class = "broken_stream"
	// ClientLeft: the client went away before all of its request was there.
	ClientLeft Class = "client_left"
	// ClientLeftWaiting: the client went away while it waited, and had got
	// nothing.
	ClientLeftWaiting Class = "client_left_waiting"
)

// traits are what follows from a class, besides what an operator must do.
type traits struct {
	// failover: the same request may succeed on another backend. If the model's
	// context is too short, that is only a backend with another name for the
	// model: see ContextLength.
	failover bool
	// promise: the backend itself said when it accepts requests again, so that
	// it is not called before. All other classes only make it a suspect.
	promise bool
	// blames: the reply counts against the backend, and may start a cooldown.
	// Silent does not: a slow request is no failure, and package latency
	// decides what a silence means. Nor does Loop: the backend is where the
	// config says, and requests that do not come back are served there.
	blames bool
	// whole: the class holds for all of the backend, not only for the model
	// that was asked for.
	whole bool
	// credential: it concerns the credential that was used, its permissions,
	// limits and budget, rather than the backend.
	credential bool
	// request: the request itself may have caused the failure. It counts as the
	// cause if it fails so at a second backend, too.
	request bool
	// shared: replicas tell each other of a cooldown for the class. A refused
	// credential is not shared: another replica may have a newer one. Nor is a
	// backend that one of them cannot reach: its own network may be down.
	shared bool
	// client: it is the client's doing if a request ends so.
	client bool
}

// classes has a row for each class.
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

// traits returns the row of a class. A word that is none is a failure of which
// nothing else is known.
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

// Shared reports whether replicas tell each other of a cooldown for this class.
func (c Class) Shared() bool { return c.traits().shared }

// OfClient reports whether it is the client's doing if a request ends so.
func (c Class) OfClient() bool { return c.traits().client }

// ContextLength reports whether a reply of this class and status means that the
// request is longer than the model's context. Any backend with the same model
// would reject it too. The other kind of TooLarge, a 429 or 402, is about a
// limit or a budget, which any other backend may have set higher.
func (c Class) ContextLength(status int) bool {
	return c == TooLarge && status == http.StatusBadRequest
}
