package callers

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"path"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"

	limits "github.com/openai-lb/caddy-openai-lb/internal/callers"
	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

// reset gives alice her use back.
func (w *world) reset(t *testing.T) {
	t.Helper()
	if !limits.Reset(w.Handler.Pool, "alice", pool.Order{Time: time.Now(), By: "op@host", Reason: "a wrong report"}) {
		t.Error("alice is not known")
	}
}

func TestACallerThatAWrongReportBlockedIsServedAfterAReset(t *testing.T) {
	inBubble(t, "caller alice {\ntokens 10k/month\n}", func(t *testing.T, w *world) {
		w.AllReply(used(50, 1_000_000))
		w.chat(prompt(50, "")).WantServed(t, "a")
		w.AllReply(used(50, 50))
		w.chat(prompt(50, "")).WantError(t, http.StatusTooManyRequests, "insufficient_quota")
		w.reset(t)
		w.wantUse(t, 0)
		for range 20 { // with the usual output of before, only one would be
			w.chat(prompt(50, "")).WantServed(t, "a")
		}
		synctest.Wait()
		w.wantUse(t, 2000)
		logged := w.Logged("caller reset")
		if len(logged) != 1 || logged[0].Level != zap.InfoLevel ||
			fmt.Sprint(logged[0].ContextMap()) != "map[by:op@host caller:alice pool:"+w.Handler.Pool+" reason:a wrong report]" {
			t.Errorf("logged is %v", logged)
		}
		if limits.Reset(w.Handler.Pool, "carol", pool.Order{}) || limits.Reset("another pool", "alice", pool.Order{}) {
			t.Error("a caller is reset that has sent no request")
		}
	})
}

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
	synctest.Test(t, func(t *testing.T) {
		process := 0
		start := func(storage certmagic.Storage) (c *limits.Callers, name string) {
			process++
			name = fmt.Sprint(t.Name(), process) // the limiters of a name outlive its config
			c = limits.New(limits.Options{Config: limits.Config{Callers: []limits.Caller{{Name: "*", Allowance: limits.Allowance{Tokens: []limits.Limit{{Limit: "1M/day"}}}}}},
				Pool: name, Storage: renamed{storage}, Logger: zap.NewNop()})
			t.Cleanup(func() { c.Close() })
			return c, name
		}
		spend := func(c *limits.Callers, tokens int64) {
			a, _ := c.Admit(time.Now(), "alice", limiter.Estimate{Prompt: 1})
			a.Settle(time.Now(), limiter.Cost{Requests: 1, Prompt: tokens})
		}
		reset := func(name string) {
			if !limits.Reset(name, "alice", pool.Order{Time: time.Now()}) {
				t.Errorf("alice is not known to %s", name)
			}
		}
		want := func(name string, want int64) {
			t.Helper()
			if got := limits.LimitersOf(name).Get(time.Now(), "alice").Snapshot(time.Now()).Today; got != want {
				t.Errorf("%s: %d are used, want %d", name, got, want)
			}
		}
		c, name := start(files)
		spend(c, 500)
		time.Sleep(time.Minute)
		reset(name)

		c, name = start(files) // the first one ended at once
		reset(name)            // the first that it does
		spend(c, 3)
		want(name, 3)
		time.Sleep(time.Minute)

		c, name = start(files)
		spend(c, 4)
		want(name, 7)
		time.Sleep(time.Minute)

		slow := &slowStorage{Storage: files}
		c, name = start(slow)
		spend(c, 5)
		want(name, 5)
		reset(name)
		slow.ready.Store(true)
		time.Sleep(time.Minute)
		spend(c, 1)
		want(name, 1)
		time.Sleep(time.Minute)
		c, name = start(files)
		spend(c, 1)
		want(name, 2)
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
