package callers

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

// TestUseIsSavedAgainAfterAConfigThatSavesNothing has three configs of a pool.
// The second one has `state`, and is loaded when the use has changed and is not
// saved yet.
func TestUseIsSavedAgainAfterAConfigThatSavesNothing(t *testing.T) {
	storage := &certmagic.FileStorage{Path: t.TempDir()}
	bubble.Test(t, func(t *testing.T) {
		load := func(storage certmagic.Storage) *Callers {
			c := New(Options{Config: config, Storage: storage, AdmissionConfig: seam.AdmissionConfig{Pool: t.Name(), Logger: zap.NewNop()}})
			c.Start()
			t.Cleanup(func() { c.Close() })
			return c
		}
		use := func(c *Callers, tokens int64) {
			spend(c, "alice", tokens)
			time.Sleep(pools.SaveInterval)
			synctest.Wait()
		}
		c := load(storage)
		spend(c, "alice", 1)
		use(load(nil), 2)
		use(load(storage), 4)
		text, err := storage.Load(t.Context(), c.kept.fileKey())
		if err != nil || !strings.Contains(string(text), `"limit":"tokens/day","window":10957,"used":7`) {
			t.Errorf("saved is %s (%v), want 7 tokens of the day", text, err)
		}
	})
}

// process starts a process with a pool, whose limiters are separate.
func process(t *testing.T, pool string, storage certmagic.Storage, limit string) *kept {
	k := newKept(subjectCallers, pool)
	k.configure(storage, zap.NewNop(), nil)
	l, err := ratelimit.ParseLimit(ratelimit.Tokens, limit)
	if err != nil {
		t.Fatal(err)
	}
	k.limiters.Configure(time.Now(), func(string) limiter.Settings { return limiter.Settings{Limits: []ratelimit.Limit{l}} })
	t.Cleanup(func() { k.Destruct() })
	return k
}

// spend admits requests of one token until the limit refuses one, up to a
// number, and has the use saved.
func (k *kept) spend(number int) (admitted int) {
	k.saver.Await()
	for range number {
		now := time.Now()
		r, refusal := k.limiters.Get(now, "alice").Try(now, ratelimit.Estimate{Prompt: 1})
		if refusal != nil {
			break
		}
		r.Settle(now, ratelimit.Cost{Requests: 1, Prompt: 1})
		k.saver.Changed()
		admitted++
	}
	k.saver.Save()
	return admitted
}

// TestProcessesWithOneStorageDoNotForgetWhatTheOthersUsed has two that run at
// the same time, and start anew one after the other.
func TestProcessesWithOneStorageDoNotForgetWhatTheOthersUsed(t *testing.T) {
	storage := &certmagic.FileStorage{Path: t.TempDir()}
	bubble.Test(t, func(t *testing.T) {
		for _, limit := range []string{"40/minute", "40/hour", "40/day", "40/month"} {
			a, b := process(t, limit, storage, limit), process(t, limit, storage, limit)
			all := a.spend(15) + b.spend(10)
			for range 3 {
				a = process(t, limit, storage, limit)
				all += a.spend(3)
				b = process(t, limit, storage, limit)
				all += b.spend(100)
			}
			if all != 40 {
				t.Errorf("%d of %s are used", all, limit)
			}
		}
	})
}

// TestWhatCannotBeReadOfSavedUseLosesNothingElse has a file that is not JSON,
// and figures that are none.
func TestWhatCannotBeReadOfSavedUseLosesNothingElse(t *testing.T) {
	storage := &certmagic.FileStorage{Path: t.TempDir()}
	bubble.Test(t, func(t *testing.T) {
		a := process(t, "pool", storage, "40/day")
		for key, text := range map[string]string{
			a.folder + "/broken.json": `{"writers":{"x":{"callers":{"alice":[{"limit":"tokens/day","window":10957,"used":4}]`,
			a.folder + "/other.json": `{"writers":{"x":{"callers":{"bob":7,"alice":[{"limit":"tokens/fortnight","window":1},{"limit":"tokens/day","window":10957,"used":"x"},
				{"limit":"tokens/day","window":10957,"used":4,"parts":[1e99]},{"limit":"tokens/day","window":10957,"used":3}]},"unnamed":{"00":[]}},"y":null,"z":7}}`,
			a.folder + "/third.json": `{"writers":{"z":{"callers":{"alice":[{"limit":"tokens/day","window":10957,"used":2,"version":9}]}}}}`,
		} {
			if err := storage.Store(t.Context(), key, []byte(text)); err != nil {
				t.Fatal(err)
			}
		}
		if got := a.spend(100); got != 40-3-2 {
			t.Errorf("%d are left of 40", got)
		}
	})
}

// brokenStorage fails while it has errors.
type brokenStorage struct {
	certmagic.Storage
	reads, writes error
}

func (s *brokenStorage) List(ctx context.Context, path string, recursive bool) ([]string, error) {
	if s.reads != nil {
		return nil, s.reads
	}
	return s.Storage.List(ctx, path, recursive)
}

func (s *brokenStorage) Load(ctx context.Context, key string) ([]byte, error) {
	if s.reads != nil {
		return nil, s.reads
	}
	return s.Storage.Load(ctx, key)
}

func (s *brokenStorage) Store(ctx context.Context, key string, text []byte) error {
	if s.writes != nil {
		return s.writes
	}
	return s.Storage.Store(ctx, key, text)
}

func TestAStorageThatFailsIsLoggedOnce(t *testing.T) {
	path := t.TempDir()
	bubble.Test(t, func(t *testing.T) {
		down := errors.New("read-only file system")
		s := &brokenStorage{&certmagic.FileStorage{Path: path}, down, down}
		core, logs := observer.New(zapcore.ErrorLevel)
		c := New(Options{Config: config, Storage: s, AdmissionConfig: seam.AdmissionConfig{Pool: t.Name(), Logger: zap.New(core)}})
		defer c.Close()
		wantLogged := func(reads, writes int) {
			t.Helper()
			for range 5 {
				spend(c, "alice", 1)
				time.Sleep(pools.SaveInterval + time.Second)
			}
			synctest.Wait()
			r, w := logs.FilterMessage("could not read saved use of callers").Len(), logs.FilterMessage("could not save use of callers").Len()
			if r != reads || w != writes {
				t.Errorf("logged are %d failures to read and %d to save, want %d and %d", r, w, reads, writes)
			}
		}
		wantLogged(1, 0)
		s.reads = nil
		wantLogged(1, 1)
		s.writes = nil
		wantLogged(1, 1)
		s.writes = down
		wantLogged(1, 2)
		s.writes = nil
	})
}
