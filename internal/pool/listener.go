package pool

// Listener is told what happens to the members of a pool. It is called from
// the goroutine of a request, without a lock, and must not wait.
type Listener interface {
	Happened(Event)
}

// Event is what happened to a member.
type Event struct {
	Happening Happening
	Member    *Member
	Bench     Bench
}

// Happening is a kind of event.
type Happening int

const (
	nothing Happening = iota
	// Began: the member is benched.
	Began
	// Grew: its bench lasts longer than it first did.
	Grew
	// Ended: the bench is over, because a request was not refused.
	Ended
)

func (m *Member) tell(h Happening, b *bench) {
	for _, l := range m.listeners {
		l.Happened(Event{h, m, b.Bench})
	}
}
