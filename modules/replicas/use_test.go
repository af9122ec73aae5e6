package replicas

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/certmagic"

	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/modules/replicas/usagesync"
	"github.com/openai-lb/caddy-openai-lb/state"
)

// limitedReplica is a replica with callers, which all have the same limits.
type limitedReplica struct {
	*testReplica
	callers *limiter.Limiters
}

// limit runs a test with n replicas that are connected, and whose callers have
// these limits of tokens.
func limit(t *testing.T, n int, limits []string, test func(*world, []*limitedReplica)) {
	t.Helper()
	share(t, 0, func(w *world) {
		all := make([]*limitedReplica, n)
		for i := range all {
			all[i] = w.startLimited(limits...)
		}
		time.Sleep(6 * time.Second)
		test(w, all)
		time.Sleep(time.Second) // requests that wait are over
	})
}

func (w *world) startLimited(limits ...string) *limitedReplica {
	w.Helper()
	return w.startLimitedWith(w.hub.Store(), limits...)
}

func (w *world) startLimitedWith(store state.Store, limits ...string) *limitedReplica {
	w.Helper()
	r := &limitedReplica{w.startWith(store), limiter.NewLimiters(nil)}
	var settings limiter.Settings
	for _, text := range limits {
		text, model, _ := strings.Cut(text, " ")
		l, err := ratelimit.ParseLimit(ratelimit.Tokens, text)
		if err != nil {
			w.Fatal(err)
		}
		l.Model = model
		settings.Limits = append(settings.Limits, l)
	}
	r.callers.Configure(time.Now(), func(string) limiter.Settings { return settings })
	r.link.ShareUse("the pool", r.callers)
	return r
}

// spend uses tokens of a caller.
func (r *limitedReplica) spend(name string, tokens int64) {
	c := r.callers.Get(time.Now(), name)
	if a, refusal := c.Try(time.Now(), ratelimit.Estimate{Prompt: 1}); refusal == nil {
		a.Settle(time.Now(), ratelimit.Cost{Requests: 1, Prompt: tokens})
	}
}

// used returns how much of a caller's first limit is used, and how much is
// allowed.
func (r *limitedReplica) used(name string) (used, allowed int64) {
	u := r.callers.Get(time.Now(), name).Snapshot(time.Now()).Limits[0]
	return u.Used, u.Allowed
}

// wantUsed checks how much a caller has used at these replicas.
func wantUsed(t *testing.T, name string, want int64, replicas ...*limitedReplica) {
	t.Helper()
	synctest.Wait()
	for i, r := range replicas {
		if used, _ := r.used(name); used != want {
			t.Errorf("at replica %d, %s has used %d, want %d", i, name, used, want)
		}
	}
}

// reports returns a function that returns the reports that were sent since.
func (w *world) reports() func() [][]byte {
	var all [][]byte
	go w.hub.Store().Listen(w.Context(), func() {}, func(message []byte) {
		if usagesync.IsReport(message) {
			all = append(all, bytes.Clone(message))
		}
	})
	synctest.Wait()
	return func() [][]byte {
		synctest.Wait()
		taken := all
		all = nil
		return taken
	}
}

const flush = 250*time.Millisecond + 10*time.Millisecond

func TestReplicasAddUpWhatCallersUseWithinOneFlush(t *testing.T) {
	limit(t, 3, []string{"1000/day"}, func(w *world, all []*limitedReplica) {
		all[0].spend("alice", 100)
		time.Sleep(2 * time.Second)
		wantUsed(t, "alice", 100, all...)
		all[1].spend("alice", 450)
		time.Sleep(flush)
		wantUsed(t, "alice", 550, all...)
		for i := range 4 {
			for _, r := range all {
				r.spend("alice", 10)
			}
			time.Sleep(flush)
			wantUsed(t, "alice", 550+30*int64(i+1), all...)
		}
		wantUsed(t, "bob", 0, all...)
	})
}

func TestOnlyWhatHasChangedIsSent(t *testing.T) {
	limit(t, 1, []string{"1000/day"}, func(w *world, all []*limitedReplica) {
		for i := range 400 {
			all[0].spend(fmt.Sprint("caller ", i), 900)
		}
		// until each chunk was sent again: a report may come amid these
		// requests
		time.Sleep(time.Minute + 3*time.Second)
		reports := w.reports()
		time.Sleep(20 * time.Second)
		if n := len(reports()); n != 0 {
			t.Errorf("%d reports of callers that are idle", n)
		}
		all[0].spend("caller 7", 1)
		time.Sleep(20 * time.Second)
		if n := len(reports()); n != 1 {
			t.Errorf("%d reports after one request, want one", n)
		}
	})
}

// TestAReportThatTheStoreHasNoRoomForIsSentOnce because the other replicas got
// it.
func TestAReportThatTheStoreHasNoRoomForIsSentOnce(t *testing.T) {
	limit(t, 2, []string{"1000/day"}, func(w *world, all []*limitedReplica) {
		var ended []state.Record
		for i := range state.MaxRecords {
			ended = append(ended, state.Record{Group: "use-" + digest("callers of the pool"), Key: fmt.Sprint(i), TTL: state.MaxTTL})
		}
		if err := w.hub.Store().Put(w.Context(), ended); err != nil {
			t.Fatal(err)
		}
		all[0].spend("alice", 600)
		time.Sleep(3 * time.Second)
		wantUsed(t, "alice", 600, all...)
		time.Sleep(3 * time.Second)
		reports := w.reports()
		time.Sleep(20 * time.Second)
		if n := len(reports()); n > 0 {
			t.Errorf("%d messages, although nothing has changed", n)
		}
	})
}

func TestAReplicaWithoutAConnectionUsesItsShareOfWhatIsLeft(t *testing.T) {
	limit(t, 4, []string{"1000/minute"}, func(w *world, all []*limitedReplica) {
		wantAllowed := func(want int64) {
			t.Helper()
			for i, r := range all {
				if _, allowed := r.used("alice"); allowed != want {
					t.Errorf("replica %d may use %d, want %d", i, allowed, want)
				}
			}
		}
		time.Sleep(10 * time.Millisecond) // not at a tick: it would report between the request's admission and its end
		all[0].spend("alice", 100)
		time.Sleep(2500 * time.Millisecond)
		wantAllowed(1000)
		w.hub.Fail(errors.New("down"))
		time.Sleep(900 * time.Millisecond)
		wantAllowed(1000)
		time.Sleep(time.Second)
		wantAllowed(100 + 900/4)
		all[1].spend("alice", 200)
		time.Sleep(20 * time.Second) // no replica counts any more, but the share stays
		wantAllowed(100 + 900/4)
		wantUsed(t, "alice", 100, all[0], all[2], all[3])
		wantUsed(t, "alice", 300, all[1])
		w.hub.Fail(nil)
		time.Sleep(2 * time.Second)
		for i, r := range all { // the others may not have sent what they have used
			if _, allowed := r.used("alice"); allowed == 1000 {
				t.Errorf("replica %d may use %d at once", i, allowed)
			}
		}
		time.Sleep(3 * time.Second)
		wantAllowed(1000)
		wantUsed(t, "alice", 300, all...)
	})
}

func TestALoneReplicaMayUseAllOfALimit(t *testing.T) {
	limit(t, 1, []string{"1000/minute"}, func(w *world, all []*limitedReplica) {
		w.hub.Fail(errors.New("down"))
		time.Sleep(10 * time.Second)
		if _, allowed := all[0].used("alice"); allowed != 1000 {
			t.Errorf("it may use %d", allowed)
		}
	})
}

func TestCallersOfAClosedLinkDoNotKeepTheirShare(t *testing.T) {
	limit(t, 2, []string{"1000/minute"}, func(w *world, all []*limitedReplica) {
		w.hub.Fail(errors.New("down"))
		time.Sleep(5 * time.Second)
		if _, allowed := all[0].used("alice"); allowed != 500 {
			t.Errorf("it may use %d", allowed)
		}
		all[0].stop()
		if _, allowed := all[0].used("alice"); allowed != 1000 {
			t.Errorf("it may use %d", allowed)
		}
	})
}

func TestARestartedReplicasUseStaysCounted(t *testing.T) {
	limit(t, 2, []string{"1000/day"}, func(w *world, all []*limitedReplica) {
		all[0].spend("alice", 300)
		all[1].spend("alice", 100)
		time.Sleep(2 * time.Second)
		all[0].spend("alice", 20) // sent when it stops
		all[0].stop()
		again := w.startLimited("1000/day")
		time.Sleep(100 * time.Millisecond)
		wantUsed(t, "alice", 420, again, all[1])
		again.spend("alice", 500)
		time.Sleep(flush)
		wantUsed(t, "alice", 920, again, all[1])
		again.stop()
		all[1].stop() // the last one
		last := w.startLimited("1000/day")
		time.Sleep(100 * time.Millisecond)
		wantUsed(t, "alice", 920, last)
	})
}

func TestAStoreThatLostItsDataIsWholeAfterOneFlush(t *testing.T) {
	limit(t, 3, []string{"1000/day"}, func(w *world, all []*limitedReplica) {
		for _, r := range all {
			r.spend("alice", 100)
		}
		time.Sleep(2 * time.Second)
		w.hub.Flush()
		time.Sleep(1200*time.Millisecond + flush) // it is noticed once a second
		for _, r := range all {
			r.stop()
		}
		again := w.startLimited("1000/day")
		time.Sleep(100 * time.Millisecond)
		wantUsed(t, "alice", 300, again)
	})
}

func TestReportsThatWereNotHeardAreLoaded(t *testing.T) {
	limit(t, 2, []string{"1000/day"}, func(w *world, all []*limitedReplica) {
		w.hub.LoseMessages(true)
		all[0].spend("alice", 600)
		time.Sleep(3 * time.Second)
		wantUsed(t, "alice", 0, all[1])
		w.hub.LoseMessages(false)
		w.hub.Fail(errors.New("the connection is lost"))
		time.Sleep(10 * time.Millisecond)
		w.hub.Fail(nil)
		time.Sleep(time.Second)
		wantUsed(t, "alice", 600, all[1])
	})
}

func TestLateRepeatedOrReorderedReportsChangeNothing(t *testing.T) {
	limit(t, 2, []string{"1M/day"}, func(w *world, all []*limitedReplica) {
		reports := w.reports()
		for range 20 {
			for _, r := range all {
				r.spend("alice", 3000)
			}
			time.Sleep(flush)
		}
		// what is late has more than what is new, as after a large reservation
		a, refusal := all[0].callers.Get(time.Now(), "bob").Try(time.Now(), ratelimit.Estimate{Prompt: 80_000})
		if refusal != nil {
			t.Fatal(refusal)
		}
		time.Sleep(2 * time.Second)
		a.Settle(time.Now(), ratelimit.Cost{Requests: 1, Prompt: 10})
		time.Sleep(2 * time.Second)
		sent := reports()
		for range 3 {
			rand.New(rand.NewPCG(1, 2)).Shuffle(len(sent), func(i, j int) { sent[i], sent[j] = sent[j], sent[i] })
			for i, message := range sent {
				if err := w.hub.Store().Put(w.Context(), []state.Record{{Group: "late", Key: fmt.Sprint(i), Mode: state.Replace, Message: message}}); err != nil {
					t.Fatal(err)
				}
			}
			wantUsed(t, "alice", 120_000, all...)
			wantUsed(t, "bob", 10, all...)
		}
	})
}

// TestARecordThatIsLateDoesNotReplaceANewerOne in the store either.
func TestARecordThatIsLateDoesNotReplaceANewerOne(t *testing.T) {
	share(t, 0, func(w *world) {
		old := &oldPuts{Store: w.hub.Store()}
		r := &limitedReplica{w.startWith(old), limiter.NewLimiters(nil)}
		r.callers.Configure(time.Now(), func(string) limiter.Settings {
			return limiter.Settings{Limits: []ratelimit.Limit{{Kind: ratelimit.Tokens, Amount: 1000, Unit: ratelimit.Day}}}
		})
		r.link.ShareUse("the pool", r.callers)
		for range 3 {
			r.spend("alice", 200)
			time.Sleep(3 * time.Second)
		}
		r.stop()
		for _, records := range old.all {
			if err := old.Store.Put(w.Context(), records); err != nil {
				t.Fatal(err)
			}
		}
		again := w.startLimited("1000/day")
		time.Sleep(time.Second)
		wantUsed(t, "alice", 600, again)
	})
}

// oldPuts remembers the records that are about what callers use, the latest
// first.
type oldPuts struct {
	state.Store
	all [][]state.Record
}

func (s *oldPuts) Put(ctx context.Context, records []state.Record) error {
	if usagesync.IsReport(records[0].Message) {
		s.all = append([][]state.Record{records}, s.all...)
	}
	return s.Store.Put(ctx, records)
}

func TestPoolsOfOtherNamesHaveOtherCallers(t *testing.T) {
	limit(t, 1, []string{"1000/day"}, func(w *world, all []*limitedReplica) {
		other := &limitedReplica{w.start(), limiter.NewLimiters(nil)}
		other.callers.Configure(time.Now(), func(string) limiter.Settings {
			return limiter.Settings{Limits: []ratelimit.Limit{{Kind: ratelimit.Tokens, Amount: 1000, Unit: ratelimit.Day}}}
		})
		other.link.ShareUse("another pool", other.callers)
		all[0].spend("alice", 600)
		time.Sleep(3 * time.Second)
		wantUsed(t, "alice", 0, other)
	})
}

// aheadStore has a clock that is ahead of that of the machine.
type aheadStore struct {
	state.Store
	by time.Duration
}

func (s aheadStore) Load(ctx context.Context, groups []string) ([]state.Kept, time.Time, error) {
	kept, now, err := s.Store.Load(ctx, groups)
	return kept, now.Add(s.by), err
}

func TestWindowsFollowTheClockOfTheStore(t *testing.T) {
	share(t, 0, func(w *world) {
		r := &limitedReplica{w.startWith(aheadStore{w.hub.Store(), 5 * time.Minute}), limiter.NewLimiters(nil)}
		wantAhead := func(want time.Duration) {
			time.Sleep(2 * time.Second)
			now := time.Now()
			limit, err := ratelimit.ParseLimit(ratelimit.Tokens, "1000/minute")
			if err != nil {
				t.Fatal(err)
			}
			r.callers.Configure(now, func(string) limiter.Settings { return limiter.Settings{Limits: []ratelimit.Limit{limit}} })
			ends := r.callers.Get(now, "alice").Snapshot(now).Limits[0].Ends
			if ends := ends.Add(-want); !ends.After(now) || ends.Sub(now) > time.Minute {
				t.Errorf("a minute ends in %s, although the clock is ahead by %s", ends.Sub(now), want)
			}
		}
		r.link.ShareUse("the pool", r.callers)
		wantAhead(5 * time.Minute)
		r.link.unshare()
		wantAhead(0)
		r.link.ShareUse("the pool", r.callers)
		wantAhead(5 * time.Minute)
	})
}

func TestTheUseOutlivesAReload(t *testing.T) {
	limit(t, 2, []string{"1000/day"}, func(w *world, all []*limitedReplica) {
		r := all[0]
		r.spend("alice", 600)
		time.Sleep(time.Second)
		next := r.NewLink()
		next.ShareUse("the pool", r.callers)
		r.link.Close()
		r.spend("alice", 100)
		time.Sleep(2 * time.Second)
		wantUsed(t, "alice", 700, all...)
		// another engine with the same store
		other := w.start()
		other.link.ShareUse("the pool", r.callers)
		next.Close()
		r.stop()
		r.spend("alice", 100)
		time.Sleep(3 * time.Second)
		wantUsed(t, "alice", 800, all...)
		other.stop()
	})
}

func TestNoNameIsSent(t *testing.T) {
	limit(t, 2, []string{"1000/minute"}, func(w *world, all []*limitedReplica) {
		reports := w.reports()
		all[0].spend("alice", 600)
		time.Sleep(3 * time.Second)
		sent := reports()
		if len(sent) == 0 {
			t.Error("nothing was sent")
		}
		for _, message := range sent {
			if bytes.Contains(message, []byte("alice")) || bytes.Contains(message, []byte("the pool")) {
				t.Errorf("%q has a name", message)
			}
		}
	})
}

func TestReportsOfAnotherVersionAreIgnored(t *testing.T) {
	limit(t, 2, []string{"1000/day"}, func(w *world, all []*limitedReplica) {
		reports := w.reports()
		all[0].spend("alice", 600)
		time.Sleep(3 * time.Second)
		group := "use-" + digest("callers of the pool")
		for i, message := range reports() {
			for _, change := range []func([]byte) []byte{
				func(m []byte) []byte { m[3]++; return m },
				func(m []byte) []byte { m[0]++; return m },
				func(m []byte) []byte { return m[:len(m)-1] },
				func(m []byte) []byte { m[4+16]++; return append(m, 0xff) }, // another writer
				func(m []byte) []byte { m[4+16]++; return append(m, make([]byte, state.MaxMessage)...) },
			} {
				if err := w.hub.Store().Put(w.Context(), []state.Record{{Group: group, Key: fmt.Sprint("x", i), Mode: state.Replace, TTL: time.Hour, Message: change(bytes.Clone(message))}}); err != nil {
					t.Fatal(err)
				}
				wantUsed(t, "alice", 600, all...)
			}
		}
		again := w.startLimited("1000/day")
		time.Sleep(time.Second)
		wantUsed(t, "alice", 600, append(all, again)...)
	})
}

// TestAThousandBusyCallersAtTenReplicasNeedFewMessages of which each replica
// sends a tenth.
func TestAThousandBusyCallersAtTenReplicasNeedFewMessages(t *testing.T) {
	limit(t, 2, []string{"200k/minute"}, func(w *world, all []*limitedReplica) {
		spend := func(tokens int64) {
			for i := range 1000 {
				for _, r := range all {
					r.spend(fmt.Sprint("caller ", i), tokens)
				}
			}
		}
		time.Sleep(time.Until(time.Now().Truncate(time.Minute).Add(59 * time.Second)))
		spend(55_000)
		time.Sleep(3 * time.Second) // so there are entries of two minutes
		spend(1_000)
		time.Sleep(1100 * time.Millisecond) // between two flushes
		reports := w.reports()
		for range 4 {
			spend(10)
			time.Sleep(250 * time.Millisecond)
		}
		if n := 10 / 2 * len(reports()); n > 380 || n < 230 {
			t.Errorf("%d messages in a second", n)
		}
		if n := w.hub.Len("use-" + digest("callers of the pool")); n > 2*10 {
			t.Errorf("%d records, want 9 or 10 of each replica", n)
		}
	})
}

// failingStorage fails the first times that it is to store something: so many.
type failingStorage struct {
	certmagic.Storage
	fails atomic.Int64
}

func (s *failingStorage) Store(ctx context.Context, key string, value []byte) error {
	if s.fails.Add(-1) >= 0 {
		return errors.New("no space left")
	}
	return s.Storage.Store(ctx, key, value)
}

// TestAReplicaThatStartsWhileTheStoreIsDownUsesItsShare starts one of four
// replicas again. What it knows then of the number is in its storage.
func TestAReplicaThatStartsWhileTheStoreIsDownUsesItsShare(t *testing.T) {
	for _, test := range []struct {
		name    string
		before  int   // how many replicas there were
		fails   int64 // how often the storage fails
		allowed int64
	}{
		{"the first of all", 0, 0, 1000},
		{"a lone one", 1, 0, 1000},
		{"one of four", 4, 0, 250},
		{"one of four, whose storage failed at first", 4, 6, 250},
	} {
		t.Run(test.name, func(t *testing.T) {
			storage := &failingStorage{Storage: &certmagic.FileStorage{Path: t.TempDir()}}
			storage.fails.Store(test.fails)
			share(t, 0, func(w *world) {
				start := func() *limitedReplica {
					r := w.startLimited("1000/minute")
					ctx, cancel := context.WithCancel(context.Background())
					go r.keepNumber(ctx, storage, "number")
					stop := r.stop
					r.stop = func() { cancel(); stop() }
					return r
				}
				all := make([]*limitedReplica, test.before)
				for i := range all {
					all[i] = start()
				}
				time.Sleep(3 * lifetime)
				for i, r := range all {
					if lines := r.logs.FilterMessage("could not save the number of replicas").Len(); lines > 1 {
						t.Errorf("replica %d logs %d times that it could not save the same number", i, lines)
					}
				}
				w.hub.Fail(errors.New("down"))
				time.Sleep(3 * lifetime) // no replica counts any more, which is not saved
				for _, r := range all {
					r.stop()
				}
				again := start()
				for range 2 {
					time.Sleep(time.Second)
					if _, allowed := again.used("alice"); allowed != test.allowed {
						t.Errorf("it may use %d, want %d", allowed, test.allowed)
					}
					time.Sleep(3 * time.Second)
				}
				w.hub.Fail(nil)
				time.Sleep(5 * time.Second)
				if _, allowed := again.used("alice"); allowed != 1000 {
					t.Errorf("alone, with the store, it may use %d", allowed)
				}
				again.stop()
				again = start()
				time.Sleep(time.Second)
				if _, allowed := again.used("alice"); allowed != 1000 {
					t.Errorf("when it starts with the store, it may use %d", allowed)
				}
				again.stop()
			})
		})
	}
}

// TestAReplicaThatStartsCountsWhenOthersUsedALimit has a request come before
// the reports of the others are loaded.
func TestAReplicaThatStartsCountsWhenOthersUsedALimit(t *testing.T) {
	limit(t, 1, []string{"1000/hour"}, func(w *world, all []*limitedReplica) {
		time.Sleep(time.Until(time.Now().Truncate(time.Hour).Add(time.Hour)))
		for range 60 + 50 {
			all[0].spend("alice", 10)
			time.Sleep(time.Minute)
		}
		again := w.startLimited("1000/hour")
		again.spend("alice", 1)
		time.Sleep(3 * time.Second)
		there, _ := all[0].used("alice")
		if here, _ := again.used("alice"); here < there || here > there+there/5 {
			t.Errorf("%d are used here, and %d there", here, there)
		}
	})
}

// TestReplicasThatStartTogetherShareALimitAtOnce has three that are all asked
// as soon as they know each other, and then again and again.
func TestReplicasThatStartTogetherShareALimitAtOnce(t *testing.T) {
	for _, knownBefore := range []bool{false, true} {
		share(t, 0, func(w *world) {
			all := make([]*limitedReplica, 3)
			for i := range all {
				all[i] = w.startLimited("60/minute")
				if knownBefore {
					all[i].usage.Expect(time.Now(), 3)
				}
			}
			for !knownBefore && len(all[0].peers.list(time.Now()))+len(all[1].peers.list(time.Now()))+len(all[2].peers.list(time.Now())) < 9 {
				time.Sleep(time.Millisecond)
				synctest.Wait()
			}
			admitted := 0
			for range 50 {
				for _, r := range all {
					for range 60 {
						if a, refusal := r.callers.Get(time.Now(), "alice").Try(time.Now(), ratelimit.Estimate{Prompt: 1}); refusal == nil {
							a.Settle(time.Now(), ratelimit.Cost{Requests: 1, Prompt: 1})
							admitted++
						}
					}
				}
				time.Sleep(100 * time.Millisecond)
			}
			if admitted > 60 || admitted < 55 {
				t.Errorf("known before %t: %d of 60 are admitted", knownBefore, admitted)
			}
		})
	}
}

// TestAReplicaWhoseFiguresAreReplacedWritesThemAgain has somebody repeat an old
// report in its name, as a later one.
func TestAReplicaWhoseFiguresAreReplacedWritesThemAgain(t *testing.T) {
	limit(t, 2, []string{"1000/day"}, func(w *world, all []*limitedReplica) {
		reports := w.reports()
		all[0].spend("alice", 10)
		time.Sleep(3 * time.Second)
		old := reports()[0]
		all[0].spend("alice", 590)
		time.Sleep(3 * time.Second)
		wantUsed(t, "alice", 600, all...)
		for _, later := range []time.Duration{time.Second, time.Hour, 23 * time.Hour, 1000 * time.Hour} {
			forged := bytes.Clone(old)
			binary.BigEndian.PutUint64(forged[len("use")+1+2*16:], uint64(time.Now().Add(later).UnixMicro()))
			record := state.Record{Group: "use-" + digest("callers of the pool"), Key: all[0].callers.Writer() + " 0", Mode: state.Replace, TTL: time.Hour, Message: forged}
			if err := w.hub.Store().Put(w.Context(), []state.Record{record}); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Second)
			wantUsed(t, "alice", 600, all...)
		}
	})
}

// TestAReplicaThatIsReadOfSharesALimitAtOnce has a replica learn of another one
// from what the store keeps, and not from its message.
func TestAReplicaThatIsReadOfSharesALimitAtOnce(t *testing.T) {
	limit(t, 1, []string{"60/minute"}, func(_ *world, all []*limitedReplica) {
		synctest.Wait() // the replica itself rests meanwhile
		r, now := all[0], time.Now()
		kept := r.alive(now)
		m, err := parse(kept.Message)
		if err != nil {
			t.Fatal(err)
		}
		m.From = strings.Repeat("a", digestSize)
		r.apply(state.Kept{Group: kept.Group, Key: m.From, TTL: lifetime, Message: m.text()}, make(map[recordKey]record), now)
		admitted := 0
		for range 60 {
			if a, refusal := r.callers.Get(now, "alice").Try(now, ratelimit.Estimate{Prompt: 1}); refusal == nil {
				a.Settle(now, ratelimit.Cost{Requests: 1, Prompt: 1})
				admitted++
			}
		}
		if admitted != 30 {
			t.Errorf("%d of 60 requests are admitted before the other replica knows, want 30", admitted)
		}
	})
}
