package affinity

import (
	"context"
	"errors"
	"io/fs"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/owners"
	"github.com/openai-lb/caddy-openai-lb/internal/replicas"
)

const (
	// saveInterval is how often ids are saved that were learned since.
	saveInterval = 5 * time.Minute
	// storageTimeout limits how long the storage may take.
	storageTimeout = 30 * time.Second
	// readPause is the shortest time between two attempts to read what was saved,
	// and readPatience how long requests wait for the first one.
	readPause    = 10 * time.Second
	readPatience = 3 * time.Second
)

// savedOwners holds the owners, and keeps them in Caddy's storage if the options
// say so. It reads what was saved when the first request asks, because `caddy validate`
// must not, and saves when requests come, both in the background. Nothing is
// saved until what was saved before has been read, because it is replaced.
type savedOwners struct {
	memory *owners.Memory
	// others are told what is learned. Requests of a config that was replaced may
	// still learn something after it has left them.
	others atomic.Pointer[replicas.Owners]
	file   atomic.Pointer[savedFile] // nil: nothing is saved
	read   atomic.Bool               // what was saved has been read, or there was nothing
	logged atomic.Bool               // the log says that it could not be read

	saving  atomic.Bool
	lastDue atomic.Int64 // when it was last saved in the background: Unix time in nanoseconds

	mu sync.Mutex // guards the saving

	readMu sync.Mutex // guards newest
	newest *reading   // nil: none has begun
}

// savedFile is where the owners are saved.
type savedFile struct {
	storage certmagic.Storage
	key     string
	logger  *zap.Logger
	// saved are the changes that were saved there last. Another config may have
	// another storage, so it saves all again. failed reports whether the log says that they could not be saved.
	saved  uint64
	failed bool
}

// reading is an attempt to read what was saved. Requests wait for it until a
// time, and done is closed when it has ended.
type reading struct {
	began, until time.Time
	done         chan struct{}
}

// Destruct implements caddy.Destructor.
func (*savedOwners) Destruct() error { return nil }

// configure applies the options of a new config.
func (o *savedOwners) configure(save bool, storage certmagic.Storage, pool string, logger *zap.Logger) {
	if !save {
		o.file.Store(nil)
		return
	}
	o.file.Store(&savedFile{storage: storage, key: "openai_lb/ids_" + url.PathEscape(pool), logger: logger})
}

// loaded returns the owners, with those that were saved. While the storage hangs or
// fails, requests do without these.
func (o *savedOwners) loaded() *owners.Memory {
	if f := o.file.Load(); f != nil && !o.read.Load() {
		r := o.readFrom(f, readPause)
		r.wait(r.until)
	}
	return o.memory
}

// isUnread reports whether what was saved has not been read, so that some owners may
// not be known.
func (o *savedOwners) isUnread() bool { return o.file.Load() != nil && !o.read.Load() }

// readFrom returns the newest attempt to read what was saved. A new one begins
// if the last one has ended, and began at least pause ago.
func (o *savedOwners) readFrom(f *savedFile, pause time.Duration) *reading {
	o.readMu.Lock()
	defer o.readMu.Unlock()
	now := time.Now()
	r := &reading{began: now, until: now, done: make(chan struct{})}
	if last := o.newest; last == nil {
		r.until = now.Add(readPatience)
	} else if !last.hasEnded() || now.Sub(last.began) < pause {
		return last
	}
	o.newest = r
	go func() {
		defer close(r.done)
		if f.load(o.memory, &o.logged) {
			o.read.Store(true)
		}
	}()
	return r
}

func (r *reading) hasEnded() bool {
	select {
	case <-r.done:
		return true
	default:
		return false
	}
}

// wait waits for the end of the attempt, until a time at most.
func (r *reading) wait(until time.Time) {
	select {
	case <-r.done:
	case <-time.After(time.Until(until)):
	}
}

// load reads what was saved, and reports whether other data may replace it.
// Data that is not understood is kept under another key. A failure is logged unless that was done.
func (f *savedFile) load(memory *owners.Memory, logged *atomic.Bool) bool {
	ctx, cancel := context.WithTimeout(context.Background(), storageTimeout)
	defer cancel()
	saved, err := f.storage.Load(ctx, f.key)
	if errors.Is(err, fs.ErrNotExist) {
		return true
	}
	logger := f.logger.With(zap.String("key", f.key))
	if err != nil {
		if !logged.Swap(true) {
			logger.Error("could not read saved ids", zap.Error(err), zap.Duration("retry_in", readPause))
		}
		return false
	}
	ids, err := memory.Load(saved, time.Now())
	if err == nil {
		logger.Info("saved ids read", zap.Int("ids", ids))
		return true
	}
	aside := f.key + "_unreadable_" + time.Now().UTC().Format("20060102T150405Z")
	if failed := f.storage.Store(ctx, aside, saved); failed != nil {
		if !logged.Swap(true) {
			logger.Error("could not read saved ids", zap.Error(errors.Join(err, failed)), zap.Duration("retry_in", readPause))
		}
		return false
	}
	logger.Error("could not read saved ids", zap.Error(err), zap.String("kept_as", aside))
	return true
}

// saveIfDue begins to save what was learned, if it is time to.
func (o *savedOwners) saveIfDue(now time.Time) {
	if o.file.Load() == nil {
		return
	}
	last := o.lastDue.Load()
	if last == 0 {
		o.lastDue.CompareAndSwap(0, now.UnixNano())
		return
	}
	if now.Sub(time.Unix(0, last)) < saveInterval || !o.saving.CompareAndSwap(false, true) {
		return
	}
	o.lastDue.Store(now.UnixNano())
	go func() {
		defer o.saving.Store(false)
		o.save()
	}()
}

var errNotRead = errors.New("the saved ids have not been read yet, so they are not replaced")

// save saves what was learned since it was last saved.
func (o *savedOwners) save() {
	f := o.file.Load()
	if f == nil {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	changes := o.memory.Changes()
	if changes == f.saved {
		return
	}
	if !o.read.Load() {
		o.readFrom(f, 0).wait(time.Now().Add(storageTimeout))
	}
	err := errNotRead
	if o.read.Load() {
		ctx, cancel := context.WithTimeout(context.Background(), storageTimeout)
		defer cancel()
		err = f.storage.Store(ctx, f.key, o.memory.Save(time.Now()))
	}
	if err == nil {
		f.saved = changes
	} else if !f.failed {
		f.logger.Error("could not save ids", zap.String("key", f.key), zap.Error(err))
	}
	f.failed = err != nil
}
