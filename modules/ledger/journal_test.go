package ledger

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
)

// kill has the ledger end as its process does when it is killed: it writes
// nothing more, and its files are not locked.
func (c *Config) kill() {
	c.saver.Close()
	c.journal.mu.Lock()
	defer c.journal.mu.Unlock()
	c.journal.to.Store(nil)
	for _, file := range c.journal.files {
		file.Close()
	}
}

// journalFiles returns the contents of the journals by their names.
func (s *shelf) journalFiles(t *testing.T) map[string][]byte {
	t.Helper()
	files := make(map[string][]byte)
	entries, _ := os.ReadDir(s.journals())
	for _, e := range entries {
		text, err := os.ReadFile(filepath.Join(s.journals(), e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		files[e.Name()] = text
	}
	return files
}

func TestAKillTakesNothingThatWasUsedBefore(t *testing.T) {
	s := newShelf(t)
	bubble.Test(t, func(t *testing.T) {
		l := s.open(zap.NewNop())
		for i := range 28 { // it is saved after 10 s, and after 21
			l.Add(time.Now(), keyOf("alice"), one, "")
			l.Add(time.Now(), keyOf(fmt.Sprint(i)), one, "")
			time.Sleep(1100 * time.Millisecond)
		}
		synctest.Wait()
		l.kill()
		s.wantSaved(t, 40)
		other := s.open(zap.NewNop())
		s.wantSaved(t, 56)
		other.Add(time.Now(), keyOf("alice"), one, "")
		time.Sleep(pools.SaveInterval)
		s.wantSaved(t, 57)
		if files := s.journalFiles(t); len(files) > 0 {
			t.Errorf("there still are the journals %q", files)
		}
		if pages, err := Read(t.Context(), s, func(Where) bool { return true }); err != nil || len(pages) != 2 {
			t.Errorf("there are %d pages (%v), want those of two processes", len(pages), err)
		}
	})
}

func TestWhatIsSavedAlreadyIsNotWrittenIntoAJournal(t *testing.T) {
	s := newShelf(t)
	bubble.Test(t, func(t *testing.T) {
		l := s.open(zap.NewNop())
		for range 2 {
			l.Add(time.Now(), keyOf("alice"), one, "")
			l.saver.Save() // as at a stop
			time.Sleep(2 * journalDelay)
			synctest.Wait()
			if files := s.journalFiles(t); len(files) > 0 {
				t.Errorf("there are the journals %q", files)
			}
		}
		s.wantSaved(t, 2)
	})
}

func TestAJournalOfAProcessThatRunsIsLeftAlone(t *testing.T) {
	s := newShelf(t)
	bubble.Test(t, func(t *testing.T) {
		l := s.open(zap.NewNop())
		l.Add(time.Now(), keyOf("alice"), one, "")
		time.Sleep(journalDelay)
		s.open(zap.NewNop())
		s.wantSaved(t, 0)
		if files := s.journalFiles(t); len(files) != 1 {
			t.Errorf("the journals are %q", files)
		}
		time.Sleep(pools.SaveInterval)
		s.wantSaved(t, 1)
	})
}

// TestNothingIsCountedTwiceWheneverAProcessIsKilled has a process killed
// wherever it writes, before and after it has saved, and its journal read
// several times.
func TestNothingIsCountedTwiceWheneverAProcessIsKilled(t *testing.T) {
	s := newShelf(t)
	bubble.Test(t, func(t *testing.T) {
		l := s.open(zap.NewNop())
		for i := range 6 {
			l.Add(time.Now(), keyOf(fmt.Sprint(i%2)), one, "")
			time.Sleep(journalDelay)
			if synctest.Wait(); i == 2 {
				s.fails(nil, errors.New("no space left on device")) // two files then
				l.saver.Save()
				s.fails(nil, nil)
			}
		}
		files := s.journalFiles(t)
		if len(files) != 2 {
			t.Fatalf("the journals are %q", files)
		}
		for _, saved := range []bool{false, true} {
			if saved {
				l.saver.Save()
			}
			for _, text := range files {
				for end := 1; end <= len(text); end += 7 {
					spoilt := bytes.Clone(text) // as after a power cut
					spoilt[end-1]++
					for _, text := range [][]byte{spoilt, text[:end], text, text[:end]} {
						left := filepath.Join(s.journals(), "0-1"+journalSuffix)
						if err := os.WriteFile(left, text, 0o600); err != nil {
							t.Fatal(err)
						}
						before, _ := s.saved(t)
						s.open(zap.NewNop())
						if _, err := os.Stat(left); err == nil {
							t.Fatal("it was not adopted")
						}
						if after, _ := s.saved(t); after.Requests < before.Requests || after.Requests > 6 || after.Input != 70*after.Requests {
							t.Fatalf("after %d of %d bytes, it has %+v, before %+v", end, len(text), after, before)
						}
					}
				}
			}
			s.wantSaved(t, 6)
		}
	})
}

// TestWhateverHappensTheLedgerHasWhatWasUsed has processes that share a storage
// save, fail to save, settle, end and be killed, at random.
func TestWhateverHappensTheLedgerHasWhatWasUsed(t *testing.T) {
	for seed := range uint64(10) {
		s := newShelf(t)
		bubble.Test(t, func(t *testing.T) {
			random, want := rand.New(rand.NewPCG(seed, 1)), make(map[Key]int64)
			all := []*Config{s.open(zap.NewNop()), s.open(zap.NewNop()), s.open(zap.NewNop())}
			now := time.Now()
			for range 400 {
				i := random.IntN(len(all))
				switch n := random.IntN(100); {
				case n < 70:
					k := Key{Caller: fmt.Sprint(random.IntN(5)), Model: "m", Backend: "east", ServiceTier: "flex"}
					all[i].Add(now, k, one, "")
					want[k]++
				case n < 74:
					id := fmt.Sprint("resp_", random.Uint64())
					k := Key{Caller: "background", Model: "m", Backend: "east", ServiceTier: "flex"}
					all[i].Add(now, k, Use{Requests: 1, EstimatedOutput: 9}, id)
					time.Sleep(time.Duration(random.IntN(2)) * journalDelay)
					all[i].Settle(id, tokensOf(t, `{"input_tokens":70,"output_tokens":50}`), "priority")
					k.ServiceTier = "priority"
					want[k]++
				case n < 80:
					now = now.Add(time.Duration(random.IntN(13)-4) * time.Hour) // the clock is set
				case n < 84:
					s.fails(nil, errors.New("no space left on device"))
				case n < 90:
					s.fails(nil, nil)
				case n < 95:
					all[i].saver.Save()
				default:
					time.Sleep(journalDelay)
					synctest.Wait()
					all[i].kill()
					all[i] = s.open(zap.NewNop())
				}
				if random.IntN(4) == 0 {
					time.Sleep(time.Duration(random.IntN(4)) * time.Second)
				}
			}
			s.fails(nil, nil)
			time.Sleep(time.Minute)
			for _, l := range all {
				l.kill()
			}
			s.open(zap.NewNop())
			synctest.Wait()
			pages, err := Read(t.Context(), s, func(Where) bool { return true })
			if err != nil {
				t.Fatal(err)
			}
			got := make(map[Key]int64)
			for _, e := range Entries(pages) {
				if got[e.Key] += e.Requests; e.EstimatedOutput != 0 || e.Output != 50*e.Requests {
					t.Errorf("seed %d: a row is %+v", seed, e.Row)
				}
			}
			if !maps.Equal(got, want) {
				t.Errorf("seed %d: the ledger has %v, want %v", seed, got, want)
			}
			if files := s.journalFiles(t); len(files) > 0 {
				t.Errorf("seed %d: there still are the journals %q", seed, slices.Collect(maps.Keys(files)))
			}
		})
	}
}

// TestAJournalChangesNoLaterVersionOfAPage has a journal that misses what was
// saved, because the disk was full.
func TestAJournalChangesNoLaterVersionOfAPage(t *testing.T) {
	s := newShelf(t)
	page := func(changes int64, caller string, requests int64) Page {
		return Page{ID: "0123456789abcdef", Pool: "main", Day: "2026-11-25", Changes: changes, Rows: []Row{{keyOf(caller), Use{Requests: requests}}}}
	}
	text, err := json.Marshal(page(5, "alice", 5))
	if err != nil {
		t.Fatal(err)
	}
	saved := page(0, "", 0)
	if err := s.Store(t.Context(), saved.key(), text); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := amend(t.Context(), s, saved.key(), []Page{page(3, "alice", 3), page(6, "bob", 1)}); err != nil {
			t.Fatal(err)
		}
		if sum, rows := s.saved(t); sum.Requests != 6 || rows != 2 {
			t.Errorf("%d rows have %+v", rows, sum)
		}
	}
}

func TestAJournalWaitsForAStorageThatFails(t *testing.T) {
	s := newShelf(t)
	bubble.Test(t, func(t *testing.T) {
		l := s.open(zap.NewNop())
		l.Add(time.Now(), keyOf("alice"), one, "")
		time.Sleep(journalDelay)
		synctest.Wait()
		l.kill()
		core, logs := observer.New(zapcore.ErrorLevel)
		s.fails(errors.New("input/output error"), nil)
		other := s.open(zap.New(core))
		other.Add(time.Now(), keyOf("bob"), one, "")
		time.Sleep(time.Minute)
		if s.wantSaved(t, 1); logs.Len() != 1 {
			t.Errorf("logged is %v, want one line", logs.All())
		}
		s.fails(nil, nil)
		time.Sleep(pools.SaveInterval)
		s.wantSaved(t, 2)
	})
}

func TestADiskThatFailsIsWarnedOfOnceAndTheLedgerGoesOn(t *testing.T) {
	for name, spoil := range map[string]func(*testing.T, *shelf, *Config){
		"no folder": func(t *testing.T, s *shelf, _ *Config) {
			if err := os.MkdirAll(filepath.Dir(s.journals()), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(s.journals(), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		},
		"full": func(t *testing.T, s *shelf, l *Config) {
			l.Add(time.Now(), keyOf("alice"), one, "")
			time.Sleep(journalDelay)
			synctest.Wait()
			full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
			if err != nil {
				t.Skip(err)
			}
			name := l.journal.files[0].Name()
			l.journal.files[0].Close()
			l.journal.files[0] = os.NewFile(full.Fd(), name)
			t.Cleanup(func() { full.Close() })
			l.Add(time.Now(), keyOf("alice"), Use{}, "")
		},
		"too large": func(_ *testing.T, _ *shelf, l *Config) {
			l.Add(time.Now(), keyOf("alice"), one, "")
			time.Sleep(journalDelay)
			synctest.Wait()
			l.journal.size = maxJournal
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newShelf(t)
			bubble.Test(t, func(t *testing.T) {
				core, logs := observer.New(zapcore.InfoLevel)
				l := s.open(zap.New(core))
				spoil(t, s, l)
				before := l.sum()
				for range 30 {
					l.Add(time.Now(), keyOf("alice"), one, "")
					time.Sleep(time.Second)
				}
				time.Sleep(pools.SaveInterval)
				s.wantSaved(t, before+30)
				var lines []string
				for _, line := range logs.All() {
					lines = append(lines, line.Level.String()+" "+line.Message)
				}
				want := []string{"error could not write the ledger's journal: a kill takes what is not saved"}
				if name == "full" {
					want = append(want, "info the ledger's journal is written again")
				}
				if !slices.Equal(lines, want) {
					t.Errorf("logged is %q, want %q", lines, want)
				}
			})
		})
	}
}

// sum returns how many requests are in memory.
func (l *Ledger) sum() (requests int64) {
	for _, e := range Entries(l.pages(func(*day) bool { return true })) {
		requests += e.Requests
	}
	return requests
}

func TestThereAreTwoJournalsAtMostWhileTheStorageFails(t *testing.T) {
	for _, size := range []int{0, maxJournal} {
		s := newShelf(t)
		bubble.Test(t, func(t *testing.T) {
			l := s.open(zap.NewNop())
			l.Add(time.Now(), keyOf("alice"), one, "")
			time.Sleep(journalDelay)
			synctest.Wait()
			l.journal.size += size
			s.fails(nil, errors.New("no space left on device"))
			for i := range 100 {
				l.Add(time.Now(), keyOf("alice"), one, "")
				time.Sleep(pools.SaveInterval)
				if files := s.journalFiles(t); len(files) > 2 {
					t.Fatalf("after %d failures there are %d journals", i, len(files))
				}
			}
			synctest.Wait()
			l.journal.size -= size
			s.fails(nil, nil)
			for range 2 {
				l.Add(time.Now(), keyOf("alice"), one, "")
				time.Sleep(2 * pools.SaveInterval)
			}
			synctest.Wait()
			if files := s.journalFiles(t); len(files) > 0 || l.journal.size != 0 {
				t.Errorf("there still are %d journals of %d bytes", len(files), l.journal.size)
			}
			s.wantSaved(t, 103)
		})
	}
}

// TestADiskThatHangsHoldsUpNeitherRequestsNorTheStorage has the lock of the
// journal as a write does that does not return.
func TestADiskThatHangsHoldsUpNeitherRequestsNorTheStorage(t *testing.T) {
	s := newShelf(t)
	l := s.open(zap.NewNop())
	defer l.kill()
	l.journal.mu.Lock()
	defer l.journal.mu.Unlock()
	for range 30 {
		l.Add(time.Now(), keyOf("alice"), one, "")
	}
	l.configure(s.journals()) // a reload
	l.saver.Save()
	if got, _ := s.saved(t); got.Requests != 30 {
		t.Errorf("%d requests are saved, want 30", got.Requests)
	}
}

func TestEachStorageHasJournalsOfItsOwn(t *testing.T) {
	a, b := newShelf(t), newShelf(t)
	var folders []string
	for _, storage := range []interface {
		String() string
	}{a, b} {
		folders = append(folders, storage.String())
	}
	if journalFolder(a) == journalFolder(b) || journalFolder(a) == a.journals() || journalFolder(a) != journalFolder(&shelf{Storage: a.Storage}) {
		t.Errorf("the storages %q have %s and %s", folders, journalFolder(a), journalFolder(b))
	}
}

// String implements fmt.Stringer, as storages do.
func (s *shelf) String() string { return fmt.Sprint(s.Storage) }

// FuzzJournal checks that what is read of any file is of pages, and that a line
// that was not written completely is not read.
func FuzzJournal(f *testing.F) {
	line := func(p Page) []byte {
		j := new(journal)
		folder := f.TempDir()
		if err := j.write(folder, []Page{p}); err != nil {
			f.Fatal(err)
		}
		text, err := os.ReadFile(j.files[0].Name())
		if err != nil {
			f.Fatal(err)
		}
		return text
	}
	good := line(Page{ID: "0123456789abcdef", Pool: "main", Day: "2026-11-25", Changes: 7, Rows: []Row{{keyOf("alice"), one}}})
	f.Add(good)
	f.Add(line(Page{ID: "../x", Pool: "..", Day: "../..", Changes: 7, Rows: []Row{{keyOf("alice"), one}}}))
	f.Fuzz(func(t *testing.T, text []byte) {
		for key, pages := range readJournal(text) {
			if w, ok := whereOf(key); !ok || len(pages) == 0 || w.ID != pages[0].ID || filepath.Clean(key) != key {
				t.Errorf("%q has %+v", key, pages)
			}
		}
		if got := readJournal(append(bytes.Clone(text), good...)); len(got[folder+"/2026-11-25/main_0123456789abcdef.json"]) == 0 {
			t.Error("what follows is not read")
		}
	})
}

func BenchmarkAddWithAJournal(b *testing.B) {
	s := &shelf{}
	l, now := &Config{newLedger("main"), s, zap.NewNop()}, time.Now()
	l.configure(b.TempDir())
	b.ReportAllocs()
	b.RunParallel(func(p *testing.PB) {
		for p.Next() {
			l.Add(now, keyOf("alice"), one, "")
		}
	})
	l.saver.Close()
}
