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

	"github.com/openai-lb/caddy-openai-lb/internal/ledger"
	"github.com/openai-lb/caddy-openai-lb/internal/meter"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
)

// kept is what outlives a config: the meters, which it keeps in Caddy's storage if there is one. It reads
// what was saved when the first request comes, and saves after changes. Nothing is saved until what was saved before has been read,
// because it is replaced.
type kept struct {
	meters *meter.Callers
	// background has the charges of responses that were left in the background. Those of forgotten ones stay.
	background ledger.Left[meter.Reservation]
	logger     atomic.Pointer[zap.Logger]
	saver      *pools.Saver
	key        string
	// reports gets the marks that the use of limits has reached.
	reports atomic.Pointer[func(meter.Crossing)]
}

// savedUse is what is saved.
type savedUse struct {
	Callers map[string][]meter.Saved `json:"callers"`
}

func newKept(pool string) *kept {
	k := &kept{key: "openai_lb/callers_" + url.PathEscape(pool)}
	k.meters, k.saver = meter.NewCallers(k.crossed), pools.NewSaver(k.load, k.store)
	return k
}

// Destruct implements caddy.Destructor.
func (k *kept) Destruct() error {
	k.saver.Close()
	return nil
}

func (k *kept) configure(storage certmagic.Storage, logger *zap.Logger, reports func(meter.Crossing)) {
	k.logger.Store(logger)
	k.saver.Configure(storage, logger)
	k.reports.Store(&reports)
}

// crossed passes on that the use of a limit has reached a mark.
func (k *kept) crossed(x meter.Crossing) {
	if report := *k.reports.Load(); report != nil {
		report(x)
	}
}

// load adds what was saved.
func (k *kept) load(ctx context.Context, storage certmagic.Storage) error {
	text, err := storage.Load(ctx, k.key)
	var saved savedUse
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return &pools.StorageError{What: "could not read saved use of callers", Key: k.key, Err: err}
	default:
		if err := json.Unmarshal(text, &saved); err != nil {
			k.logger.Load().Error("could not read saved use of callers, beginning anew", zap.String("key", k.key), zap.Error(err))
			saved.Callers = nil
		}
	}
	k.meters.Restore(time.Now(), saved.Callers)
	return nil
}

// store saves the use.
func (k *kept) store(ctx context.Context, storage certmagic.Storage) error {
	if err := k.saver.Read(ctx, storage); err != nil {
		return err
	}
	text, err := json.Marshal(savedUse{k.meters.Save(time.Now())})
	if err == nil {
		err = storage.Store(ctx, k.key, text)
	}
	if err != nil {
		return &pools.StorageError{What: "could not save use of callers", Key: k.key, Err: err}
	}
	return nil
}
