package pool

// Listener is told what happens to the members of a pool. It is called without
// a lock, by the goroutine of a request or of a timer, and must not wait.
type Listener interface {
	Happened(Event)
}

// Event is what happened to a member.
type Event struct {
	Happening Happening
	Member    *Member
	// Bench is the one that began, grew or ended.
	Bench Bench
}

// Happening is a kind of event.
type Happening int

const (
	nothing Happening = iota
	// Began: the member is benched.
	Began
	// Grew: its bench lasts longer than it first did.
	Grew
	// Ended: the bench is over. Its time has passed, a request was served before
	// that, or an operator ended it.
	Ended
	// Drained: an operator took the member out of use.
	Drained
	// Resumed: an operator put it back into use.
	Resumed
)

func (m *Member) tell(h Happening, b Bench) {
	for _, l := range m.pool.listeners {
		l.Happened(Event{h, m, b})
	}
}

// tellEnd tells that a bench is over, unless it is nil or that was told before.
func (m *Member) tellEnd(b *bench) {
	if b != nil && b.told.CompareAndSwap(false, true) {
		m.tell(Ended, b.Bench)
	}
}
