package callers

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/meter"
)

// TestUseIsSavedAgainAfterAConfigThatSavesNothing has three configs of a pool. The second one has `state`, and is
// loaded when the use has changed and is not saved yet.
func TestUseIsSavedAgainAfterAConfigThatSavesNothing(t *testing.T) {
	storage := &certmagic.FileStorage{Path: t.TempDir()}
	synctest.Test(t, func(t *testing.T) {
		load := func(storage certmagic.Storage) *Callers {
			c := New(Options{Config: config, Pool: t.Name(), Storage: storage, Logger: zap.NewNop()})
			c.Start()
			t.Cleanup(func() { c.Close() })
			return c
		}
		use := func(c *Callers, tokens int64) {
			a, _ := c.Admit(time.Now(), "alice", meter.Estimate{Prompt: tokens})
			a.Settle(time.Now(), meter.Cost{Requests: 1, Prompt: tokens})
			time.Sleep(saveInterval)
			synctest.Wait()
		}
		c := load(storage)
		a, _ := c.Admit(time.Now(), "alice", meter.Estimate{Prompt: 1})
		a.Settle(time.Now(), meter.Cost{Requests: 1, Prompt: 1})
		use(load(nil), 2)
		use(load(storage), 4)
		text, err := storage.Load(t.Context(), c.file.key)
		if err != nil || !strings.Contains(string(text), `"limit":"tokens/day","window":10957,"used":7`) {
			t.Errorf("saved is %s (%v), want 7 tokens of the day", text, err)
		}
	})
}
