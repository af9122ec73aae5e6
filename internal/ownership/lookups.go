package ownership

import (
	"errors"
	"maps"
	"sync"
	"time"
)

// Lookups limits the concurrent lookups of each caller, so that a caller with
// many lookups delays neither these nor the lookups of other callers. Further
// lookups of the caller wait for their turn. After a lookup was late, the same
// caller's lookups are skipped for a while.
type Lookups struct {
	mu      sync.Mutex
	callers map[CallerDigest]*turns
}

// NewLookups returns a Lookups without any lookup.
func NewLookups() *Lookups { return &Lookups{callers: make(map[CallerDigest]*turns)} }

// Len returns the number of remembered callers.
func (l *Lookups) Len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.callers)
}

// turns are the lookups of one caller.
type turns struct {
	// taken contains an element for each lookup in progress.
	taken chan struct{}
	// users is the number of requests that have a turn or wait for one.
	users int
	// skipUntil is the time until which lookups are skipped.
	skipUntil time.Time
}

const (
	// atOnce is the maximum number of concurrent lookups of a caller.
	atOnce = 2
	// Skipping is how long a caller's lookups are skipped after a late one.
	Skipping = time.Second
	// maxTurn is the longest time that a lookup waits for its turn.
	maxTurn = time.Second
	// MaxIdle is the number of remembered callers above which callers without
	// lookups are forgotten.
	MaxIdle = 1024
)

var (
	// ErrNoAnswer reports that the store did not answer, or was not asked
	// because it had not answered shortly before.
	ErrNoAnswer = errors.New("no answer about owners in time")
	// ErrCrowded reports that a caller has more lookups than can be made in
	// time.
	ErrCrowded = errors.New("too many lookups of one caller")
)

// Do calls find when it is the caller's turn. find reports whether the store
// answered.
func (l *Lookups) Do(c CallerDigest, find func() (answered bool)) error {
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

func (l *Lookups) enter(c CallerDigest) *turns {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := l.callers[c]
	if t == nil {
		if len(l.callers) >= MaxIdle {
			now := time.Now()
			maps.DeleteFunc(l.callers,
				func(_ CallerDigest, t *turns) bool { return t.users == 0 && !now.Before(t.skipUntil) })
		}
		t = &turns{taken: make(chan struct{}, atOnce)}
		l.callers[c] = t
	}
	t.users++
	return t
}

func (l *Lookups) leave(c CallerDigest, t *turns) {
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

// take waits for a turn. It reports whether it got one in time.
func (t *turns) take() bool {
	select {
	case t.taken <- struct{}{}:
		return true
	case <-time.After(maxTurn):
		return false
	}
}
