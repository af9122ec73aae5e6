package keys

import (
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
)

func TestSecretsAreReadAgainOnceASecond(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.DebugLevel)
		r := Reloader{Logger: zap.New(core)}
		var reads atomic.Int64
		var fails atomic.Bool
		r.Add("the secret", func() error {
			if reads.Add(1); fails.Load() {
				return errors.New("no such file")
			}
			return nil
		})
		for range 10 {
			r.Refresh()
			time.Sleep(ReloadInterval / 2)
		}
		if n := reads.Load(); n < 5 || n > 6 || logs.Len() != 0 {
			t.Errorf("%d reads in 5 seconds, and %d lines in the log", n, logs.Len())
		}
		fails.Store(true)
		for range 61 {
			r.Refresh()
			time.Sleep(ReloadInterval)
		}
		fails.Store(false)
		time.Sleep(ReloadInterval)
		r.Refresh()
		var got []string
		for _, entry := range logs.TakeAll() {
			got = append(got, entry.Level.String()+" "+entry.Message)
		}
		const problem = "error could not reload secret"
		if want := []string{problem, problem, "info secret reloaded"}; !slices.Equal(got, want) {
			t.Errorf("logged %q, want %q", got, want)
		}
	})
}

func TestAFileThatHangsTakesOneRequest(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		r := Reloader{Logger: zap.NewNop()}
		hangs, requests := make(chan struct{}), 0
		r.Add("the secret", func() error { <-hangs; return nil })
		for range 100 {
			go func() {
				r.Refresh()
				requests++
			}()
			synctest.Wait()
			time.Sleep(ReloadInterval)
		}
		if requests != 99 {
			t.Errorf("%d of 100 requests went on while the file could not be read", requests)
		}
		close(hangs)
		synctest.Wait()
		r.Refresh()
	})
}

// With many keys, reading them takes longer than a request.
func TestNoRequestReadsSecretsWhileOthersCome(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		r := Reloader{Logger: zap.NewNop()}
		var reads atomic.Int64
		r.Add("the secret", func() error {
			time.Sleep(100 * time.Millisecond) // longer than a request
			reads.Add(1)
			return nil
		})
		r.Refresh()
		for range 500 {
			began := time.Now()
			if r.Refresh(); !time.Now().Equal(began) {
				t.Fatalf("a request waited for %s", time.Since(began))
			}
			time.Sleep(20 * time.Millisecond)
		}
		if n := reads.Load(); n < 9 || n > 11 {
			t.Errorf("%d reads in 10 seconds", n)
		}
		time.Sleep(time.Hour)
		before := reads.Load()
		if time.Sleep(time.Hour); reads.Load() != before {
			t.Errorf("%d reads without a request", reads.Load()-before)
		}
		if r.Refresh(); reads.Load() != before+1 { // a key may have been revoked
			t.Error("after a pause, a request comes before the secrets are read")
		}
		r.Refresh()
		r.Close()
		if time.Sleep(time.Hour); reads.Load() != before+1 {
			t.Error("a config that was replaced reads them again")
		}
	})
}
