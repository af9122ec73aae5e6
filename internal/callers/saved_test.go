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

	"github.com/openai-lb/caddy-openai-lb/internal/meter"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
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
			time.Sleep(pools.SaveInterval)
			synctest.Wait()
		}
		c := load(storage)
		a, _ := c.Admit(time.Now(), "alice", meter.Estimate{Prompt: 1})
		a.Settle(time.Now(), meter.Cost{Requests: 1, Prompt: 1})
		use(load(nil), 2)
		use(load(storage), 4)
		text, err := storage.Load(t.Context(), c.kept.key)
		if err != nil || !strings.Contains(string(text), `"limit":"tokens/day","window":10957,"used":7`) {
			t.Errorf("saved is %s (%v), want 7 tokens of the day", text, err)
		}
	})
}

// brokenStorage fails while it has errors.
type brokenStorage struct {
	certmagic.Storage
	reads, writes error
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
	synctest.Test(t, func(t *testing.T) {
		down := errors.New("read-only file system")
		s := &brokenStorage{&certmagic.FileStorage{Path: path}, down, down}
		core, logs := observer.New(zapcore.ErrorLevel)
		c := New(Options{Config: config, Pool: t.Name(), Storage: s, Logger: zap.New(core)})
		defer c.Close()
		wantLogged := func(reads, writes int) {
			t.Helper()
			for range 5 {
				a, _ := c.Admit(time.Now(), "alice", meter.Estimate{Prompt: 1})
				a.Settle(time.Now(), meter.Cost{Requests: 1, Prompt: 1})
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

// An entry that is not understood, perhaps of a later release, gives nobody else the whole month again.
func TestAnUnreadableEntryOfSavedUseLosesNoOther(t *testing.T) {
	const good = `[{"limit":"tokens/day","window":10957,"used":7}]`
	for name, c := range map[string]struct {
		text string
		want []string // the callers who have used 7
		fine bool
	}{
		"all is well":               {`{"callers":{"alice":` + good + `,"bob":` + good + `}}`, []string{"alice", "bob"}, true},
		"a limit that is not known": {`{"callers":{"alice":[{"limit":"smiles/day"},` + good[1:] + `,"bob":` + good + `}}`, []string{"alice", "bob"}, false},
		"a number that is none":     {`{"callers":{"alice":[{"used":"much"}],"bob":` + good + `}}`, []string{"bob"}, false},
		"a caller that is no list":  {`{"callers":{"alice":7,"bob":` + good + `}}`, []string{"bob"}, false},
		"a file that is cut off":    {`{"callers":{"alice":` + good + `,"bob":[{"lim`, []string{"alice"}, false},
		"an empty file":             {``, nil, false},
		"another file":              {`[]`, nil, false},
	} {
		saved, err := readUse([]byte(c.text))
		if (err == nil) != c.fine || len(saved) != len(c.want) {
			t.Errorf("%s: read %v (%v)", name, saved, err)
		}
		for _, caller := range c.want {
			if entries := saved[caller]; len(entries) != 1 || entries[0].Used != 7 {
				t.Errorf("%s: %s has %+v", name, caller, entries)
			}
		}
	}
}
