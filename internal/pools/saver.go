package pools

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"
)

const (
	// SaveInterval is how long after a change a Saver saves, and how often it
	// tries again.
	SaveInterval = 10 * time.Second
	// storageTimeout limits how long the storage may take.
	storageTimeout = 30 * time.Second
	// readPatience is how long requests wait for the first attempt to read what
	// was saved.
	readPatience = 3 * time.Second
)

// Saver keeps something in Caddy's storage through config reloads. It saves
// after changes, and when it is asked to. While the storage fails, it tries
// again, and the log has one line about that.
type Saver struct {
	// load reads what was saved, and read reports whether it has. Nothing is to
	// be read if it is nil.
	load, save func(context.Context, certmagic.Storage) error
	read       atomic.Bool
	to         atomic.Pointer[place] // nil: nothing is saved
	// Record is when it was saved.
	Record Record

	mu sync.Mutex // guards the use of the storage
	// failing has the failures that are in the log, by task.
	failing map[string]string
	// dirty reports whether there are changes, and timer saves them.
	dirty atomic.Bool
	timer atomic.Pointer[time.Timer]
	// closed reports whether nothing is saved after a change any more.
	closed atomic.Bool

	// started begins the first reading, which is over when done is closed.
	// Requests wait until a time at most.
	started sync.Once
	until   time.Time
	done    chan struct{}
}

// place is where something is saved, by one config.
type place struct {
	storage certmagic.Storage
	logger  *zap.Logger
}

// StorageError is a failure with a key of the storage. What is the message for
// the log.
type StorageError struct {
	What, Key string
	Err       error
}

// Error implements error.
func (e *StorageError) Error() string { return e.What + " " + e.Key + ": " + e.Err.Error() }

// Unwrap returns the cause.
func (e *StorageError) Unwrap() error { return e.Err }

// NewSaver returns a Saver that saves nowhere until it is configured, and has a
// Record of this name. save fails with a StorageError.
func NewSaver(record string, load, save func(context.Context, certmagic.Storage) error) *Saver {
	return &Saver{Record: Record{Name: record}, load: load, save: save, failing: make(map[string]string),
		done: make(chan struct{})}
}

// Configure sets the storage of a new config, or none.
func (s *Saver) Configure(storage certmagic.Storage, logger *zap.Logger) {
	if storage == nil {
		s.to.Store(nil)
		return
	}
	s.Record.KeepIn(FolderOf(storage))
	s.to.Store(&place{storage, logger})
}

// Saves reports whether there is a storage.
func (s *Saver) Saves() bool { return s.to.Load() != nil }

// Unread reports whether there is a storage, of which what was saved has not
// been read.
func (s *Saver) Unread() bool { return s.Saves() && !s.read.Load() }

// Read reads what was saved, unless that was done. It is for the function that
// saves, and so replaces it.
func (s *Saver) Read(ctx context.Context, storage certmagic.Storage) error {
	if s.read.Load() {
		return nil
	}
	err := s.load(ctx, storage)
	s.read.Store(err == nil)
	return err
}

// Await waits until the saved data is read, but not for long. The first request
// starts that read, in the background, because `caddy validate` must not: while
// the storage hangs or fails, requests do without.
func (s *Saver) Await() {
	if !s.Unread() {
		return
	}
	s.started.Do(func() {
		s.until = time.Now().Add(readPatience)
		go func() {
			defer close(s.done)
			if !s.Use(Saving, s.Read) {
				s.Changed() // so it is tried again
			}
		}()
	})
	WaitFor(s.done, time.Until(s.until))
}

// WaitFor waits until something in the background is done, but not for longer
// than patience.
func WaitFor(done <-chan struct{}, patience time.Duration) {
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
	}
}

// Changed records a change, and has it saved soon.
func (s *Saver) Changed() {
	if s.to.Load() == nil || s.dirty.Load() {
		return
	}
	s.Record.Change() // before it can be saved
	if s.dirty.Swap(true) || s.closed.Load() {
		return
	}
	s.timer.Store(time.AfterFunc(SaveInterval, s.Save))
}

// Save saves now, if something has changed.
func (s *Saver) Save() {
	if !s.Saves() {
		s.dirty.Store(false) // another config may have a storage again, and the next change is saved then
		s.Record.Drop()
	}
	if !s.dirty.Load() {
		return
	}
	saved := s.Use(Saving, func(ctx context.Context, storage certmagic.Storage) error {
		s.dirty.Store(false)
		s.Record.Begin()
		err := s.save(ctx, storage)
		if err == nil {
			s.Record.End()
		}
		return err
	})
	if !saved {
		s.Changed()
	}
}

// ending is when the last saves of a config have to be over, if the storage
// does not answer.
var ending struct {
	mu    sync.Mutex
	until time.Time
}

// SaveLast calls save when a config ends. While the storage does not answer,
// all pools together wait as long as one would: Caddy ends one after the other.
// The save goes on then, if the process does.
func SaveLast(save func()) {
	patience, saved := time.Until(endOf(time.Now())), make(chan struct{})
	go func() {
		defer close(saved)
		save()
		ending.mu.Lock()
		defer ending.mu.Unlock()
		ending.until = time.Time{} // the storage answers
	}()
	WaitFor(saved, patience)
}

// endOf returns when a save that begins now has to be over.
func endOf(now time.Time) time.Time {
	ending.mu.Lock()
	defer ending.mu.Unlock()
	if now.After(ending.until.Add(storageTimeout)) {
		ending.until = now.Add(storageTimeout)
	}
	return ending.until
}

// Saving is the task of saving, or of what has to be done before.
const Saving = "save"

// Use calls f for a task with the storage, unless there is none, while nothing
// else uses it. It logs an error of f, unless that is the latest line about the
// task, and reports whether there was none. The first success after errors is
// logged, too.
func (s *Saver) Use(task string, f func(context.Context, certmagic.Storage) error) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	to := s.to.Load() // now: another config may have begun since
	if to == nil {
		return true
	}
	ctx, cancel := context.WithTimeout(context.Background(), storageTimeout)
	defer cancel()
	err := f(ctx, to.storage)
	if failed, ok := errors.AsType[*StorageError](err); !ok {
		if s.failing[task] != "" && err == nil {
			to.logger.Info("storage works again", zap.String("record", s.Record.Name))
		}
		delete(s.failing, task)
	} else if s.failing[task] != failed.What {
		s.failing[task] = failed.What
		to.logger.Error(failed.What, zap.String("key", failed.Key), zap.Error(failed.Err))
	}
	return err == nil
}

// Close has nothing saved after a change any more.
func (s *Saver) Close() {
	s.closed.Store(true)
	if timer := s.timer.Load(); timer != nil {
		timer.Stop()
	}
}
