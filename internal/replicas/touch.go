package replicas

import (
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/showntext"
)

// touch is whether a replica is in touch with the others. It is logged once
// when that changes, and not for each failure.
type touch struct {
	mu sync.Mutex
	// hears and compares tell whether these work.
	hears, compares bool
	now             standing
	lostAt          time.Time
}

type standing int

const (
	unknown standing = iota
	inTouch
	outOfTouch
)

// heard takes in that our own heartbeat came back in time.
func (t *touch) heard(r *Replica) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.hears = true
	t.settle(r, nil)
}

// lost takes in that no message comes any more.
func (t *touch) lost(r *Replica, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.hears = false
	t.settle(r, err)
}

// compared takes in what became of a comparison.
func (t *touch) compared(r *Replica, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.compares = err == nil
	t.settle(r, err)
}

func (t *touch) settle(r *Replica, err error) {
	logger := r.logger.Load()
	switch {
	case err != nil && t.now != outOfTouch:
		t.now, t.lostAt = outOfTouch, time.Now()
		t.hears, t.compares = false, false // both have to be seen again
		logger.Warn("not connected to other replicas", zap.String("error", bounded(err.Error())))
	case t.hears && t.compares && t.now != inTouch:
		seconds := zap.Skip()
		if t.now == outOfTouch {
			seconds = zap.Float64("seconds", time.Since(t.lostAt).Seconds())
		}
		t.now = inTouch
		logger.Info("connected to other replicas", zap.Int("replicas", len(r.Peers(time.Now()))), seconds)
	}
}

// is reports whether the replica is in touch.
func (t *touch) is() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.now == inTouch
}

// bounded is the beginning of a text that somebody else wrote.
func bounded(text string) string { return showntext.Cut(text, 300) }
