package callers

import (
	"context"
	"errors"
	"fmt"
	"path"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

// slowStorage cannot be read before it is ready.
type slowStorage struct {
	certmagic.Storage
	ready atomic.Bool
}

func (s *slowStorage) Load(ctx context.Context, key string) ([]byte, error) {
	if !s.ready.Load() {
		return nil, errors.New("not yet")
	}
	return s.Storage.Load(ctx, key)
}

// TestARestartDoesNotUndoAReset has processes that end without saving anything
// more.
func TestARestartDoesNotUndoAReset(t *testing.T) {
	files := &certmagic.FileStorage{Path: t.TempDir()}
	bubble.Test(t, func(t *testing.T) {
		process := 0
		start := func(storage certmagic.Storage) *Callers {
			process++
			name := fmt.Sprint(t.Name(), process) // the limiters of a name outlive its config
			c := New(Options{Config: Config{Callers: []Caller{{Name: "*", Allowance: Allowance{Tokens: []Limit{{Limit: "1M/day"}}}}}},
				Storage: renamed{storage}, AdmissionConfig: seam.AdmissionConfig{Pool: name, Logger: zap.NewNop()}})
			t.Cleanup(func() { c.Close() })
			return c
		}
		reset := func(c *Callers) {
			if !c.kept.reset("alice", pool.Order{Time: time.Now()}) {
				t.Errorf("alice is not known to %s", c.name)
			}
		}
		want := func(c *Callers, want int64) {
			t.Helper()
			if got := c.kept.limiters.Get(time.Now(), "alice").Snapshot(time.Now()).Today; got != want {
				t.Errorf("%s: %d are used, want %d", c.name, got, want)
			}
		}
		c := start(files)
		spend(c, "alice", 500)
		time.Sleep(time.Minute)
		reset(c)

		c = start(files) // the first one ended at once
		reset(c)         // the first that it does
		spend(c, "alice", 3)
		want(c, 3)
		time.Sleep(time.Minute)

		c = start(files)
		spend(c, "alice", 4)
		want(c, 7)
		time.Sleep(time.Minute)

		slow := &slowStorage{Storage: files}
		c = start(slow)
		spend(c, "alice", 5)
		want(c, 5)
		reset(c)
		slow.ready.Store(true)
		time.Sleep(time.Minute)
		spend(c, "alice", 1)
		want(c, 1)
		time.Sleep(time.Minute)
		c = start(files)
		spend(c, "alice", 1)
		want(c, 2)
	})
}

// renamed keeps the files of all pools in one folder.
type renamed struct{ certmagic.Storage }

func (s renamed) List(ctx context.Context, folder string, _ bool) ([]string, error) {
	keys, err := s.Storage.List(ctx, "use", false)
	for i := range keys {
		keys[i] = path.Join(folder, path.Base(keys[i]))
	}
	return keys, err
}

func (s renamed) Load(ctx context.Context, key string) ([]byte, error) {
	return s.Storage.Load(ctx, path.Join("use", path.Base(key)))
}

func (s renamed) Store(ctx context.Context, key string, value []byte) error {
	return s.Storage.Store(ctx, path.Join("use", path.Base(key)), value)
}

func (s renamed) Stat(ctx context.Context, key string) (certmagic.KeyInfo, error) {
	return s.Storage.Stat(ctx, path.Join("use", path.Base(key)))
}
