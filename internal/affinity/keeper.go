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

// keeper holds a store, and keeps it in Caddy's storage if the options say so.
// It reads what was saved when the first request asks, because `caddy validate`
// must not, and saves when requests come, both in the background. Nothing is
// saved until what was saved before has been read, because it is replaced.
type keeper struct {
	memory *owners.Memory
	place  atomic.Pointer[savePlace] // nil: nothing is saved
	read   atomic.Bool               // what was saved has been read, or there was nothing

	saving  atomic.Bool
	lastDue atomic.Int64 // when it was last saved in the background: Unix time in nanoseconds

	mu    sync.Mutex // guards the saving
	saved uint64     // the changes that were saved last

	readMu sync.Mutex // guards newest
	newest *reading   // nil: none has begun
}

// savePlace is where a store is saved.
type savePlace struct {
	storage certmagic.Storage
	key     string
	logger  *zap.Logger
}

// reading is an attempt to read what was saved. Requests wait for it until a
// time, and done is closed when it has ended.
type reading struct {
	began, until time.Time
	done         chan struct{}
}

// Destruct implements caddy.Destructor.
func (*keeper) Destruct() error { return nil }

// configure applies the options of a new config.
func (k *keeper) configure(limit int, save bool, storage certmagic.Storage, pool string, logger *zap.Logger) {
	k.memory.Limit(limit)
	if !save {
		k.place.Store(nil)
		return
	}
	k.place.Store(&savePlace{storage, "openai_lb/ids_" + url.PathEscape(pool), logger})
}

// store returns the store, with what was saved in it. While the storage hangs or
// fails, requests do without that.
func (k *keeper) store() *owners.Memory {
	if p := k.place.Load(); p != nil && !k.read.Load() {
		r := k.readFrom(p, readPause)
		r.wait(r.until)
	}
	return k.memory
}

// isUnread reports whether what was saved has not been read, so that the store may
// lack it.
func (k *keeper) isUnread() bool { return k.place.Load() != nil && !k.read.Load() }

// readFrom returns the newest attempt to read what was saved. A new one begins
// if the last one has ended, and began at least pause ago.
func (k *keeper) readFrom(p *savePlace, pause time.Duration) *reading {
	k.readMu.Lock()
	defer k.readMu.Unlock()
	now := time.Now()
	r := &reading{began: now, until: now, done: make(chan struct{})}
	if last := k.newest; last == nil {
		r.until = now.Add(readPatience)
	} else if !last.hasEnded() || now.Sub(last.began) < pause {
		return last
	}
	k.newest = r
	go func() {
		defer close(r.done)
		if p.load(k.memory) {
			k.read.Store(true)
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
	left := time.Until(until)
	if left <= 0 {
		return
	}
	timer := time.NewTimer(left)
	defer timer.Stop()
	select {
	case <-r.done:
	case <-timer.C:
	}
}

// load reads what was saved, and reports whether other data may replace it.
// Data that is not understood is kept under another key.
func (p *savePlace) load(memory *owners.Memory) bool {
	ctx, cancel := context.WithTimeout(context.Background(), storageTimeout)
	defer cancel()
	saved, err := p.storage.Load(ctx, p.key)
	if errors.Is(err, fs.ErrNotExist) {
		return true
	}
	logger := p.logger.With(zap.String("key", p.key))
	if err != nil {
		logger.Error("could not read saved ids", zap.Error(err), zap.Duration("retry_in", readPause))
		return false
	}
	ids, err := memory.Load(saved, time.Now())
	if err == nil {
		logger.Info("saved ids read", zap.Int("ids", ids))
		return true
	}
	aside := p.key + "_unreadable_" + time.Now().UTC().Format("20060102T150405Z")
	if failed := p.storage.Store(ctx, aside, saved); failed != nil {
		logger.Error("could not read saved ids", zap.Error(errors.Join(err, failed)), zap.Duration("retry_in", readPause))
		return false
	}
	logger.Error("could not read saved ids", zap.Error(err), zap.String("kept_as", aside))
	return true
}

// saveIfDue begins to save what was learned, if it is time to.
func (k *keeper) saveIfDue(now time.Time) {
	if k.place.Load() == nil {
		return
	}
	last := k.lastDue.Load()
	if last == 0 {
		k.lastDue.CompareAndSwap(0, now.UnixNano())
		return
	}
	if now.Sub(time.Unix(0, last)) < saveInterval || !k.saving.CompareAndSwap(false, true) {
		return
	}
	k.lastDue.Store(now.UnixNano())
	go func() {
		defer k.saving.Store(false)
		k.save()
	}()
}

var errNotRead = errors.New("the saved ids have not been read yet, so they are not replaced")

// save saves what was learned since it was last saved.
func (k *keeper) save() {
	p := k.place.Load()
	if p == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	changes := k.memory.Changes()
	if changes == k.saved {
		return
	}
	if !k.read.Load() {
		k.readFrom(p, 0).wait(time.Now().Add(storageTimeout))
	}
	err := errNotRead
	if k.read.Load() {
		ctx, cancel := context.WithTimeout(context.Background(), storageTimeout)
		defer cancel()
		err = p.storage.Store(ctx, p.key, k.memory.Save(time.Now()))
	}
	if err != nil {
		p.logger.Error("could not save ids", zap.String("key", p.key), zap.Error(err))
		return
	}
	k.saved = changes
}
