package attempt

import "time"

// End describes how a reply to a client ended.
type End struct {
	// Broken is why the reply was cut, or the error that it contained. It is
	// nil if the reply is complete, or if its client has left.
	Broken error
	// Paused reports whether the backend may have cut the reply because the
	// client did not read it.
	Paused bool
	// Begun reports whether the backend had sent data in the WebSocket that it
	// ended.
	Begun bool
}

// End returns how the reply ended. It is known once the body was read to its
// end.
func (r *Reply) End() (e End) {
	if end := r.end.Load(); end != nil {
		return *end
	}
	return e
}

// breaks records that the reply is broken, unless it is the client's fault,
// because the client left or did not send all of its body.
func (r *Reply) breaks(e End) {
	if t := r.sent; t.Incoming.Context().Err() == nil && t.Body.Failure() == nil && !t.trip.upload.Stalled() {
		if r.end.Store(&e); r.broken != nil {
			r.broken(e)
		}
	}
}

// FirstByte returns when the first byte of the body arrived for the client.
// Before that, it is when the header went out.
func (r *Reply) FirstByte() time.Time { return r.firstByte }

// HasBegun reports whether the client of a committed reply need not wait for
// its first byte, or for its end if it has no byte.
func (r *Reply) HasBegun() bool { return r.body == nil || !r.body.waits }
