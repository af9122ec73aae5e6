package ledger

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
)

// used returns the use of the rows of a caller for which want returns true.
func used(l *Ledger, caller string, want func(Key) bool) (u Use) {
	l.collect()
	for k, row := range l.today.rows.of[caller] {
		if want(k) {
			u.Add(row.Use)
		}
	}
	return u
}

func TestACallerWhoMakesUpModelsTakesNothingOutOfTheBillOfOthers(t *testing.T) {
	l, now := newLedger("main"), time.Now()
	for _, mallory := range []string{"m1", "m2", "m3", "m4", "m5", "m6", "m7", "m8", "m9", "m10", "m11", "m12"} {
		for i := range maxRows {
			l.Add(now, Key{Caller: mallory, Model: fmt.Sprint("made-up-", i), Backend: "east"}, one, "")
		}
		if n := len(l.today.rows.of[mallory]); n > maxOwn {
			t.Errorf("%s has %d rows", mallory, n)
		}
		if got := used(l, mallory, func(Key) bool { return true }); got.Requests != maxRows {
			t.Errorf("%s has used %d requests", mallory, got.Requests)
		}
	}
	for i := range 100 {
		for _, tier := range []string{"default", "flex"} {
			k := Key{Caller: fmt.Sprint("team-", i), Model: "gpt-4o", Backend: "east", ServiceTier: tier}
			l.Add(now, k, one, "")
			if row := l.today.rows.get(k); row == nil || row.Requests != 1 {
				t.Fatalf("%+v has no row", k)
			}
		}
	}
}

// A caller of many backends keeps its models and tiers in the bill.
func TestTheBackendIsGivenUpFirstAndTheModelLast(t *testing.T) {
	l, now := newLedger("main"), time.Now()
	add := func(model, backend, tier string) {
		l.Add(now, Key{Caller: "alice", Model: model, Backend: backend, ServiceTier: tier}, one, "")
	}
	for i := range 2 * maxOwn {
		add("gpt-4o", fmt.Sprint("backend-", i), "flex")
	}
	add("gpt-5", "east", "default")
	add("gpt-5", "west", "default")
	for i := range maxOwn {
		add("gpt-6", "east", fmt.Sprint("tier-", i))
	}
	for i := range maxOwn {
		add(fmt.Sprint("made-up-", i), "east", "default")
	}
	for name, c := range map[string]struct {
		want func(Key) bool
		n    int64
	}{
		"the first model, and its tier":   {func(k Key) bool { return k.Model == "gpt-4o" && k.ServiceTier == "flex" }, 2 * maxOwn},
		"without its backends":            {func(k Key) bool { return k.Model == "gpt-4o" && k.Backend == other }, 2*maxOwn - (maxOwn*7/10 - 1)},
		"a model of which no row had one": {func(k Key) bool { return k == Key{"alice", "gpt-5", other, "default"} }, 2},
		"a model of too many tiers":       {func(k Key) bool { return k.Model == "gpt-6" }, maxOwn},
		"a tier that was given up":        {func(k Key) bool { return k == Key{"alice", "gpt-6", other, other} }, maxOwn - 198},
		"a model that was given up":       {func(k Key) bool { return k == restOf("alice") }, maxOwn - 199},
	} {
		if got := used(l, "alice", c.want); got.Requests != c.n {
			t.Errorf("%s: %d requests, want %d", name, got.Requests, c.n)
		}
	}
	if n := l.today.rows.number; n > maxOwn {
		t.Errorf("there are %d rows", n)
	}
}

func TestAResponseInTheBackgroundLeavesTheRowThatItWasAddedTo(t *testing.T) {
	l, now := newLedger("main"), time.Now()
	for i := range 2 * maxOwn {
		l.Add(now, Key{Caller: "alice", Model: fmt.Sprint(i), Backend: "east"}, one, "")
	}
	k := Key{Caller: "alice", Model: "late", Backend: "east"}
	l.Add(now, k, Use{Requests: 1, EstimatedOutput: 4000}, "resp_1")
	for row := range l.today.rows.all() { // there is room again
		if row.Key != restOf("alice") {
			l.today.rows.remove(row)
		}
	}
	l.Settle("resp_1", tokensOf(t, `{"input_tokens":70,"output_tokens":50}`), "")
	if got := l.today.rows.get(restOf("alice")); got.EstimatedOutput != 0 {
		t.Errorf("the estimate is still there: %+v", got)
	}
	k.ServiceTier = "default"
	if got := l.today.rows.get(k); got == nil || got.Use != (Use{Requests: 1, Input: 70, Output: 50}) {
		t.Errorf("it is billed as %+v", got)
	}
}

// counting is a storage that counts the reading of pages.
type counting struct {
	*shelf
	loads int
}

func (c *counting) Load(ctx context.Context, key string) ([]byte, error) {
	c.loads++
	return c.shelf.Load(ctx, key)
}

func TestAnAnswerToACallerReadsOnlyPagesThatHaveChanged(t *testing.T) {
	s := &counting{shelf: newShelf(t)}
	bubble.Test(t, func(t *testing.T) {
		open := func() *Config {
			c := &Config{newLedger("main"), s, zap.NewNop()}
			c.configure(s.journals())
			return c
		}
		for range 5 {
			l := open()
			l.Add(time.Now(), keyOf("alice"), one, "")
			l.saver.Save()
		}
		l := open()
		ask := func(wantRequests int64, wantLoads int) {
			t.Helper()
			before := s.loads
			models := l.Models(time.Now(), "alice")
			if len(models) != 1 || models[0].Today.Requests != wantRequests || s.loads-before != wantLoads {
				t.Errorf("%+v after %d pages were read, want %d requests and %d", models, s.loads-before, wantRequests, wantLoads)
			}
			time.Sleep(2 * readPause)
		}
		ask(5, 5)
		ask(5, 0)
		another := open()
		another.Add(time.Now(), keyOf("alice"), one, "")
		another.saver.Save()
		ask(6, 1)
		another.Add(time.Now(), keyOf("alice"), one, "")
		another.saver.Save()
		ask(7, 1)
		// a page that cannot be read loses no other
		if err := s.Store(t.Context(), folder+"/"+nameOf(time.Now().Unix()/dayLength)+"/main_empty.json", nil); err != nil {
			t.Fatal(err)
		}
		ask(7, 1)
		s.fails(errors.New("input/output error"), nil)
		another.Add(time.Now(), keyOf("alice"), one, "")
		another.saver.Save()
		ask(7, 2)
		s.fails(nil, nil)
		ask(8, 2)
		time.Sleep(2 * pools.SaveInterval)
	})
}

// With 10,000 rows of others, an answer costs as much as without.
func BenchmarkModels(b *testing.B) {
	for _, others := range []int{0, 10_000} {
		b.Run(fmt.Sprint(others), func(b *testing.B) {
			l, now := newLedger("main"), time.Now()
			l.saver.Configure(&certmagic.FileStorage{Path: b.TempDir()}, zap.NewNop())
			l.Add(now, keyOf("alice"), one, "")
			for i := range others {
				l.Add(now, keyOf(fmt.Sprint(i)), one, "")
			}
			b.ReportAllocs()
			for b.Loop() {
				l.report.mu.Lock()
				l.report.readDue, l.report.day = now.Add(time.Hour), now.UTC().Format(time.DateOnly)
				l.report.mu.Unlock()
				if len(l.Models(now, "alice")) != 1 {
					b.Fatal("it is not found")
				}
			}
		})
	}
}
