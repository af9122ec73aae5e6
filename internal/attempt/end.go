package attempt

import "time"

// End is how a reply has ended that a client gets.
type End struct {
	// Broken is why it was cut, or the error that it contained. It is nil if it
	// is whole, or if its client has left.
	Broken error
	// Paused reports whether the backend may have given it up because the
	// client did not read it.
	Paused bool
	// Begun reports whether the backend had sent data in a WebSocket that it
	// ended.
	Begun bool
}

// End is how the reply has ended. It is known when the body was read to its
// end.
func (r *Reply) End() (e End) {
	if end := r.end.Load(); end != nil {
		return *end
	}
	return e
}

// breaks records that the reply is broken, unless that is the client's fault:
// it left, or did not send all of its body.
func (r *Reply) breaks(e End) {
	if t := r.sent; t.Incoming.Context().Err() == nil && t.Body.Failure() == nil && !t.trip.upload.Stalled() {
		if r.end.Store(&e); r.broken != nil {
			r.broken(e)
		}
	}
}

// FirstByte is when the first byte of the body came that the client gets.
// Before, it is when the header went out.
func (r *Reply) FirstByte() time.Time { return r.firstByte }

// HasBegun reports whether the client of a committed reply need not wait for
// its first byte, or for the end of a reply without any.
func (r *Reply) HasBegun() bool { return r.body == nil || !r.body.waits }
