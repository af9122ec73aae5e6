package ledger

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/internal/usage"
)

// shelf is a storage whose reads and writes fail while a test wants them to.
type shelf struct {
	certmagic.Storage
	mu            sync.Mutex
	reads, writes error
	stored        int
}

func newShelf(t *testing.T) *shelf {
	return &shelf{Storage: &certmagic.FileStorage{Path: t.TempDir()}}
}

// fails sets what reads and writes fail with from now on.
func (s *shelf) fails(reads, writes error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reads, s.writes = reads, writes
}

func (s *shelf) errors() (reads, writes error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reads, s.writes
}

func (s *shelf) Load(ctx context.Context, key string) ([]byte, error) {
	if err, _ := s.errors(); err != nil {
		return nil, err
	}
	return s.Storage.Load(ctx, key)
}

func (s *shelf) Store(ctx context.Context, key string, text []byte) error {
	if _, err := s.errors(); err != nil {
		return err
	}
	s.mu.Lock()
	s.stored++
	s.mu.Unlock()
	return s.Storage.Store(ctx, key, text)
}

// open returns a ledger of a process of its own.
func (s *shelf) open(logger *zap.Logger) *Config {
	c := &Config{newLedger("main"), s, logger}
	c.configure(s.journals())
	c.adopt()
	return c
}

// journals returns the folder of journals.
func (s *shelf) journals() string { return journalFolder(s.Storage) }

// saved returns the sum of the rows in the storage, and how many there are.
func (s *shelf) saved(t *testing.T) (sum Use, rows int) {
	t.Helper()
	pages, err := Read(t.Context(), s.Storage, func(Where) bool { return true })
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range pages {
		for _, row := range p.Rows {
			sum.Add(row.Use)
			rows++
		}
	}
	return sum, rows
}

// wantSaved checks how many requests are in the storage.
func (s *shelf) wantSaved(t *testing.T, requests int64) {
	t.Helper()
	synctest.Wait()
	if got, _ := s.saved(t); got.Requests != requests {
		t.Errorf("%d requests are saved, want %d", got.Requests, requests)
	}
}

var one = Use{Requests: 1, Input: 70, Cached: 40, Output: 50, Reasoning: 30}

func keyOf(caller string) Key { return Key{Caller: caller, Model: "gpt-4o", Backend: "east"} }

func TestAPageIsSavedTenSecondsAfterAChange(t *testing.T) {
	s := newShelf(t)
	bubble.Test(t, func(t *testing.T) {
		l := s.open(zap.NewNop())
		for i := range 30 {
			l.Add(time.Now(), keyOf("alice"), one, "")
			if time.Sleep(time.Second); i%10 == 9 {
				s.wantSaved(t, int64(i+1))
			}
		}
		time.Sleep(time.Hour)
		if synctest.Wait(); s.stored != 3 {
			t.Errorf("it was saved %d times in half a minute with requests and an hour without, want 3", s.stored)
		}
		other := s.open(zap.NewNop()) // of another replica, or after a restart
		other.Add(time.Now(), keyOf("alice"), one, "")
		other.saver.Save()
		s.wantSaved(t, 31)
	})
}

func TestNothingIsLostWhileTheStorageFails(t *testing.T) {
	s := newShelf(t)
	bubble.Test(t, func(t *testing.T) {
		core, logs := observer.New(zapcore.ErrorLevel)
		l := s.open(zap.New(core))
		s.fails(errors.New("input/output error"), errors.New("no space left on device"))
		for day := range 4 {
			l.Add(time.Now(), keyOf(fmt.Sprint(day)), one, "")
			l.Models(time.Now(), "alice")
			time.Sleep(24 * time.Hour)
		}
		if got := logs.FilterMessage("could not save the ledger").Len(); got != 1 {
			t.Errorf("logged is %d times that it could not be saved: %v", got, logs.All())
		}
		s.fails(nil, nil)
		time.Sleep(pools.SaveInterval)
		s.wantSaved(t, 4)
		l.Add(time.Now(), keyOf("alice"), one, "")
		l.saver.Save()
		if s.wantSaved(t, 5); len(l.days) > 2 {
			t.Errorf("%d days are in memory, want today and yesterday", len(l.days))
		}
		s.fails(nil, errors.New("no space left on device"))
		l.Add(time.Now(), keyOf("alice"), one, "")
		time.Sleep(time.Minute)
		synctest.Wait()
		if got := logs.FilterMessage("could not save the ledger").Len(); got != 2 {
			t.Errorf("logged is %d times that it could not be saved, after it fails anew", got)
		}
		s.fails(nil, nil)
		time.Sleep(pools.SaveInterval)
		s.wantSaved(t, 6)
	})
}

func TestAMonthIsInMemoryAtMostWhileTheStorageFails(t *testing.T) {
	s := newShelf(t)
	bubble.Test(t, func(t *testing.T) {
		l := s.open(zap.NewNop())
		s.fails(nil, errors.New("read-only file system"))
		for day := range 3 * maxDays {
			l.Add(time.Now().Add(time.Duration(day)*24*time.Hour), keyOf("alice"), one, "")
		}
		time.Sleep(pools.SaveInterval)
		synctest.Wait()
		s.fails(nil, nil)
		time.Sleep(pools.SaveInterval)
		s.wantSaved(t, maxDays)
	})
}

// TestAPageHas20000Rows has requests of many callers use up the rows.
func TestAPageHas20000Rows(t *testing.T) {
	s := newShelf(t)
	l := s.open(zap.NewNop())
	defer l.kill()
	now := time.Now()
	for i := range maxRows {
		l.Add(now, keyOf(fmt.Sprint(i)), one, "")
		l.Add(now, Key{Caller: fmt.Sprint(i), Model: "another", Backend: "east"}, one, "")
	}
	l.saver.Save()
	sum, rows := s.saved(t)
	if want := int64(2 * maxRows); sum.Requests != want || sum.Output != 50*want || rows != maxRows {
		t.Errorf("%d rows have %+v", rows, sum)
	}
	if got := l.today.rows.get(rest); got == nil || got.Requests != maxRows+1 {
		t.Errorf("callers have %+v beyond the rows", got)
	}
	l.Add(now.Add(24*time.Hour), keyOf("somebody"), one, "")
	l.saver.Save()
	if _, more := s.saved(t); more != rows+1 {
		t.Errorf("%d rows, want that of the next day, too", more)
	}
}

func TestPagesAreKeptFor400Days(t *testing.T) {
	s := newShelf(t)
	bubble.Test(t, func(t *testing.T) {
		for _, pool := range []string{"main", "acme/../certificates"} {
			p := Page{ID: "0123456789abcdef", Pool: pool, Day: time.Now().UTC().Format(time.DateOnly), Rows: []Row{{keyOf("alice"), one}}}
			if err := s.Store(t.Context(), p.key(), []byte(`{"rows":[{"requests":1}]}`)); err != nil {
				t.Fatal(err)
			}
		}
		l := s.open(zap.NewNop())
		time.Sleep(keptDays * 24 * time.Hour)
		yesterday := Page{ID: "fedcba", Pool: "main", Day: nameOf(time.Now().Unix()/dayLength - 1)}
		if err := s.Store(t.Context(), yesterday.key(), []byte(`{}`)); err != nil {
			t.Fatal(err)
		}
		l.Add(time.Now(), keyOf("alice"), one, "")
		time.Sleep(pools.SaveInterval)
		s.wantSaved(t, 3)
		time.Sleep(24 * time.Hour)
		s.wantSaved(t, 3) // nothing has changed
		yesterday.Day = nameOf(time.Now().Unix()/dayLength - 1)
		if err := s.Store(t.Context(), yesterday.key(), []byte(`{}`)); err != nil {
			t.Fatal(err)
		}
		l.Add(time.Now(), keyOf("alice"), one, "")
		time.Sleep(pools.SaveInterval)
		s.wantSaved(t, 2)
		if keys, err := list(t.Context(), s); err != nil || slices.ContainsFunc(keys, func(key string) bool { return strings.Contains(key, "2000-01-01") }) {
			t.Errorf("the storage still has %v (%v)", keys, err)
		}
	})
}

func TestACallersUseByModelIsThatOfAllReplicasOfAStorage(t *testing.T) {
	s := newShelf(t)
	bubble.Test(t, func(t *testing.T) {
		want := func(l *Config, caller string, want ...string) {
			t.Helper()
			time.Sleep(time.Second) // what is due now is saved
			var got []string
			for _, m := range l.Models(time.Now(), caller) {
				got = append(got, fmt.Sprintf("%s %d of %d", m.Model, m.Today.Requests, m.Month.Requests))
			}
			if !slices.Equal(got, want) {
				t.Errorf("%s has used %q, want %q", caller, got, want)
			}
		}
		a, b := s.open(zap.NewNop()), s.open(zap.NewNop())
		want(a, "alice")
		a.Add(time.Now(), keyOf("alice"), one, "")
		want(a, "alice", "gpt-4o 1 of 1")
		b.Add(time.Now(), keyOf("alice"), one, "")
		b.Add(time.Now(), Key{Caller: "alice", Model: "o3", Backend: "east"}, one, "")
		b.Add(time.Now(), keyOf("bob"), one, "")
		want(b, "alice", "gpt-4o 1 of 1", "o3 1 of 1")
		time.Sleep(pools.SaveInterval + readPause)
		want(a, "alice", "gpt-4o 2 of 2", "o3 1 of 1")
		want(b, "alice", "gpt-4o 2 of 2", "o3 1 of 1")
		time.Sleep(48 * time.Hour)
		want(a, "alice", "gpt-4o 0 of 2", "o3 0 of 1")
		a.Add(time.Now(), keyOf("alice"), one, "")
		time.Sleep(pools.SaveInterval) // the day before yesterday is complete
		want(a, "alice", "gpt-4o 1 of 3", "o3 0 of 1")
		restarted := s.open(zap.NewNop())
		want(restarted, "alice", "gpt-4o 1 of 3", "o3 0 of 1")
		s.fails(errors.New("input/output error"), nil)
		time.Sleep(time.Minute)
		want(restarted, "alice", "gpt-4o 1 of 3", "o3 0 of 1")
		time.Sleep(31 * 24 * time.Hour)
		s.fails(nil, nil)
		want(a, "alice")
		want(a, "bob")
	})
}

func TestAtMidnightNothingIsUsedToday(t *testing.T) {
	s := newShelf(t)
	bubble.Test(t, func(t *testing.T) {
		a, b := s.open(zap.NewNop()), s.open(zap.NewNop())
		time.Sleep(30*24*time.Hour + 23*time.Hour + 59*time.Minute + 59*time.Second)
		for month := range 2 {
			for _, l := range []*Config{a, b} {
				l.Add(time.Now(), keyOf("alice"), one, "")
				l.saver.Save()
			}
			for _, want := range []string{"2 of 2", "0 of 2", "0 of 2"} {
				if month == 0 && want != "2 of 2" {
					want = "" // it is the 31st
				}
				got := ""
				for _, m := range a.Models(time.Now(), "alice") {
					got = fmt.Sprintf("%d of %d", m.Today.Requests, m.Month.Requests)
				}
				if got != want {
					t.Errorf("at %s, %s are used, want %q", time.Now(), got, want)
				}
				if time.Sleep(2 * time.Second); want == "2 of 2" {
					s.fails(errors.New("input/output error"), nil)
				}
			}
			s.fails(nil, nil)
			time.Sleep(24*time.Hour - 6*time.Second)
		}
	})
}

func TestTheNewestVersionOfEachPageCounts(t *testing.T) {
	page := func(id, day string, changes int64) Page {
		return Page{ID: id, Pool: "main", Day: day, Changes: changes}
	}
	got := Newest([]Page{page("a", "2026-11-01", 3), page("a", "2026-11-02", 1), page("b", "2026-11-01", 1), page("a", "2026-11-01", 5), page("a", "2026-11-01", 4)})
	if len(got) != 3 || got[0].Changes != 5 {
		t.Errorf("got %+v", got)
	}
}

func TestAnUnreadablePageLosesNoOther(t *testing.T) {
	s := newShelf(t)
	l := s.open(zap.NewNop())
	defer l.kill()
	l.Add(time.Now(), keyOf("alice"), one, "")
	l.saver.Save()
	for name, text := range map[string]string{"main_bad.json": "{", "main_empty.json": ""} {
		if err := s.Store(t.Context(), folder+"/2026-11-25/"+name, []byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Store(t.Context(), folder+"/2026-11-25/123456", []byte("{")); err != nil { // a file that was being written
		t.Fatal(err)
	}
	pages, err := Read(t.Context(), s, func(Where) bool { return true })
	slices.SortFunc(pages, func(a, b Page) int { return -strings.Compare(a.Day+b.ID, b.Day+a.ID) })
	if len(pages) != 3 || err != nil || len(pages[0].Rows) != 1 || pages[0].Unreadable != "" {
		t.Fatalf("read %+v (%v)", pages, err)
	}
	for i, id := range []string{"bad", "empty"} {
		p := pages[1+i]
		if p.ID != id || p.Day != "2026-11-25" || p.Pool != "main" || len(p.Rows) != 0 || !strings.Contains(p.Unreadable, "main_"+id+".json") {
			t.Errorf("the page %s is %+v", id, p)
		}
	}
	s.fails(errors.New("input/output error"), nil)
	if pages, err := Read(t.Context(), s, func(Where) bool { return true }); len(pages) > 0 || err == nil {
		t.Errorf("from a storage that fails it read %+v (%v)", pages, err)
	}
}

// tokensOf returns what a reply has reported with this usage.
func tokensOf(t *testing.T, text string) usage.Tokens {
	t.Helper()
	var reader usage.Reader
	r := reader.Begin(map[string][]string{"Content-Type": {"application/json"}})
	r.Whole([]byte(`{"usage":` + text + `}`))
	return r.Tokens()
}

func TestUseIsReportedOrEstimated(t *testing.T) {
	reported := tokensOf(t, `{"prompt_tokens":70,"completion_tokens":50,"prompt_tokens_details":{"cached_tokens":40}}`)
	for _, c := range []struct {
		cost ratelimit.Cost
		want Use
	}{
		{ratelimit.Cost{Requests: 1, Prompt: 70, Output: 50}, Use{1, 70, 40, 50, 0, 0, 0}},
		{ratelimit.Cost{Requests: 1, Prompt: 70, Output: 300}, Use{1, 70, 40, 50, 0, 0, 250}}, // it was cut
		{ratelimit.Cost{Requests: 1, Prompt: 70, Output: 1 << 62}, Use{1, 70, 40, 50, 0, 0, maxEstimate}},
		{ratelimit.Cost{Requests: 1}, Use{Requests: 1}}, // it shows what was answered before
	} {
		if got := UseOf(c.cost, reported); got != c.want {
			t.Errorf("%+v is %+v, want %+v", c.cost, got, c.want)
		}
	}
}

func TestARowThatIsThereIsAddedToWithoutAllocation(t *testing.T) {
	l, now := newShelf(t).open(zap.NewNop()), time.Now()
	defer l.kill()
	l.Add(now, keyOf("alice"), one, "")
	if n := testing.AllocsPerRun(100, func() { l.Add(now, keyOf("alice"), one, "") }); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkAdd(b *testing.B) {
	l, now := newLedger("main"), time.Now()
	b.ReportAllocs()
	b.RunParallel(func(p *testing.PB) {
		for p.Next() {
			l.Add(now, keyOf("alice"), one, "")
		}
	})
}

// FuzzKeyOfAPage checks that a key says what the page says, whatever the pool
// is called, and leads out of no folder.
func FuzzKeyOfAPage(f *testing.F) {
	f.Add("main", "openai_lb/ledger/2026-11-25/main_12.json")
	f.Add("../..", "openai_lb/ledger/2026-11-25/../x.json")
	f.Fuzz(func(t *testing.T, pool, key string) {
		p := Page{ID: "0123456789abcdef", Pool: pool, Day: "2026-11-25"}
		if w, ok := whereOf(p.key()); !ok || w != (Where{p.Day, pool, p.ID}) || strings.Count(p.key(), "/") != 3 {
			t.Errorf("%q is of %+v", p.key(), w)
		}
		whereOf(key)
	})
}

func TestAClockThatIsFarAheadDeletesNoPageAndOverwritesNone(t *testing.T) {
	s := newShelf(t)
	bubble.Test(t, func(t *testing.T) {
		other := Page{ID: "0123456789abcdef", Pool: "main", Day: nameOf(time.Now().Unix() / dayLength)}
		if err := s.Store(t.Context(), other.key(), []byte(`{"rows":[{"requests":1}]}`)); err != nil {
			t.Fatal(err)
		}
		l := s.open(zap.NewNop())
		for _, at := range []time.Duration{0, 500 * 24 * time.Hour, 0} {
			l.Add(time.Now().Add(at), keyOf("alice"), one, "")
			time.Sleep(pools.SaveInterval)
			synctest.Wait()
		}
		s.wantSaved(t, 4)
	})
}

func TestAResponseInTheBackgroundIsBilledByTheTierThatHasServed(t *testing.T) {
	l := newLedger("main")
	k := Key{Caller: "alice", Model: "gpt-4o", Backend: "east", ServiceTier: "auto"}
	l.Add(time.Now(), k, Use{Requests: 1, EstimatedInput: 9, EstimatedOutput: 4000}, "resp_1")
	if !l.Awaits("resp_1") || l.Awaits("resp_2") || l.Awaits("") {
		t.Error("it does not know what it awaits")
	}
	l.Settle("resp_1", tokensOf(t, `{"input_tokens":70,"output_tokens":50}`), "flex")
	k.ServiceTier = "flex"
	if got := &l.today.rows; got.number != 1 || got.get(k).Use != (Use{Requests: 1, Input: 70, Output: 50}) {
		t.Errorf("the rows are %+v", got)
	}
}
