package callers

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"net/url"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/background"
	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
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
	subject
	pool     string
	limiters *limiter.Limiters
	// background holds the charges of responses that were left in the
	// background. If a response is forgotten, its charge stays.
	background background.Responses[limiter.Reservation]
	logger     atomic.Pointer[zap.Logger]
	saver      *pools.Saver
	// folder contains the files of the pool. old are the files to be removed
	// after the next save.
	folder string
	old    []string
	// reports receives the marks that the use of limits reaches.
	reports atomic.Pointer[func(ratelimit.Crossing)]
}

// savedUse is the content of a file.
type savedUse struct {
	Writers limiter.SavedUse `json:"writers,omitempty"`
}

// unwritten is the time after which a file is removed if its process has not
// written it.
const unwritten = time.Hour

// subject says whose use is kept: its name in logs, the name of its record, and
// the folder in the storage with a folder of each pool.
type subject struct{ name, record, parent string }

var (
	subjectCallers  = subject{"callers", "limits", "openai_lb/use/"}
	subjectBackends = subject{"backends", "quotas", "openai_lb/quotas/"}
)

// folderOf returns the folder of a pool.
func (s subject) folderOf(pool string) string { return s.parent + url.PathEscape(pool) }

func newKept(s subject, pool string) *kept {
	k := &kept{subject: s, pool: pool, folder: s.folderOf(pool)}
	k.limiters, k.saver = limiter.NewLimiters(k.crossed), pools.NewSaver(s.record, k.load, k.store)
	return k
}

// reportResets records in the audit log that another replica has reset a
// caller.
func (k *kept) reportResets() {
	k.limiters.OnReset(func(caller string) {
		if logger := k.logger.Load(); logger != nil {
			logger.Named("audit").Info("caller reset", zap.String("pool", k.pool), zap.String("caller", caller),
				zap.Bool("elsewhere", true))
		}
	})
}

// inUse keeps the limiters through config reloads, by their folders.
var inUse = caddy.NewUsagePool()

// keptUse has the kept state of a pool. It implements the methods of
// seam.Limits that need nothing else.
type keptUse struct{ kept *kept }

// keep returns the kept state of a pool. again reports whether a config uses it
// already.
func keep(s subject, pool string) (u keptUse, again bool) {
	value, again, _ := inUse.LoadOrNew(s.folderOf(pool),
		func() (caddy.Destructor, error) { return newKept(s, pool), nil })
	return keptUse{value.(*kept)}, again
}

// Limiters implements limiter.Set.
func (u keptUse) Limiters() *limiter.Limiters { return u.kept.limiters }

// Record implements seam.Limits.
func (u keptUse) Record() *pools.Record { return &u.kept.saver.Record }

// Caller implements seam.Limits.
func (u keptUse) Caller(now time.Time, name string) ratelimit.Limiter {
	u.kept.saver.Await() // what was saved is added when it comes
	return limiting{u.kept.limiters.Get(now, name)}
}

// Settle implements seam.Limits.
func (u keptUse) Settle(now time.Time, r ratelimit.Reservation, cost ratelimit.Cost) {
	if r.Open() {
		chargeOf(r).Settle(now, cost)
		u.kept.saver.Changed()
	}
}

// Close implements seam.Limits. It saves the use.
func (u keptUse) Close() error {
	if !u.kept.saver.Unread() { // otherwise it was not used, as when a config is only checked
		u.kept.saver.Changed() // what other replicas have used may have
	}
	pools.SaveLast(u.kept.saver.Save)
	_, err := inUse.Delete(u.kept.folder)
	return err
}

// fileKey returns the key of this process's file.
func (k *kept) fileKey() string { return k.folder + "/" + k.limiters.Writer() + ".json" }

// Destruct implements caddy.Destructor.
func (k *kept) Destruct() error {
	k.saver.Close()
	return nil
}

func (k *kept) configure(storage certmagic.Storage, logger *zap.Logger, reports func(ratelimit.Crossing)) {
	k.logger.Store(logger)
	k.saver.Configure(storage, logger)
	k.reports.Store(&reports)
}

// crossed reports to the current config that the use of a limit has reached a
// mark.
func (k *kept) crossed(x ratelimit.Crossing) {
	if report := *k.reports.Load(); report != nil {
		report(x)
	}
}

// load adds the use from all files.
func (k *kept) load(ctx context.Context, storage certmagic.Storage) error {
	keys, err := storage.List(ctx, k.folder, false)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return &pools.StorageError{What: "could not read saved use of " + k.name, Key: k.folder, Err: err}
	}
	k.old = nil
	for _, key := range keys {
		text, err := storage.Load(ctx, key)
		var saved savedUse
		switch {
		case errors.Is(err, fs.ErrNotExist):
			continue
		case err != nil:
			return &pools.StorageError{What: "could not read saved use of " + k.name, Key: key, Err: err}
		}
		if err := json.Unmarshal(text, &saved); err != nil {
			k.logger.Load().Error("could not read saved use of "+k.name+", going on without it",
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
		err = storage.Store(ctx, k.fileKey(), text)
	}
	if err != nil {
		return &pools.StorageError{What: "could not save use of " + k.name, Key: k.fileKey(), Err: err}
	}
	for _, key := range k.old {
		_ = storage.Delete(ctx, key) // it is removed after a restart then
	}
	k.old = nil
	return nil
}
