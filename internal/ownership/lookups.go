package ownership

import (
	"errors"
	"maps"
	"sync"
	"time"
)

// Lookups keeps the lookups of different callers apart. A caller has few of
// them on their way, and its others wait for their turn, so that no caller
// makes its own lookups late, or those of others, by their number. After one
// was late, the next ones of the same caller are skipped for a while, and no
// one else's.
type Lookups struct {
	mu      sync.Mutex
	callers map[Caller]*turns
}

// NewLookups returns lookups of which none is on its way.
func NewLookups() *Lookups { return &Lookups{callers: make(map[Caller]*turns)} }

// Len returns how many callers are remembered.
func (l *Lookups) Len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.callers)
}

// turns are those of one caller.
type turns struct {
	// taken has an element for each lookup that is on its way.
	taken chan struct{}
	// users is how many requests have a turn, or wait for one.
	users int
	// skipUntil is until when lookups are skipped.
	skipUntil time.Time
}

const (
	// atOnce is how many lookups of a caller are on their way at a time.
	atOnce = 2
	// Skipping is how long a caller's lookups are skipped after one was late.
	Skipping = time.Second
	// maxTurn is how long a lookup waits for its turn.
	maxTurn = time.Second
	// MaxIdle is up to how many callers are remembered that have no lookup now.
	MaxIdle = 1024
)

var (
	// ErrNoAnswer says that the store did not answer, or was not asked because
	// it had not answered shortly before.
	ErrNoAnswer = errors.New("no answer about owners in time")
	// ErrCrowded says that a caller has more lookups than can be made in time.
	ErrCrowded = errors.New("too many lookups of one caller")
)

// Do calls find, which reports whether the store answered, when it is the
// caller's turn.
func (l *Lookups) Do(c Caller, find func() (answered bool)) error {
	t := l.enter(c)
	defer l.leave(c, t)
	if c.Named() { // otherwise it may be any number of clients
		if !t.take() {
			return ErrCrowded
		}
		defer func() { <-t.taken }()
	}
	if l.skips(t) {
		return ErrNoAnswer
	}
	if !find() {
		l.mu.Lock()
		t.skipUntil = time.Now().Add(Skipping)
		l.mu.Unlock()
		return ErrNoAnswer
	}
	return nil
}

func (l *Lookups) enter(c Caller) *turns {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := l.callers[c]
	if t == nil {
		if len(l.callers) >= MaxIdle {
			now := time.Now()
			maps.DeleteFunc(l.callers, func(_ Caller, t *turns) bool { return t.users == 0 && !now.Before(t.skipUntil) })
		}
		t = &turns{taken: make(chan struct{}, atOnce)}
		l.callers[c] = t
	}
	t.users++
	return t
}

func (l *Lookups) leave(c Caller, t *turns) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if t.users--; t.users == 0 && t.skipUntil.IsZero() {
		delete(l.callers, c)
	}
}

func (l *Lookups) skips(t *turns) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return time.Now().Before(t.skipUntil)
}

// take waits for a turn. It reports whether there was one in time.
func (t *turns) take() bool {
	select {
	case t.taken <- struct{}{}:
		return true
	case <-time.After(maxTurn):
		return false
	}
}
