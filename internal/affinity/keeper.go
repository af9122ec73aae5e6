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
)

// keeper has a store, and keeps it in Caddy's storage if it is told to. It
// reads what was saved when the first request asks, because `caddy validate`
// must not, and saves when requests come, in the background.
type keeper struct {
	memory *owners.Memory
	place  atomic.Pointer[savePlace] // nil: nothing is saved
	loaded sync.Once

	saving  atomic.Bool
	lastDue atomic.Int64 // when it was last saved in the background: Unix time in nanoseconds

	mu    sync.Mutex // guards the saving
	saved uint64     // the changes that were saved last
}

// savePlace is where a store is saved.
type savePlace struct {
	storage certmagic.Storage
	key     string
	logger  *zap.Logger
}

// Destruct implements caddy.Destructor.
func (*keeper) Destruct() error { return nil }

// configure takes in the options of a new config.
func (k *keeper) configure(limit int, save bool, storage certmagic.Storage, pool string, logger *zap.Logger) {
	k.memory.Limit(limit)
	if !save {
		k.place.Store(nil)
		return
	}
	k.place.Store(&savePlace{storage, "openai_lb/ids_" + url.PathEscape(pool), logger})
}

// store returns the store, with what was saved in it.
func (k *keeper) store() *owners.Memory {
	if p := k.place.Load(); p != nil {
		k.loaded.Do(func() { p.load(k.memory) })
	}
	return k.memory
}

func (p *savePlace) load(memory *owners.Memory) {
	ctx, cancel := context.WithTimeout(context.Background(), storageTimeout)
	defer cancel()
	saved, err := p.storage.Load(ctx, p.key)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	ids := 0
	if err == nil {
		ids, err = memory.Load(saved, time.Now())
	}
	if err != nil {
		p.logger.Error("saved ids not read", zap.String("key", p.key), zap.Error(err))
		return
	}
	p.logger.Info("saved ids read", zap.String("key", p.key), zap.Int("ids", ids))
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

// save saves what was learned since it was last saved.
func (k *keeper) save() {
	p := k.place.Load()
	if p == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.memory.Changes() == k.saved {
		return
	}
	store := k.store() // so that what was saved before stays
	changes := store.Changes()
	ctx, cancel := context.WithTimeout(context.Background(), storageTimeout)
	defer cancel()
	if err := p.storage.Store(ctx, p.key, store.Save(time.Now())); err != nil {
		p.logger.Error("ids not saved", zap.String("key", p.key), zap.Error(err))
		return
	}
	k.saved = changes
}
