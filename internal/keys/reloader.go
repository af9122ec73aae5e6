package keys

import (
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
)

const (
	// ReloadInterval is how often files are read while requests arrive.
	ReloadInterval = time.Second
	// problemInterval is how often a persistent error is logged.
	problemInterval = time.Minute
)

// Reloader reloads secrets from files while requests arrive, and when an
// operator looks at them. Otherwise, no new secret is needed.
//
// While requests arrive, a timer reloads the secrets in the background,
// slightly more often than once a second, so that no request waits. Only the
// first request after a pause reloads them itself, because a secret that was
// revoked during the pause must not be valid for it.
type Reloader struct {
	// Logger logs the errors. Required.
	Logger *zap.Logger

	sources []*source
	// lastRead is when the files were last read. asked reports whether a
	// request has arrived since.
	lastRead atomic.Pointer[time.Time]
	asked    atomic.Bool
	// reading is held while the files are read. It guards timer.
	reading sync.Mutex
	timer   *time.Timer
	// closed reports whether background reloads have ended.
	closed atomic.Bool
}

// backgroundInterval is the time between background reloads. It is shorter than
// ReloadInterval, so that no request has to reload.
const backgroundInterval = ReloadInterval * 19 / 20

// source is a secret in a file.
type source struct {
	name string
	read func() error
	// failed is the current failure. It is nil after a success.
	failed atomic.Pointer[failure]
}

// failure records since when a secret could not be reloaded, and when that was
// last logged.
type failure struct{ since, logged time.Time }

// Secret is the state of a secret in a file, for operators.
type Secret struct {
	Name string
	// StaleSince is since when the secret could not be reloaded. It is zero
	// after a success.
	StaleSince time.Time
}

// Add adds a secret: its name in the log, and the function that reads it. The
// function's errors must not contain a key.
func (r *Reloader) Add(name string, read func() error) {
	r.sources = append(r.sources, &source{name: name, read: read})
}

// Refresh reloads the secrets, unless that was done within the last
// ReloadInterval, or is in progress: a file system that hangs must not block
// one request after another. After Refresh, the timer reloads them in the
// background.
func (r *Reloader) Refresh() {
	if len(r.sources) == 0 {
		return
	}
	if !r.asked.Load() {
		r.asked.Store(true)
	}
	now := time.Now()
	// Both times are monotonic: setting the clock does not change the
	// difference.
	looked := r.lastRead.Load()
	if looked != nil && now.Sub(*looked) < ReloadInterval || !r.lastRead.CompareAndSwap(looked, &now) {
		return
	}
	r.look(now)
}

// look reloads the secrets, unless that is in progress.
func (r *Reloader) look(now time.Time) {
	if !r.reading.TryLock() {
		return
	}
	defer r.reading.Unlock()
	for _, s := range r.sources {
		s.refresh(r.Logger, now)
	}
	looked := time.Now() // it may have taken long
	r.lastRead.Store(&looked)
	if r.timer == nil {
		r.timer = time.AfterFunc(backgroundInterval, r.lookAgain)
	} else {
		r.timer.Reset(backgroundInterval)
	}
}

// Close ends background reloads. Requests of a replaced config still reload the
// secrets.
func (r *Reloader) Close() { r.closed.Store(true) }

// lookAgain reloads the secrets in the background, if requests have arrived
// since.
func (r *Reloader) lookAgain() {
	if r.asked.Swap(false) && !r.closed.Load() {
		now := time.Now()
		r.lastRead.Store(&now)
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

// Secrets reloads the secrets, as Refresh does, and returns their states. A nil
// Reloader has none.
func (r *Reloader) Secrets() (secrets []Secret) {
	if r == nil {
		return nil
	}
	r.Refresh()
	for _, s := range r.sources {
		secret := Secret{Name: s.name}
		if failed := s.failed.Load(); failed != nil {
			secret.StaleSince = failed.since
		}
		secrets = append(secrets, secret)
	}
	return secrets
}
