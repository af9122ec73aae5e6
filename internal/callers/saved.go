package callers

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/meter"
)

const (
	// saveInterval is how long after a change the use is saved.
	saveInterval = 10 * time.Second
	// storageTimeout limits how long the storage may take, and readPatience how long requests wait for it.
	storageTimeout = 30 * time.Second
	readPatience   = 3 * time.Second
)

// kept is what outlives a config: the meters, which it keeps in Caddy's storage if there is a file. It reads
// what was saved when the first request comes, because `caddy validate` must not, and saves after changes.
// Nothing is saved until what was saved before has been read, because it is replaced.
type kept struct {
	meters     *meter.Callers
	background background
	logger     atomic.Pointer[zap.Logger]
	file       atomic.Pointer[savedFile] // nil: nothing is saved
	// reports gets the marks that the use of limits has reached.
	reports atomic.Pointer[func(meter.Crossing)]

	// started begins the reading, which is over when done is closed. read reports whether it succeeded.
	started sync.Once
	done    chan struct{}
	read    atomic.Bool

	mu sync.Mutex // guards the reading and the saving
	// failing is what the log says that the storage does not do. It is tried again every saveInterval.
	failing string
	// dirty reports whether there are changes, and timer saves them.
	dirty atomic.Bool
	timer atomic.Pointer[time.Timer]
	// closed reports whether no config uses the meters any more.
	closed atomic.Bool
}

// savedFile is where the use is saved.
type savedFile struct {
	storage certmagic.Storage
	key     string
}

// savedUse is what is saved.
type savedUse struct {
	Callers map[string][]meter.Saved `json:"callers"`
}

func savedFileOf(storage certmagic.Storage, pool string) *savedFile {
	if storage == nil {
		return nil
	}
	return &savedFile{storage, "openai_lb/callers_" + url.PathEscape(pool)}
}

func newKept() *kept {
	k := &kept{done: make(chan struct{})}
	k.meters = meter.NewCallers(k.crossed)
	return k
}

// Destruct implements caddy.Destructor.
func (k *kept) Destruct() error {
	k.closed.Store(true)
	if timer := k.timer.Load(); timer != nil {
		timer.Stop()
	}
	return nil
}

func (k *kept) configure(file *savedFile, logger *zap.Logger, reports func(meter.Crossing)) {
	k.logger.Store(logger)
	k.file.Store(file)
	k.reports.Store(&reports)
}

// crossed passes on that the use of a limit has reached a mark.
func (k *kept) crossed(x meter.Crossing) {
	if report := *k.reports.Load(); report != nil {
		report(x)
	}
}

// restore waits until what was saved has been read, but not for long: requests can do without it, and it is
// added when it comes.
func (k *kept) restore() {
	if k.read.Load() || k.file.Load() == nil {
		return
	}
	k.started.Do(func() {
		go func() {
			defer close(k.done)
			k.mu.Lock()
			defer k.mu.Unlock()
			k.load(k.file.Load())
		}()
	})
	select {
	case <-k.done:
		return
	default:
	}
	timer := time.NewTimer(readPatience)
	defer timer.Stop()
	select {
	case <-k.done:
	case <-timer.C:
	}
}

// load reads what was saved, unless that was done.
func (k *kept) load(file *savedFile) {
	if file == nil || k.read.Load() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), storageTimeout)
	defer cancel()
	text, err := file.storage.Load(ctx, file.key)
	var saved savedUse
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		k.failed("could not read saved use of callers", file, err)
		return
	default:
		if err := json.Unmarshal(text, &saved); err != nil {
			k.logger.Load().Error("could not read saved use of callers, beginning anew", zap.String("key", file.key), zap.Error(err))
			saved.Callers = nil
		}
	}
	k.meters.Restore(time.Now(), saved.Callers)
	k.read.Store(true)
}

// changed records that the use has changed, and has it saved soon.
func (k *kept) changed() {
	if k.file.Load() == nil || k.dirty.Swap(true) || k.closed.Load() {
		return
	}
	k.timer.Store(time.AfterFunc(saveInterval, k.save))
}

// save saves the use, if it has changed.
func (k *kept) save() {
	file := k.file.Load()
	if file == nil {
		k.dirty.Store(false) // another config may have a file again, and the next change is saved then
	}
	if file == nil || !k.dirty.Load() {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.dirty.Store(false)
	if k.load(file); !k.read.Load() {
		k.changed()
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), storageTimeout)
	defer cancel()
	text, err := json.Marshal(savedUse{k.meters.Save(time.Now())})
	if err == nil {
		err = file.storage.Store(ctx, file.key, text)
	}
	if err != nil {
		k.failed("could not save use of callers", file, err)
		k.changed()
		return
	}
	k.failing = ""
}

// failed logs that the storage fails, unless the log says so already.
func (k *kept) failed(message string, file *savedFile, err error) {
	if k.failing != message {
		k.failing = message
		k.logger.Load().Error(message, zap.String("key", file.key), zap.Error(err))
	}
}
