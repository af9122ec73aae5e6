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
)

// saveInterval is how often newly learned ids are saved.
const saveInterval = 5 * time.Minute

// savedOwners holds the owners, and saves them in Caddy's storage unless other
// replicas remember them. It reads the saved owners when the first request
// needs them, and saves changes while requests come, both in the background. It
// saves nothing until it has read the saved owners, because saving replaces
// them.
type savedOwners struct {
	memory *ownership.Memory
	// others gets the learned owners. Requests of a replaced config may still
	// learn owners after that config was closed, so this is the newest
	// config's.
	others atomic.Pointer[ownership.Others]
	// guessed limits the ids from replies of new APIs, and secrets the client
	// secrets. byToken holds the names of callers that made client secrets with
	// a token instead of a key.
	guessed, secrets bounded
	byToken          tokenHolders
	saver            *pools.Saver
	key              string
	logger           atomic.Pointer[zap.Logger]
	place            atomic.Pointer[savedPlace]
	lastDue          atomic.Int64 // when it was last saved in the background: Unix time in nanoseconds
	logged           atomic.Bool  // the log says that it could not be read
}

// savedPlace is the storage of a config. saved is the number of changes when
// owners were last saved there. With a new storage, all owners are saved again.
type savedPlace struct {
	certmagic.Storage
	saved atomic.Uint64
}

func newSavedOwners(pool string) *savedOwners {
	o := &savedOwners{guessed: bounded{limit: maxGuessed}, secrets: bounded{limit: maxSecrets},
		memory: ownership.NewMemory(maxIDs), key: "openai_lb/ids_" + url.PathEscape(pool)}
	o.saver = pools.NewSaver("stored_objects", o.load, o.store)
	return o
}

// Destruct implements caddy.Destructor.
func (o *savedOwners) Destruct() error {
	o.saver.Close()
	return nil
}

// configure applies the options of a new config. If storage is nil, nothing is
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
	o.saver.Record.KeepIn(pools.FolderOf(storage))
}

// tell tells the other replicas, if there are any, the owner of an id.
func (o *savedOwners) tell(id ownership.Key, owner ownership.Owner, ttl time.Duration) {
	if others := o.others.Load(); others != nil && *others != nil {
		(*others).Send(id, owner, ttl)
	}
}

// loaded returns the owners, including the saved ones. While the storage hangs
// or fails, the saved ones are missing.
func (o *savedOwners) loaded() *ownership.Memory {
	o.saver.Await()
	return o.memory
}

// load reads the saved owners. If that fails, they must not be replaced, and
// the failure is logged once.
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

// add adds saved owners. If the data is not valid, it is kept under another
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

// saveIfDue starts saving in the background if saveInterval has passed.
func (o *savedOwners) saveIfDue(now time.Time) {
	last := o.lastDue.Load()
	if last != 0 && now.Sub(time.Unix(0, last)) < saveInterval {
		return
	}
	if o.lastDue.CompareAndSwap(last, now.UnixNano()) && last != 0 {
		o.saver.Changed()
	}
}

// save saves the owners if any have changed since they were last saved.
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
