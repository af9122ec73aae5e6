package callers

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"net/url"
	"sync/atomic"
	"time"

	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
)

// kept is the state that outlives a config: the limiters, and their use in
// Caddy's storage, if there is one. It reads the saved use when the first
// request comes, and saves the use after changes.
//
// Each process writes its own file, named by the id of its writer, and reads
// the files of all others when it starts. So processes that share a storage do
// not overwrite each other's use, and the use of each counts after a restart. A
// file is removed if it was not written for an hour and its content was saved
// again. With `state`, the saved use counts until the store answers.
type kept struct {
	pool     string
	limiters *limiter.Callers
	// background holds the charges of responses that were left in the
	// background. If a response is forgotten, its charge stays.
	background limiter.Left[limiter.Reservation]
	logger     atomic.Pointer[zap.Logger]
	saver      *pools.Saver
	// folder contains the files of the pool. old are the files to be removed
	// after the next save.
	folder string
	old    []string
	// reports receives the marks that the use of limits reaches.
	reports atomic.Pointer[func(limiter.Crossing)]
}

// savedUse is the content of a file.
type savedUse struct {
	Writers limiter.SavedUse `json:"writers,omitempty"`
}

// unwritten is the time after which a file is removed if its process has not
// written it.
const unwritten = time.Hour

func newKept(pool string) *kept {
	k := &kept{pool: pool, folder: "openai_lb/use/" + url.PathEscape(pool)}
	k.limiters, k.saver = limiter.NewCallers(k.crossed), pools.NewSaver("limits", k.load, k.store)
	k.limiters.OnReset(func(caller string) {
		if logger := k.logger.Load(); logger != nil {
			logger.Named("audit").Info("caller reset", zap.String("pool", pool), zap.String("caller", caller), zap.Bool("elsewhere", true))
		}
	})
	return k
}

// own returns the key of this process's file.
func (k *kept) own() string { return k.folder + "/" + k.limiters.Writer() + ".json" }

// Destruct implements caddy.Destructor.
func (k *kept) Destruct() error {
	k.saver.Close()
	return nil
}

func (k *kept) configure(storage certmagic.Storage, logger *zap.Logger, reports func(limiter.Crossing)) {
	k.logger.Store(logger)
	k.saver.Configure(storage, logger)
	k.reports.Store(&reports)
}

// crossed reports to the current config that the use of a limit has reached a
// mark.
func (k *kept) crossed(x limiter.Crossing) {
	if report := *k.reports.Load(); report != nil {
		report(x)
	}
}

// load adds the use from all files.
func (k *kept) load(ctx context.Context, storage certmagic.Storage) error {
	keys, err := storage.List(ctx, k.folder, false)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return &pools.StorageError{What: "could not read saved use of callers", Key: k.folder, Err: err}
	}
	k.old = nil
	for _, key := range keys {
		text, err := storage.Load(ctx, key)
		var saved savedUse
		switch {
		case errors.Is(err, fs.ErrNotExist):
			continue
		case err != nil:
			return &pools.StorageError{What: "could not read saved use of callers", Key: key, Err: err}
		}
		if err := json.Unmarshal(text, &saved); err != nil {
			k.logger.Load().Error("could not read saved use of callers, going on without it",
				zap.String("key", key), zap.Error(err))
			continue
		}
		now := time.Now()
		k.limiters.Restore(now, saved.Writers)
		if info, err := storage.Stat(ctx, key); err == nil && now.Sub(info.Modified) > unwritten {
			k.old = append(k.old, key)
		}
	}
	return nil
}

// store saves the use.
func (k *kept) store(ctx context.Context, storage certmagic.Storage) error {
	if err := k.saver.Read(ctx, storage); err != nil {
		return err
	}
	text, err := json.Marshal(savedUse{Writers: k.limiters.Save(time.Now())})
	if err == nil {
		err = storage.Store(ctx, k.own(), text)
	}
	if err != nil {
		return &pools.StorageError{What: "could not save use of callers", Key: k.own(), Err: err}
	}
	for _, key := range k.old {
		_ = storage.Delete(ctx, key) // it is removed after a restart then
	}
	k.old = nil
	return nil
}
