package callers

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
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
	var saved map[string][]meter.Saved
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return &pools.StorageError{What: "could not read saved use of callers", Key: k.key, Err: err}
	default:
		if saved, err = readUse(text); err != nil {
			k.logger.Load().Error("could not read all of the saved use of callers", zap.String("key", k.key), zap.Int("callers_read", len(saved)), zap.Error(err))
		}
	}
	k.meters.Restore(time.Now(), saved)
	return nil
}

// readUse reads what was saved. An entry that is not understood loses no other, and neither does a file that is cut off:
// everybody else would get their whole month again. The error is about the first one.
func readUse(text []byte) (saved map[string][]meter.Saved, err error) {
	saved = make(map[string][]meter.Saved)
	in := json.NewDecoder(bytes.NewReader(text))
	for _, want := range []json.Token{json.Delim('{'), "callers", json.Delim('{')} {
		if token, err := in.Token(); err != nil || token != want {
			return saved, cmp.Or(err, fmt.Errorf("it has %v, not %v", token, want))
		}
	}
	for in.More() {
		name, tokenErr := in.Token()
		var entries []json.RawMessage
		decodeErr := in.Decode(&entries)
		if err = cmp.Or(err, tokenErr, decodeErr); tokenErr != nil || decodeErr != nil && !isOfType(decodeErr) {
			return saved, err // nothing after it can be read
		}
		for _, text := range entries {
			var entry meter.Saved
			if entryErr := json.Unmarshal(text, &entry); entryErr != nil {
				err = cmp.Or(err, entryErr)
				continue
			}
			saved[name.(string)] = append(saved[name.(string)], entry)
		}
	}
	_, endErr := in.Token()
	return saved, cmp.Or(err, endErr)
}

// isOfType reports whether a value was read that is of another type.
func isOfType(err error) bool {
	_, ok := errors.AsType[*json.UnmarshalTypeError](err)
	return ok
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
