// Package attempt sends one request to one backend and finds out what its reply
// means.
//
// A [Sender] has the settings and connections that all attempts of a transport
// share. An [Outgoing] describes what is sent. Sender.Send returns a [Reply]:
// the response, if there is one, its class, and the evidence for the class. The
// reply has been read as far as its class depends on it, and nothing of it has
// gone to the client. The caller of the package decides what follows: the reply
// is committed to the client, kept in case no better one comes, or discarded.
//
// A status of 200 is not enough to know the class. A stream may begin with an
// error, a body may be no JSON, and a connection may break after the headers.
// So a reply is read ahead until its first content, and held back meanwhile,
// but for no longer than two seconds (TestAPreambleIsHeldBackForTwoSeconds).
// After that:
//
//   - Every byte reaches the client once and in order
//     (TestRandomRepliesReachClientsAsTheyAre).
//   - A reply that its backend cut is cut for the client, too, and never ended
//     properly (TestACutReplyIsCutForTheClient).
//   - A failure that the client caused, by uploading or reading slowly or by
//     leaving, is not held against the backend
//     (TestAClientThatPausesStartsNoCooldown).
//   - net/http sends no request a second time by itself
//     (TestNetHTTPDoesNothingTwice).
//
// A connection that became another protocol's, such as a WebSocket, is a
// tunnel: both of its sides are closed soon after one of them has ended, and a
// WebSocket that the backend broke off is reported
// (TestATunnelEndsAGracePeriodAfterOneOfItsSides).
//
// [PassiveHealth] has the options that turn a class into the length of a
// cooldown.
//
// After Provision, a Sender is safe for concurrent use. An Outgoing and its
// Reply belong to the goroutine that serves the client's request. A [Watch] is
// called by other goroutines, too, while Send waits for the reply.
package attempt

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/replay"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
	"github.com/openai-lb/caddy-openai-lb/internal/sse"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// Sender sends requests to backends, and classifies their replies. It has the
// connections and the time limits that its attempts share. After Provision, it
// is safe for concurrent use.
type Sender struct {
	PassiveHealth
	Options
	// HTTP has the options of the connections to the backends. Provision sets
	// RoundTripper from it.
	HTTP         *reverseproxy.HTTPTransport
	RoundTripper http.RoundTripper

	// sharesConnections reports whether HTTP/2 is used without TLS.
	sharesConnections bool
	// CloseDelay is how long WebSockets stay open once the config that opened
	// them is replaced.
	CloseDelay time.Duration
	// closing is done when open WebSockets must be closed.
	closing context.Context
	// refused maps a backend, as its EndMarks, to the time until which it
	// counts as opening no WebSocket. An entry is made when the backend refuses
	// a WebSocket and deleted when it opens one.
	refused sync.Map
}

// Outgoing is a request to one backend: the client's request, with the address,
// the header and the body for this backend, and what must be known to classify
// its reply. It is sent once.
type Outgoing struct {
	// Incoming is the request to copy. The fields below replace its URL, host,
	// header and body.
	Incoming *http.Request
	// Address is where the request goes. It is nil if the context of Incoming
	// has the address, as reverse_proxy's does.
	Address *Address
	URL     url.URL
	Host    string
	Header  http.Header
	Body    *replay.Body
	// Change describes the changes of the body.
	Change replay.Options

	Traits Traits
	// Last reports whether no other attempt can follow.
	Last bool
	// Final reports whether the body will not be sent again after this attempt,
	// whatever its result. The body is then released as soon as net/http cannot
	// need it any more, because a reply may take ten minutes and its prompt
	// many megabytes.
	Final bool
	// Patience limits the wait for the first byte, so that the client is still
	// there for the next attempt. A backend that takes longer is not to blame.
	// 0 means that only the options limit the wait.
	Patience time.Duration
	// CountsTokens reports whether the tokens that a reply to inference reports
	// are read as it passes, also from a stream.
	CountsTokens bool
	// CountsContent reports whether the content of a reply is counted, too, in
	// case it reports no tokens.
	CountsContent bool
	// CountsAll reports whether tokens are read from any reply, even if the
	// request is not known as inference.
	CountsAll bool
	// FindsID reports whether the id of the reply's own object is read.
	FindsID bool
	// Secrets are the keys that are sent with the request. No reply may show
	// one of them.
	Secrets keys.Secrets
	// Fields removes fields of the reply.
	Fields Fields
	// Interims counts the interim responses of all attempts. They are written
	// to Client at once. Interims is nil if a trace in the context of Incoming
	// passes them on, as reverse_proxy's does.
	Interims *atomic.Int32
	Client   http.ResponseWriter
	// Watch follows the wait for the reply. It may be nil.
	Watch Watch
	// Marks decides whether a stream must end with an end mark.
	Marks EndMarks
	// IDs returns the reader that learns ids from a reply that served the
	// request. Both IDs and its result may be nil.
	IDs func(*http.Response) IDReader

	// Socket is the client's end of a WebSocket that was opened before a
	// backend is chosen. The backend gets its first message, and the reply
	// begins with the answer to that message. It is nil for other requests.
	Socket seam.WebSocket

	// sent is the state of the request while it is in progress. It is allocated
	// together with the request, to spare the garbage collector.
	sent
}

// Traits are the parts of a request that decide the meaning of a reply.
type Traits struct {
	Kind   openaiapi.Kind
	Stream bool
	// Operation is the request's operation, as in [openaiapi.Route]. Model is
	// the backend's name for its model.
	Operation, Model string
	// Cost is how many tokens the request counts as in a rate limit.
	Cost int64
	// Tiers is the group of the request's service tier. A reply of flex may
	// take many minutes to begin.
	Tiers pool.ServiceTiers
}

// Watch follows the wait for the first byte of a reply. The byte may arrive
// long before the time limit, or not at all. No two of the methods are called
// at the same time. A timer calls Late, but not after Heard, Left or Served,
// and the attempt does not end before or while it is called. No method is
// called for an upload that fails without a reply.
type Watch interface {
	// Sent records that the request was sent. For a long body, that is when all
	// of it was written, or when its upload has stalled. Sent returns the time
	// until Late is called.
	Sent(now time.Time) time.Duration
	// Unsent undoes Sent, because the upload continues. Sent is called again
	// later.
	Unsent()
	// Late returns the time until it is called again if no byte has arrived by
	// then. If it returns 0, the attempt is given up with the class silent,
	// unless its reply arrives at this moment.
	Late(now time.Time) time.Duration
	// Heard records that the first byte has arrived.
	Heard(now time.Time)
	// Left records that the attempt ended without a byte.
	Left(now time.Time)
	// Served records that the reply whose first byte was heard has served the
	// request.
	Served()
}

// EndMarks remembers, per model, the operations whose streams from a backend
// have had an end mark. Once a stream has had one, a stream without it counts
// as cut.
type EndMarks interface {
	// Ended records that a stream of the operation with the model had an end
	// mark.
	Ended(model, operation string)
	// Ends reports whether such a stream has had an end mark before.
	Ends(model, operation string) bool
}

// Fields removes the fields of a reply that must not reach the client.
type Fields interface {
	// Final removes fields from a header.
	Final(http.Header)
	// Trailer removes fields from trailers.
	Trailer(http.Header)
}

// IDReader reads the body of a reply as it passes.
type IDReader interface {
	// Join makes the reader read the events of a stream. Watch is not called
	// then.
	Join(*sse.Watcher)
	// Watch reads the next bytes. end reports whether they are the last.
	Watch(p []byte, end bool)
}

// sent is the state of a request that is in progress.
type sent struct {
	trip trip
	// closing is the sender's closing context.
	closing context.Context
	// kind is the media type of the reply's body.
	kind  string
	out   *http.Request
	reply Reply
	body  body
	exact exact
	// delivering reports whether the sending of a WebSocket's first message has
	// begun.
	delivering bool
	// impatient reports whether the client's patience limits the wait for the
	// first byte.
	impatient bool
}

// Send sends the request once and returns its reply. It may send the request a
// second time only if a reused connection lost it.
func (s *Sender) Send(t *Outgoing) *Reply {
	reply := s.send(t)
	if t.Watch == nil {
		return reply
	}
	if reply.Response != nil && !reply.cut {
		t.trip.timeout.heard() // what follows is not read ahead
	}
	switch unheard, sent := t.trip.timeout.unwatched(); {
	case unheard == nil && reply.Class == verdict.Served:
		t.Watch.Served()
	case unheard != nil && sent:
		t.Watch.Left(time.Now())
	}
	return reply
}

func (s *Sender) send(t *Outgoing) *Reply {
	t.begin(s)
	reply := &t.reply
	reply.sent = t
	res, err := s.RoundTripper.RoundTrip(t.out)
	if err != nil && t.sendsAgain(err) {
		res, err = s.RoundTripper.RoundTrip(t.out)
	}
	t.trip.endInterim()
	if err == nil {
		res.Trailer = nil // the names that it announces
		if err = t.check(res); err != nil {
			res.Body.Close()
		}
	}
	if t.Final {
		t.Body.Release()
	}
	if err != nil {
		t.trip.timeout.end()
		reply.Failure = t.trip.failure(err)
		reply.Class = reply.Failure.class
		reply.judgeSocket(s)
		return reply
	}
	reply.Response, reply.Status = res, res.StatusCode
	reply.body = t.watchOver(s, res)
	reply.judge()
	reply.judgeHandshake(s)
	if reply.Class == verdict.Served {
		s.open(reply)
	}
	if reply.body == nil { // otherwise more steps follow, until the body is closed
		t.trip.timeout.end()
	}
	return reply
}

// slowTimeout is how long a request of the service tier flex may wait for its
// first byte, and for each later one. OpenAI advises this timeout.
const slowTimeout = 15 * time.Minute

// begin makes the outgoing request, and starts its time limit.
func (t *Outgoing) begin(s *Sender) {
	t.trip.address, t.trip.shares = t.Address, s.sharesConnections
	t.trip.needsHTTP1 = t.handshakes()
	if t.Incoming.ProtoAtLeast(1, 1) { // HTTP/1.0 has no interim responses (RFC 9110 section 15.2)
		t.trip.interims, t.trip.client = t.Interims, t.Client
	}
	t.closing = s.closing
	t.trip.begin(t.Incoming.Context())
	t.out = t.Incoming.WithContext(&t.trip)
	t.out.URL, t.out.Host, t.out.Header, t.out.Close = &t.URL, t.Host, t.Header, false
	if t.Address != nil {
		t.out.Trailer = nil // no operation has any, and they may hold whatever a header may
	}
	if t.Traits.mustStream() {
		openaiapi.AcceptStream(t.Header)
	}
	if t.Change.AskUsage {
		t.Header["Accept-Encoding"] = []string{"identity"} // its chunk has to be taken out again
	}
	t.Change.Repeatable, t.Change.Progress = t.Traits.Kind.Repeatable(), &t.trip.timeout
	t.trip.upload = t.Body.Attach(t.out, &t.Change)
	if t.Final {
		t.trip.final = t.Body
	}
	limit := s.firstByte(t.Traits.Stream, t.Last)
	switch {
	case t.handshakes():
		limit = handshakeTimeout
	case t.Traits.Tiers == pool.Flex:
		limit = max(limit, slowTimeout)
	}
	if t.impatient = t.Patience > 0 && t.Patience < limit; t.impatient {
		limit = t.Patience
	}
	if t.handshakes() && t.Address != nil {
		delete(t.Header, "Sec-Websocket-Extensions") // what is compressed cannot be read
		delete(t.Header, "Sec-WebSocket-Extensions") //nolint:canonicalheader // as RFC 6455 spells it
	}
	if t.Watch != nil {
		after := time.Duration(0)
		if !t.trip.upload.Long() {
			after = t.Watch.Sent(time.Now())
		}
		t.trip.timeout.watched(t.Watch, after)
	}
	t.trip.timeout.start(limit, ErrNoReply)
}

// sendsAgain reports whether the request is sent a second time, on a new
// connection, because a reused connection lost it. Only a request that may be
// executed twice is.
func (t *Outgoing) sendsAgain(err error) bool {
	if !t.Change.Repeatable || !t.Body.Whole() || !t.trip.lost(err) || !t.trip.upload.Abandon() {
		return false
	}
	t.trip.endUpload()
	t.trip.isSecond = true
	t.trip.sent.Store(false)
	t.trip.upload = t.Body.Attach(t.out, &t.Change)
	return true
}

// check returns an error if no client may see the response.
func (t *Outgoing) check(res *http.Response) error {
	t.kind = openaiapi.ContentType(res.Header)
	switch {
	case res.StatusCode < 100 || res.StatusCode > 999: // net/http's server would panic
		return ErrNoHTTP
	case res.StatusCode == http.StatusSwitchingProtocols && !switches(t.Header, res): // it would be empty
		return ErrWrongProtocol
	case !t.opens(res) && !t.trip.timeout.stop():
		return t.trip.timeout.err()
	}
	if res.StatusCode != http.StatusOK || res.Body == http.NoBody {
		t.trip.timeout.heard()
	}
	return nil
}

// opens reports whether the time limit of the request continues until the first
// byte of the body.
func (t *Outgoing) opens(res *http.Response) bool {
	return t.Traits.Kind.Infers() && res.StatusCode == http.StatusOK && t.kind == openaiapi.TypeEventStream &&
		!openaiapi.IsCompressed(res.Header)
}

// watchOver limits the time of each read of a response's body. It returns nil
// for a response without a body, or whose body is a connection.
func (t *Outgoing) watchOver(s *Sender, res *http.Response) *body {
	if res.Body == http.NoBody || res.StatusCode == http.StatusSwitchingProtocols {
		return nil
	}
	t.body = body{source: t.exact.bodyOf(res), response: res, secrets: t.Secrets, fields: t.Fields,
		deadline: &t.trip.timeout, idle: time.Duration(s.StreamIdleTimeout)}
	if !openaiapi.IsCompressed(res.Header) {
		t.body.random = t.Secrets.Random()
	}
	if t.Traits.Tiers == pool.Flex {
		t.body.idle = max(t.body.idle, slowTimeout)
	}
	res.Body = &t.body
	return &t.body
}

// judgeHandshake classifies a 2xx that answers the handshake of a WebSocket.
// For inference, it is a failure of the backend. Other operations may not use
// WebSockets, so their reply is passed on.
func (r *Reply) judgeHandshake(s *Sender) {
	if r.sent.handshakes() && r.Status >= 200 && r.Status < 300 && r.sent.Traits.Kind.Infers() {
		r.breakOff(ErrNoUpgrade)
	}
	r.judgeSocket(s)
}

// switches reports whether the response, a 101, switches to the protocol that
// the header of the request asks for.
func switches(header http.Header, res *http.Response) bool {
	asked := header.Get("Upgrade")
	_, connection := res.Body.(io.ReadWriteCloser)
	return connection && asked != "" && strings.EqualFold(asked, res.Header.Get("Upgrade"))
}
