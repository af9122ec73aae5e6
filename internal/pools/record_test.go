package pools

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
)

// TestARecordShowsAStorageThatFails checks also that neither changes nor their
// absence show a storage that works as failing.
func TestARecordShowsAStorageThatFails(t *testing.T) {
	path := t.TempDir()
	bubble.Test(t, func(t *testing.T) {
		var full atomic.Bool
		s := NewSaver("bill", nil, func(context.Context, certmagic.Storage) error {
			if full.Load() {
				return &StorageError{What: "could not save", Err: errors.New("no space left on device")}
			}
			return nil
		})
		defer s.Close()
		s.Configure(&certmagic.FileStorage{Path: path}, zap.NewNop())
		for _, fails := range []bool{false, true, false} {
			full.Store(fails)
			for range 10 {
				s.Changed()
				time.Sleep(SaveInterval)
			}
			if its := s.Record.State(); its.Unwritten(time.Now()) != fails {
				t.Errorf("with changes, its state is %+v: a storage that fails, %t", its, fails)
			}
			time.Sleep(time.Hour)
			if its := s.Record.State(); its.Unwritten(time.Now()) != fails || its.Waits.IsZero() == fails || its.Written.IsZero() {
				t.Errorf("without changes, its state is %+v: a storage that fails, %t", its, fails)
			}
		}
	})
}

// TestARecordShowsAStorageThatHangs has no second save, which would wait for
// the first one.
func TestARecordShowsAStorageThatHangs(t *testing.T) {
	path := t.TempDir()
	bubble.Test(t, func(t *testing.T) {
		s := NewSaver("bill", nil, func(context.Context, certmagic.Storage) error {
			time.Sleep(time.Hour)
			return nil
		})
		s.Configure(&certmagic.FileStorage{Path: path}, zap.NewNop())
		s.Changed()
		time.Sleep(SaveInterval + UnwrittenAfter)
		if its := s.Record.State(); !its.Unwritten(time.Now()) {
			t.Errorf("its state is %+v", its)
		}
		time.Sleep(time.Hour)
		if its := s.Record.State(); !its.Waits.IsZero() {
			t.Errorf("once it has saved, its state is %+v", its)
		}
	})
}

func TestARecordKnowsTheFolderThatItIsKeptIn(t *testing.T) {
	s := NewSaver("bill", nil, nil)
	for path, storage := range map[string]certmagic.Storage{"/data/caddy": &certmagic.FileStorage{Path: "/data/caddy"}, "": elsewhere{}} {
		if s.Configure(storage, zap.NewNop()); s.Record.State().Folder != path {
			t.Errorf("the state is %+v, want the folder %q", s.Record.State(), path)
		}
	}
}

// elsewhere is a storage that is not a folder. Its text may hold a password.
type elsewhere struct{ certmagic.Storage }

func (elsewhere) String() string { return "redis://:secret@host" }
