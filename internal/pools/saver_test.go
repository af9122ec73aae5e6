package pools

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"
)

func TestAStorageThatHangsDelaysTheEndOfAllPoolsOnce(t *testing.T) {
	path := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		var hangs time.Duration
		var all []*Saver
		saved := 0
		for range 20 {
			s := NewSaver(func(context.Context, certmagic.Storage) error { // a file system that hangs does not heed its context
				time.Sleep(hangs)
				saved++
				return nil
			})
			s.Configure(&certmagic.FileStorage{Path: path}, zap.NewNop())
			defer s.Close()
			all = append(all, s)
		}
		end := func() time.Duration {
			begin := time.Now()
			for _, s := range all {
				s.Changed()
				s.SaveLast()
			}
			return time.Since(begin)
		}
		if took := end(); took != 0 || saved != 20 {
			t.Errorf("with a storage that works, it takes %s, and %d of 20 have saved", took, saved)
		}
		hangs = time.Minute
		if took := end(); took != storageTimeout {
			t.Errorf("with a storage that hangs, it takes %s, want %s", took, storageTimeout)
		}
		time.Sleep(time.Hour)
		hangs, saved = time.Second, 0
		if took := end(); took != 20*time.Second || saved != 20 {
			t.Errorf("with a storage that works again, it takes %s, and %d of 20 have saved", took, saved)
		}
		hangs, saved = 4*time.Second, 0
		if took := end(); took != 80*time.Second || saved != 20 {
			t.Errorf("with a slow storage, it takes %s, and %d of 20 have saved", took, saved)
		}
	})
}
