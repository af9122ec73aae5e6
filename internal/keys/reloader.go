package keys

import (
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
)

const (
	// ReloadInterval is how often files are read.
	ReloadInterval = time.Second
	// problemInterval is how often an error that stays is logged.
	problemInterval = time.Minute
)

// Reloader reads secrets in files again while requests come, and when an
// operator looks: without either, no new secret is needed.
//
// While requests come, a timer reads in the background, a little more often
// than once a second, so that no request waits. Only the first request after a
// pause reads the secrets itself: one that was revoked meanwhile must not be
// good for it.
type Reloader struct {
	// Logger records the errors. Required.
	Logger *zap.Logger

	sources []*source
	// looked is when the files were last read, and asked reports whether a
	// request has come since.
	looked atomic.Pointer[time.Time]
	asked  atomic.Bool
	// reading is held while the files are read. It guards timer, which reads
	// them again.
	reading sync.Mutex
	timer   *time.Timer
	// closed reports whether nothing is read in the background any more.
	closed atomic.Bool
}

// backgroundInterval is how long after a look the timer looks again: before a
// request has to.
const backgroundInterval = ReloadInterval * 19 / 20

// source is a secret in a file.
type source struct {
	name string
	read func() error
	// failed is nil after a success.
	failed atomic.Pointer[failure]
}

// failure is why a secret is not what its file says: since when, and when that
// was last logged.
type failure struct{ since, logged time.Time }

// Secret is a secret in a file, as operators see it.
type Secret struct {
	Name string
	// StaleSince is since when it could not be reloaded. It is zero if it was.
	StaleSince time.Time
}

// Add adds a secret: its name in the log, and the function that reads it. The
// function's errors must not contain a key.
func (r *Reloader) Add(name string, read func() error) {
	r.sources = append(r.sources, &source{name: name, read: read})
}

// Refresh reads the secrets again, unless that was done within the last
// ReloadInterval, or is being done: a file system that hangs must not take one
// request after the other. It has them read in the background after that.
func (r *Reloader) Refresh() {
	if len(r.sources) == 0 {
		return
	}
	if !r.asked.Load() {
		r.asked.Store(true)
	}
	now := time.Now()
	// both times are monotonic: setting the clock does not change the
	// difference
	looked := r.looked.Load()
	if looked != nil && now.Sub(*looked) < ReloadInterval || !r.looked.CompareAndSwap(looked, &now) {
		return
	}
	r.look(now)
}

// look reads the secrets, unless that is being done.
func (r *Reloader) look(now time.Time) {
	if !r.reading.TryLock() {
		return
	}
	defer r.reading.Unlock()
	for _, s := range r.sources {
		s.refresh(r.Logger, now)
	}
	looked := time.Now() // it may have taken long
	r.looked.Store(&looked)
	if r.timer == nil {
		r.timer = time.AfterFunc(backgroundInterval, r.lookAgain)
	} else {
		r.timer.Reset(backgroundInterval)
	}
}

// Close ends the reading in the background. Requests of a config that was
// replaced still read the secrets.
func (r *Reloader) Close() { r.closed.Store(true) }

// lookAgain reads the secrets in the background, if requests have come since.
func (r *Reloader) lookAgain() {
	if r.asked.Swap(false) && !r.closed.Load() {
		now := time.Now()
		r.looked.Store(&now)
		r.look(now)
	}
}

func (s *source) refresh(logger *zap.Logger, now time.Time) {
	failed := s.failed.Load()
	err := s.read()
	switch {
	case err == nil && failed != nil:
		s.failed.Store(nil)
		logger.Info("secret reloaded", zap.String("secret", s.name))
	case err != nil && (failed == nil || now.Sub(failed.logged) >= problemInterval):
		next := failure{since: now, logged: now}
		if failed != nil {
			next.since = failed.since
		}
		s.failed.Store(&next)
		logger.Error("could not reload secret", zap.String("secret", s.name), zap.String("error", err.Error()))
	}
}

// Secrets reads the secrets again, as Refresh does, and returns them. A nil
// Reloader has none.
func (r *Reloader) Secrets() (secrets []Secret) {
	if r == nil {
		return nil
	}
	r.Refresh()
	for _, s := range r.sources {
		its := Secret{Name: s.name}
		if failed := s.failed.Load(); failed != nil {
			its.StaleSince = failed.since
		}
		secrets = append(secrets, its)
	}
	return secrets
}
