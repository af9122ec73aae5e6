package keys

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

func TestSecretsAreReadAgainOnceASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.DebugLevel)
		r := Reloader{Logger: zap.New(core)}
		reads := 0
		var err error
		r.Add("the secret", func() error { reads++; return err })
		for range 10 {
			r.Refresh()
			time.Sleep(ReloadInterval / 2)
		}
		if reads < 5 || reads > 6 || logs.Len() != 0 {
			t.Errorf("%d reads in 5 seconds, and %d lines in the log", reads, logs.Len())
		}
		err = errors.New("no such file")
		for range 61 {
			r.Refresh()
			time.Sleep(ReloadInterval)
		}
		err = nil
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
	synctest.Test(t, func(t *testing.T) {
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
	synctest.Test(t, func(t *testing.T) {
		r := Reloader{Logger: zap.NewNop()}
		reads := 0
		r.Add("the secret", func() error {
			time.Sleep(100 * time.Millisecond) // longer than a request
			reads++
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
		if reads < 9 || reads > 11 {
			t.Errorf("%d reads in 10 seconds", reads)
		}
		time.Sleep(time.Hour)
		before := reads
		if time.Sleep(time.Hour); reads != before {
			t.Errorf("%d reads without a request", reads-before)
		}
		if r.Refresh(); reads != before+1 { // a key may have been revoked
			t.Error("after a pause, a request comes before the secrets are read")
		}
		r.Refresh()
		r.Close()
		if time.Sleep(time.Hour); reads != before+1 {
			t.Error("a config that was replaced reads them again")
		}
	})
}
