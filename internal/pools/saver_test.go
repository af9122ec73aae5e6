package pools

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
)

func TestTheLogSaysThatAStorageFailsAndThatItWorksAgain(t *testing.T) {
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
		core, logs := observer.New(zapcore.InfoLevel)
		s.Configure(&certmagic.FileStorage{Path: path}, zap.New(core))
		var got []string
		for _, fails := range []bool{false, true, false} {
			full.Store(fails)
			for range 10 {
				s.Changed()
				time.Sleep(SaveInterval)
				synctest.Wait()
			}
			for _, line := range logs.TakeAll() {
				got = append(got, line.Level.String()+" "+line.Message)
			}
			got = append(got, "-")
		}
		if want := []string{"-", "error could not save", "-", "info storage works again", "-"}; !slices.Equal(got, want) {
			t.Errorf("the log has %q, want %q", got, want)
		}
	})
}

func TestAStorageThatHangsDelaysTheEndOfAllPoolsOnce(t *testing.T) {
	path := t.TempDir()
	bubble.Test(t, func(t *testing.T) {
		var hangs, saved atomic.Int64
		var all []*Saver
		for range 20 {
			s := NewSaver("bill", nil, func(context.Context, certmagic.Storage) error { // a hanging file system ignores the context
				time.Sleep(time.Duration(hangs.Load()))
				saved.Add(1)
				return nil
			})
			s.Configure(&certmagic.FileStorage{Path: path}, zap.NewNop())
			defer s.Close()
			all = append(all, s)
		}
		end := func(hang time.Duration) (took time.Duration, count int64) {
			time.Sleep(time.Hour)
			hangs.Store(int64(hang))
			saved.Store(0)
			begin := time.Now()
			for _, s := range all {
				s.Changed()
				SaveLast(s.Save)
			}
			return time.Since(begin), saved.Load()
		}
		for _, c := range []struct{ hang, want time.Duration }{{0, 0}, {time.Minute, storageTimeout}, {time.Second, 20 * time.Second}, {4 * time.Second, 80 * time.Second}} {
			if took, saved := end(c.hang); took != c.want || saved != 20 && c.hang < storageTimeout {
				t.Errorf("with a storage that takes %s, it takes %s, want %s, and %d of 20 have saved", c.hang, took, c.want, saved)
			}
		}
	})
}

func TestAStorageThatAnswersAgainIsWaitedForAtTheEnd(t *testing.T) {
	path := t.TempDir()
	bubble.Test(t, func(t *testing.T) {
		var saved atomic.Int64
		hang := 35 * time.Second
		s := NewSaver("bill", nil, func(context.Context, certmagic.Storage) error {
			time.Sleep(hang)
			saved.Add(1)
			return nil
		})
		s.Configure(&certmagic.FileStorage{Path: path}, zap.NewNop())
		defer s.Close()
		s.Changed()
		SaveLast(s.Save) // a reload
		time.Sleep(20 * time.Second)
		synctest.Wait()
		hang = time.Second
		s.Changed()
		SaveLast(s.Save)
		if saved.Load() != 2 {
			t.Errorf("%d of 2 have saved", saved.Load())
		}
	})
}
