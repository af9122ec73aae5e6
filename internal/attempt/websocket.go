package attempt

import (
	"context"
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// handshakes reports whether the request opens a WebSocket.
func (t *Outgoing) handshakes() bool { return t.Traits.Kind.IsHandshake() || t.Socket != nil }

// refusesHandshake reports whether the reply answers the handshake of a
// WebSocket, and not its first message.
func (r *Reply) refusesHandshake() bool {
	return r.sent != nil && r.sent.handshakes() && !r.sent.delivering
}

const (
	// lacksSocketFor is how long a backend counts as opening no WebSocket,
	// after it has said so.
	lacksSocketFor = 10 * time.Minute
	// mayLackSocketFor is how long it counts as opening none after a handshake
	// has failed.
	mayLackSocketFor = time.Minute
)

// judgeSocket classifies the answer to a handshake for a client's message that
// was not sent yet. Except for a throttle or a rejected credential, the answer
// is only about WebSockets. The same message may be served over HTTP, so the
// backend gets no cooldown. If the URL has a query, the backend may lack only
// that, so nothing is remembered.
func (r *Reply) judgeSocket(s *Sender) {
	t := r.sent
	if t.Socket == nil || t.delivering {
		return
	}
	if r.Status == http.StatusSwitchingProtocols && r.Err == nil {
		s.refused.Delete(t.Marks)
		return
	}
	lasts := mayLackSocketFor
	switch {
	case r.Refusal != nil, t.Incoming.Context().Err() != nil:
		return // it could not be sent, or the client has left
	case r.Class == verdict.Throttled, r.Class == verdict.Quota, r.Class == verdict.Unreachable,
		r.Class == verdict.Loop:
		return
	case r.Status == http.StatusUnauthorized, r.Status == http.StatusPaymentRequired:
		return
	case r.Status >= 400 && r.Status < 500 && r.Status != http.StatusRequestTimeout,
		r.Status == http.StatusNotImplemented:
		lasts = lacksSocketFor
	}
	if r.Class != verdict.Overloaded { // which says when to come back
		r.Class = verdict.NotHere
	}
	if t.Incoming.URL.RawQuery == "" {
		r.LacksSocket = true
		s.refused.Store(t.Marks, time.Now().Add(lasts))
	}
}

// RefusesSocket reports whether a backend, as its EndMarks, counts as opening
// no WebSocket for responses. This applies to all models: a handshake for
// responses names no model, because the first message does, and a handshake for
// another operation is not remembered.
func (s *Sender) RefusesSocket(backend EndMarks, now time.Time) bool {
	until, ok := s.refused.Load(backend)
	return ok && now.Before(until.(time.Time))
}

// openSocket sends the client's first message to the backend, and waits for the
// first event. An error event becomes the reply, as it would be over HTTP. Any
// other event remains the beginning of the WebSocket.
func (s *Sender) openSocket(r *Reply) {
	t, original := r.sent, r.Response
	conn := original.Body.(io.ReadWriteCloser)
	r.backend = t.Socket.Backend(conn)
	limit := s.firstByte(true, t.Last)
	if t.Traits.Tiers == pool.Flex {
		limit = max(limit, slowTimeout)
	}
	t.trip.timeout.start(limit, ErrNoReply)
	stop := context.AfterFunc(&t.trip, func() { conn.Close() })
	t.delivering = true
	failure, err := r.backend.Ask(t.Change.Request.With(t.Socket.Asked(), t.Change.Changes)...)
	stop()
	if !t.trip.timeout.stop() {
		err = t.trip.timeout.err()
	} else if t.trip.Err() != nil {
		err = context.Cause(&t.trip)
	}
	var fault apierror.Error
	if err != nil && !errors.As(err, &fault) {
		conn.Close()
		r.breakOff(verdict.OwnWords(err))
		if errors.Is(err, ErrNoReply) {
			r.Class = verdict.Timeout
		}
		return
	}
	if err != nil {
		failure = fault.Response(t.Incoming)
	}
	if failure == nil {
		return
	}
	conn.Close()
	failure.Request = original.Request
	r.Response, r.Status = failure, failure.StatusCode
	r.judge()
}

// errNotWritable is the error for a 101 whose connection cannot be written.
var errNotWritable = errors.New("the connection of the backend cannot be written")

// Relay relays messages between the client and the backend of a committed 101,
// until the WebSocket is over. It returns an error if they could not be
// connected.
func (r *Reply) Relay(client seam.WebSocket, session seam.WebSocketSession) error {
	if r.backend == nil {
		conn, ok := r.Response.Body.(io.ReadWriteCloser)
		if !ok {
			r.Response.Body.Close()
			return errNotWritable
		}
		r.backend = client.Backend(conn)
	}
	session.Secrets = r.secrets()
	stop := context.AfterFunc(r.sent.Incoming.Context(), client.Abort)
	defer stop()
	if end := client.Relay(r.backend, session); end.Broken != nil {
		r.end.Store(&End{Broken: end.Broken, Begun: end.Begun})
	}
	return nil
}

// Closing returns a context that is done when all WebSockets must close.
func (s *Sender) Closing() context.Context { return s.closing }
