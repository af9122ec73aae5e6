package ledger

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
)

// leave writes a journal as of a process that was killed.
func (s *shelf) leave(t *testing.T, name string, pages ...Page) {
	t.Helper()
	var text []byte
	for _, p := range pages {
		line, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		text = fmt.Appendf(text, "\n%s %s\n", checksum(line), line)
	}
	if err := errors.Join(os.MkdirAll(s.journals(), 0o700), os.WriteFile(filepath.Join(s.journals(), name), text, 0o600)); err != nil {
		t.Fatal(err)
	}
}

func pageOf(id string) Page {
	return Page{ID: id, Pool: "main", Day: "2026-11-25", Changes: 1, Rows: []Row{{keyOf("alice"), one}}}
}

func TestAJournalThatCannotBeAddedHoldsUpNoOther(t *testing.T) {
	s := newShelf(t)
	bad := pageOf("bb")
	if err := s.Store(t.Context(), bad.key(), nil); err != nil {
		t.Fatal(err)
	}
	s.leave(t, "0-1.journal", pageOf("aa"), bad)
	s.leave(t, "1-1.journal", pageOf("cc"))
	noDay, noID := pageOf("dd"), pageOf("..")
	noDay.Day, noDay.Pool = "..", "callers"
	s.leave(t, "2-1.journal", noDay, noID)
	secret := filepath.Join(t.TempDir(), "secret")
	if err := errors.Join(os.WriteFile(secret, nil, 0o600), os.Symlink(secret, filepath.Join(s.journals(), "3-1.journal"))); err != nil {
		t.Fatal(err)
	}
	bubble.Test(t, func(t *testing.T) {
		core, logs := observer.New(zapcore.WarnLevel)
		l := s.open(zap.New(core))
		time.Sleep(time.Minute)
		synctest.Wait()
		l.kill()
		if logs.Len() != 1 || l.adopted.Load() == nil {
			t.Errorf("logged is %v, want one line", logs.All())
		}
		if _, err := os.Stat(filepath.Join(s.journals(), "0-1.journal.bad")); err != nil || len(s.journalFiles(t)) != 2 {
			t.Errorf("the journals are %q (%v)", s.journalFiles(t), err)
		}
	})
	if err := s.Delete(t.Context(), bad.key()); err != nil {
		t.Fatal(err)
	}
	if got, rows := s.saved(t); got.Requests != 2 || rows != 2 {
		t.Errorf("%d rows have %+v, want 2", rows, got)
	}
}

func TestAJournalIsAddedToItsOwnStorageOnly(t *testing.T) {
	a, b := newShelf(t), newShelf(t)
	b.leave(t, "0-1.journal", pageOf("aa"))
	l := &Config{newLedger("main"), a, zap.NewNop()}
	l.configure(a.journals())
	defer l.kill()
	to := &journalPlace{b.journals(), zap.NewNop()} // another config has begun since
	if err := l.adoptAll(to); !errors.Is(err, errJournalMoved) {
		t.Errorf("it returns %v", err)
	}
	if a.wantNone(t); len(b.journalFiles(t)) != 1 {
		t.Error("the journal is gone")
	}
}

func (s *shelf) wantNone(t *testing.T) {
	t.Helper()
	if got, _ := s.saved(t); got.Requests != 0 {
		t.Errorf("%d requests are saved, want none", got.Requests)
	}
}

// TestAWriteThatFailsLeavesNoHole has the disk full once while the storage
// fails.
func TestAWriteThatFailsLeavesNoHole(t *testing.T) {
	s := newShelf(t)
	bubble.Test(t, func(t *testing.T) {
		l := s.open(zap.NewNop())
		s.fails(nil, errors.New("no space left on device"))
		add := func(caller string, size int) {
			l.journal.size += size
			l.Add(time.Now(), keyOf(caller), one, "")
			time.Sleep(journalDelay)
			synctest.Wait()
			l.journal.size -= size
		}
		add("alice", 0)
		add("bob", maxJournal)
		l.saver.Save() // and the journal is tried again
		add("carol", 0)
		l.kill()
		s.fails(nil, nil)
		s.open(zap.NewNop())
		s.wantSaved(t, 3)
	})
}

// TestALongOutageFillsNoDisk has a journal replaced by what is not saved,
// without a row that is not used any more.
func TestALongOutageFillsNoDisk(t *testing.T) {
	s := newShelf(t)
	bubble.Test(t, func(t *testing.T) {
		l := s.open(zap.NewNop())
		s.fails(nil, errors.New("no space left on device"))
		l.Add(time.Now(), keyOf("alice"), one, "resp_1")
		time.Sleep(journalDelay)
		synctest.Wait()
		l.Settle("resp_1", tokensOf(t, `{"input_tokens":70,"output_tokens":50}`), "priority")
		for range 3 {
			l.Add(time.Now(), Key{Caller: strings.Repeat("x", maxFile), Model: "m"}, one, "")
			time.Sleep(2 * journalDelay)
			synctest.Wait()
		}
		if l.journal.size > 3*maxFile || len(s.journalFiles(t)) != 1 {
			t.Errorf("%d journals have %d bytes", len(s.journalFiles(t)), l.journal.size)
		}
		l.kill()
		s.fails(nil, nil)
		s.open(zap.NewNop())
		s.wantSaved(t, 4)
	})
}

func TestRowsThatComeAndGoNeedNoMemoryWithoutAJournal(t *testing.T) {
	l, now := newLedger("main"), time.Now()
	for i := range 10_000 {
		id := fmt.Sprint(i)
		l.Add(now, keyOf("alice"), one, id)
		l.Settle(id, tokensOf(t, `{"input_tokens":70,"output_tokens":50}`), "priority")
	}
	if n := len(l.today.changed); n > 2*maxGone {
		t.Errorf("%d rows wait for the journal", n)
	}
}

func TestStoragesWithoutANameHaveJournalsOfTheirOwn(t *testing.T) {
	type database struct {
		certmagic.Storage
		ConnectionString string `json:"connection_string"`
	}
	if a, b := journalFolder(&database{nil, "a"}), journalFolder(&database{nil, "b"}); a == b {
		t.Errorf("both have %s", a)
	}
}

func TestAWholePageOfAJournalHasNoOtherRows(t *testing.T) {
	s := newShelf(t)
	saved, whole := pageOf("aa"), pageOf("aa")
	whole.Changes, whole.Whole, whole.Rows = 3, true, []Row{{keyOf("bob"), one}}
	for _, p := range []Page{saved, whole} {
		if err := amend(t.Context(), s, p.key(), []Page{p}); err != nil {
			t.Fatal(err)
		}
	}
	if got, rows := s.saved(t); got.Requests != 1 || rows != 1 {
		t.Errorf("%d rows have %+v, want that of bob", rows, got)
	}
}
