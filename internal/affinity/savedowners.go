package affinity

import (
	"context"
	"errors"
	"io/fs"
	"net/url"
	"sync/atomic"
	"time"

	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/ownership"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/replicas"
)

// saveInterval is how often ids are saved that were learned since.
const saveInterval = 5 * time.Minute

// savedOwners holds the owners, and keeps them in Caddy's storage if the
// options say so. It reads what was saved when the first request asks, and
// saves when requests come, both in the background. Nothing is saved until what
// was saved before has been read, because it is replaced.
type savedOwners struct {
	memory *ownership.Memory
	// others are told what is learned. Requests of a config that was replaced
	// may still learn something after it has left them.
	others atomic.Pointer[replicas.Owners]
	// guessed are the ids that replies of new APIs have taught, and secrets the
	// client secrets. byToken are the names of the callers that have made some
	// and sent a token in place of a key.
	guessed, secrets bounded
	byToken          tokenHolders
	saver            *pools.Saver
	key              string
	logger           atomic.Pointer[zap.Logger]
	place            atomic.Pointer[savedPlace]
	lastDue          atomic.Int64 // when it was last saved in the background: Unix time in nanoseconds
	logged           atomic.Bool  // the log says that it could not be read
}

// savedPlace is the storage of a config. saved are the changes that were saved
// last there: another one saves all again.
type savedPlace struct {
	certmagic.Storage
	saved atomic.Uint64
}

func newSavedOwners(pool string) *savedOwners {
	o := &savedOwners{guessed: bounded{most: maxGuessed}, secrets: bounded{most: maxSecrets}, memory: ownership.NewMemory(maxIDs), key: "openai_lb/ids_" + url.PathEscape(pool)}
	o.saver = pools.NewSaver("stored_objects", o.load, o.store)
	return o
}

// Destruct implements caddy.Destructor.
func (o *savedOwners) Destruct() error {
	o.saver.Close()
	return nil
}

// configure applies the options of a new config. Without a storage, nothing is
// saved.
func (o *savedOwners) configure(storage certmagic.Storage, logger *zap.Logger) {
	o.logger.Store(logger)
	if storage == nil {
		o.saver.Configure(nil, logger)
		return
	}
	to := &savedPlace{Storage: storage}
	o.place.Store(to)
	o.saver.Configure(to, logger)
}

// loaded returns the owners, with those that were saved. While the storage
// hangs or fails, requests do without these.
func (o *savedOwners) loaded() *ownership.Memory {
	o.saver.Await()
	return o.memory
}

// load reads what was saved. Other data must not replace it if that fails,
// which is logged once.
func (o *savedOwners) load(ctx context.Context, storage certmagic.Storage) error {
	logger := o.logger.Load().With(zap.String("key", o.key))
	saved, err := storage.Load(ctx, o.key)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		err = nil
	case err == nil:
		err = o.add(ctx, storage, saved, logger)
	}
	if err != nil && !o.logged.Swap(true) {
		logger.Error("could not read saved ids", zap.Error(err), zap.Duration("retry_in", pools.SaveInterval))
	}
	return err
}

// add adds what was saved. Data that is not understood is kept under another
// key.
func (o *savedOwners) add(ctx context.Context, storage certmagic.Storage, saved []byte, logger *zap.Logger) error {
	ids, err := o.memory.Load(saved, time.Now())
	if err == nil {
		logger.Info("saved ids read", zap.Int("ids", ids))
		return nil
	}
	aside := o.key + "_unreadable_" + time.Now().UTC().Format("20060102T150405Z")
	if failed := storage.Store(ctx, aside, saved); failed != nil {
		return errors.Join(err, failed)
	}
	logger.Error("could not read saved ids", zap.Error(err), zap.String("kept_as", aside))
	return nil
}

// saveIfDue has saved what was learned, if it is time to.
func (o *savedOwners) saveIfDue(now time.Time) {
	last := o.lastDue.Load()
	if last != 0 && now.Sub(time.Unix(0, last)) < saveInterval {
		return
	}
	if o.lastDue.CompareAndSwap(last, now.UnixNano()) && last != 0 {
		o.saver.Changed()
	}
}

// save saves what was learned since it was last saved.
func (o *savedOwners) save() {
	if to := o.place.Load(); to != nil && o.memory.Changes() != to.saved.Load() {
		o.saver.Changed()
		o.saver.Save()
	}
}

var errNotRead = errors.New("the saved ids have not been read yet, so they are not replaced")

func (o *savedOwners) store(ctx context.Context, storage certmagic.Storage) error {
	err, changes := errNotRead, uint64(0)
	if o.saver.Read(ctx, storage) == nil {
		changes = o.memory.Changes()
		err = storage.Store(ctx, o.key, o.memory.Save(time.Now()))
	}
	if err != nil {
		return &pools.StorageError{What: "could not save ids", Key: o.key, Err: err}
	}
	if to, ok := storage.(*savedPlace); ok {
		to.saved.Store(changes)
	}
	return nil
}
