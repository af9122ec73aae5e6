package ledger

import (
	"os"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
)

// TestAJournalThatCannotBeWrittenIsShownUntilItCan has a file where the
// journal's folder should be, while the storage works. No request comes after
// the disk is mended.
func TestAJournalThatCannotBeWrittenIsShownUntilItCan(t *testing.T) {
	s := newShelf(t)
	bubble.Test(t, func(t *testing.T) {
		l := s.open(zap.NewNop())
		wantUnwritten := func(want ...string) {
			t.Helper()
			synctest.Wait()
			var got []string
			for _, r := range l.Records() {
				if state := r.State(); state.Unwritten(time.Now()) {
					got = append(got, state.Name)
				}
			}
			if !slices.Equal(got, want) {
				t.Errorf("%q are not written, want %q", got, want)
			}
		}
		use := func() {
			for range 10 {
				l.Add(time.Now(), keyOf("alice"), one, "")
				time.Sleep(11 * time.Second)
			}
		}
		use()
		wantUnwritten()
		if err := os.RemoveAll(s.journals()); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(s.journals(), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		use()
		wantUnwritten("journal")
		if folder := l.journal.record.State().Folder; folder != s.journals() {
			t.Errorf("the problem names the folder %q, want %s", folder, s.journals())
		}
		time.Sleep(time.Hour)
		wantUnwritten("journal")
		if err := os.Remove(s.journals()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		wantUnwritten()
		if written := l.journal.record.State().Written; time.Since(written) > time.Minute {
			t.Errorf("the journal was written %s ago", time.Since(written))
		}
		time.Sleep(time.Hour)
		wantUnwritten()
	})
}
