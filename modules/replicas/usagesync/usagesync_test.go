package usagesync

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/state"
	"github.com/openai-lb/caddy-openai-lb/state/statetest"
)

var (
	someTime = time.Date(2026, 11, 2, 12, 0, 0, 0, time.UTC)
	digest   = strings.Repeat("0f", digestSize)
)

// tokenLimiters returns the limiters of callers with a limit of tokens.
func tokenLimiters(t testing.TB, limit string) *limiter.Limiters {
	l, err := ratelimit.ParseLimit(ratelimit.Tokens, limit)
	if err != nil {
		t.Fatal(err)
	}
	cs := limiter.NewLimiters(nil)
	cs.Configure(someTime, func(string) limiter.Settings { return limiter.Settings{Limits: []ratelimit.Limit{l}} })
	return cs
}

func spend(cs *limiter.Limiters, now time.Time, name string, tokens int64) {
	r, _ := cs.Get(now, name).Try(now, ratelimit.Estimate{Prompt: 1})
	r.Settle(now, ratelimit.Cost{Requests: 1, Prompt: tokens})
}

func tokensUsed(cs *limiter.Limiters, now time.Time, name string) int64 {
	return cs.Get(now, name).Snapshot(now).Limits[0].Used
}

// sent returns what is due and is sent to others.
func (t *Syncer) sent(now time.Time) (records []state.Record) {
	t.flush(context.Background(), now, func(_ context.Context, r []state.Record) error {
		records = heard(r)
		return nil
	}, fast)
	return records
}

// heard returns the records that others hear.
func heard(records []state.Record) []state.Record {
	return slices.DeleteFunc(slices.Clone(records), func(r state.Record) bool { return r.News != nil && len(r.News) == 0 })
}

func TestTheUseOfManyCallersFitsIntoMessages(t *testing.T) {
	now := someTime
	from, to := tokenLimiters(t, "1M/minute"), tokenLimiters(t, "1M/minute")
	var a, b Syncer
	a.Share(digest, from)
	b.Share(digest, to)
	const n = 2000
	hear := func() (reports int) {
		for _, r := range a.sent(now) {
			if len(r.Message) > state.MaxMessage {
				t.Fatalf("a message has %d bytes", len(r.Message))
			}
			if err := b.Hear(r.Message, now); err != nil {
				t.Fatal(err)
			}
			if r.Group != markOf(from.Writer()) {
				reports++
			}
		}
		return reports
	}
	for i := range n {
		spend(from, now, fmt.Sprint(i), 100_000+int64(i))
	}
	if reports := hear(); reports != (n+maxCallers-1)/maxCallers {
		t.Errorf("%d reports", reports)
	}
	// every limit, in two windows, and in large numbers
	from.Configure(now, func(string) limiter.Settings {
		var s limiter.Settings
		for id := range ratelimit.ID(2 * units) {
			s.Limits = append(s.Limits, ratelimit.Limit{Kind: id.Kind(), Unit: id.Unit(), Amount: ratelimit.MaxAmount})
		}
		return s
	})
	for _, step := range []time.Duration{0, time.Hour} {
		now = now.Add(step)
		for i := range n {
			spend(from, now, fmt.Sprint(i), ratelimit.MaxAmount/10)
		}
		hear()
	}
	for i := range n {
		if got := to.Get(now, fmt.Sprint(i)).Snapshot(now).Today; got != ratelimit.MaxAmount/5+100_000+int64(i) {
			t.Fatalf("caller %d has used %d", i, got)
		}
	}
}

func TestAFailedReportIsSentAgain(t *testing.T) {
	cs := tokenLimiters(t, "1k/day")
	var a Syncer
	a.Share(digest, cs)
	spend(cs, someTime, "alice", 100)
	failed := func(context.Context, []state.Record) error { return errors.New("down") }
	a.flush(t.Context(), someTime, failed, fast)
	if n := len(a.sent(someTime.Add(slow))); n != 2 {
		t.Errorf("%d records, want the report and the mark", n)
	}
	if n := len(a.sent(someTime.Add(2 * slow))); n != 0 {
		t.Errorf("%d records, although they were sent", n)
	}
	if n := len(a.sent(someTime.Add(2*slow + refresh))); n != 1 {
		t.Errorf("%d records after a minute", n)
	}
}

func TestAReportIsNewerThanTheOneBeforeAlsoIfTheClockIsSetBack(t *testing.T) {
	from, to := tokenLimiters(t, "1k/day"), tokenLimiters(t, "1k/day")
	var a, b Syncer
	a.Share(digest, from)
	b.Share(digest, to)
	var version string
	for i := range 5 {
		now := someTime.Add(-time.Duration(i) * time.Second)
		spend(from, now, "alice", 200)
		a.pools[0].resend()
		for _, r := range a.sent(now) {
			if r.Group == markOf(from.Writer()) {
				continue
			}
			if r.Version <= version {
				t.Errorf("version %s comes after %s", r.Version, version)
			}
			version = r.Version
			if err := b.Hear(r.Message, now); err != nil {
				t.Error(err)
			}
		}
		if got := tokensUsed(to, now, "alice"); got != 200*int64(i+1) {
			t.Errorf("%d are used", got)
		}
	}
}

// TestReplicasWhoseClocksDifferAddUpWhatCallersUse in the windows of the
// store's clock.
func TestReplicasWhoseClocksDifferAddUpWhatCallersUse(t *testing.T) {
	for _, off := range []time.Duration{5 * time.Minute, -5 * time.Minute, 40 * time.Second, -3 * time.Second, 7 * time.Hour} {
		for _, limit := range []string{"1k/second", "1k/minute", "1k/hour", "1k/day"} {
			from, to := tokenLimiters(t, limit), tokenLimiters(t, limit)
			var a, b Syncer
			a.Share(digest, from)
			b.Share(digest, to)
			now := someTime
			for i := range 4 {
				here, there := now, now.Add(off)
				a.Follow(someTime, -off)
				b.Follow(someTime, 20*time.Millisecond)
				spend(from, there, "alice", 100)
				for _, r := range a.sent(there) {
					if err := b.Hear(r.Message, here); err != nil {
						t.Error(err)
					}
				}
				if got := tokensUsed(to, here, "alice"); got != 100*int64(i+1) {
					t.Errorf("a clock is off by %s: %d of %s are used, want %d", off, got, limit, 100*(i+1))
				}
				a.pools[0].resend()
				now = now.Add(20 * time.Millisecond)
			}
		}
	}
}

// TestAMonthsUseOfAReplicaThatHasEndedIsKept until the month is over.
func TestAMonthsUseOfAReplicaThatHasEndedIsKept(t *testing.T) {
	now := someTime
	ended, runs := tokenLimiters(t, "1k/month"), tokenLimiters(t, "1k/month")
	var a, b Syncer
	a.Share(digest, ended)
	b.Share(digest, runs)
	kept := make(map[string]state.Record)
	until := make(map[string]time.Time)
	keep := func(records []state.Record) {
		for _, r := range records {
			if r.TTL > state.MaxTTL || r.TTL <= 0 || r.Mode != state.Latest {
				t.Fatalf("got %+v", r)
			}
			kept[r.Key], until[r.Key] = r, now.Add(r.TTL)
		}
	}
	load := func(to *Syncer) {
		groups := strings.Join(to.Groups(now), " ")
		var loaded []state.Kept
		for key, r := range kept {
			if left := until[key].Sub(now); left > 0 && strings.Contains(groups, r.Group) {
				loaded = append(loaded, state.Kept{Group: r.Group, Key: key, TTL: left, Message: r.Message})
			}
		}
		if others := to.Loaded(append(loaded, state.Kept{Group: "other"}), now); len(others) != 1 {
			t.Fatalf("got %+v", others)
		}
	}
	spend(ended, now, "alice", 300)
	keep(a.sent(now))
	for now.Month() == time.November {
		now = now.Add(time.Hour)
		load(&b)
		keep(b.sent(now))
		again := tokenLimiters(t, "1k/month")
		var c Syncer
		c.Share(digest, again)
		load(&c)
		if got, want := tokensUsed(again, now, "alice"), int64(300); got != want && now.Month() == time.November {
			t.Fatalf("%s: %d are used", now, got)
		}
	}
	now = now.Add(36 * time.Hour)
	load(&b)
	for key, end := range until {
		if end.After(now.Add(state.MaxTTL/2)) && key != runs.Writer() {
			t.Errorf("the record of November is kept until %s", end)
		}
	}
}

func TestAReportArrivesAsItWas(t *testing.T) {
	var ids [5]ratelimit.CallerID
	for i := range ids {
		ids[i] = ratelimit.IDOf(fmt.Sprint(i))
	}
	use := []callerUse{
		{id: ids[4], entries: []limiter.Entry{{ID: 0, Window: 1 << 40, Used: 0}, {ID: 9, Window: 24323, Used: math.MaxInt64}}},
		{id: ids[3], entries: []limiter.Entry{{ID: 9, Window: 24323, Used: 3}}},
		{id: ids[1], entries: []limiter.Entry{{ID: 9, Window: 24323, Used: 1}}},
		{id: ids[2], entries: []limiter.Entry{{ID: 0, Window: 1 << 40, Used: 3, Reset: 1 << 50}, {ID: 9, Window: 24323, Used: 0, Reset: 1 << 50}}},
		{id: ids[0], entries: []limiter.Entry{{ID: 9, Window: 24323, Used: 0, Reset: math.MaxInt64}}},
		{id: ratelimit.IDOf("5"), entries: []limiter.Entry{{ID: 9, Window: 24323, Used: 7}}, inFlight: 300, hasInFlight: true},
		{id: ratelimit.IDOf("6"), inFlight: 0, hasInFlight: true}, // an upload is no use yet
	}
	message := appendBody(appendHeader(nil, digest, strings.Repeat("ab", 16), 1<<63), use)
	r, body, err := decodeHeader(message)
	if err == nil {
		err = r.decode(body)
	}
	want := report{digest, strings.Repeat("ab", 16), 1 << 63, []callerUse{use[1], use[2], use[0], use[4], use[3], use[6], use[5]}}
	if err != nil || !reflect.DeepEqual(r, want) {
		t.Errorf("got %+v, %v", r, err)
	}
}

// TestValuesOfALaterVersionAreSkipped so that reports can have more of a
// caller.
func TestValuesOfALaterVersionAreSkipped(t *testing.T) {
	message := appendHeader(nil, digest, digest, 1)
	for range units {
		message = binary.AppendVarint(message, 100)
	}
	message = binary.AppendUvarint(message, 1|resetBit|inFlightBit|inFlightBit<<1|1<<40)
	message = binary.AppendUvarint(message, 1)
	id := ratelimit.IDOf("alice")
	message = append(message, id[:]...)
	for _, value := range []uint64{5, 6, 7000, 8, 9} { // the reset, in flight, two unknown ones, the use
		message = binary.AppendUvarint(message, value)
	}
	r, body, err := decodeHeader(message)
	if err == nil {
		err = r.decode(body)
	}
	want := callerUse{id: id, entries: []limiter.Entry{{Window: 100, Used: 9, Reset: 5}}, inFlight: 6, hasInFlight: true}
	if err != nil || len(r.callers) != 1 || !reflect.DeepEqual(r.callers[0], want) {
		t.Errorf("got %+v, %v, want %+v", r.callers, err, want)
	}
}

// TestFourEntriesOfACallerTake32Bytes so maxCallers fit into a message.
func TestFourEntriesOfACallerTake32Bytes(t *testing.T) {
	var use []callerUse
	for i := range maxCallers {
		use = append(use, callerUse{id: ratelimit.IDOf(fmt.Sprint(i)), entries: []limiter.Entry{
			{ID: 6, Window: 29_000_000, Used: 200_000}, {ID: 6, Window: 28_999_999, Used: 200_000}, {ID: 8, Window: 20_000, Used: 5_000_000}, {ID: 9, Window: 24_000, Used: 100_000_000},
		}})
	}
	message := appendBody(appendHeader(nil, digest, digest, 1<<50), use)
	if each := len(message) / maxCallers; each > 32 || len(message) > state.MaxMessage {
		t.Errorf("%d bytes, %d for a caller", len(message), each)
	}
}

func FuzzHear(f *testing.F) {
	from := tokenLimiters(f, "1k/minute")
	var a Syncer
	a.Share(digest, from)
	for i := range 5 {
		spend(from, someTime, fmt.Sprint(i), int64(i)*100)
	}
	for _, r := range a.sent(someTime) {
		f.Add(r.Message)
	}
	from.Configure(someTime, func(string) limiter.Settings { return limiter.Settings{MaxRequests: 300} })
	from.Get(someTime, "0").Upload()
	for _, r := range a.sent(someTime.Add(slow)) {
		f.Add(r.Message)
	}
	f.Add([]byte(reportPrefix))
	f.Fuzz(func(t *testing.T, message []byte) {
		to := tokenLimiters(t, "1k/minute")
		var b Syncer
		b.Share(digest, to)
		err := b.Hear(message, someTime)
		if err == nil && !IsReport(message) {
			t.Fatalf("%q is taken for a report", message)
		}
		b.Loaded([]state.Kept{{Group: groupOf(digest), Key: "k", TTL: time.Second, Message: message}}, someTime)
		for i := range 5 {
			if got := tokensUsed(to, someTime, fmt.Sprint(i)); got < 0 {
				t.Fatalf("%d are used", got)
			}
		}
		b.sent(someTime)
		r, body, err := decodeHeader(message)
		if err != nil || r.decode(body) != nil {
			return
		}
		same := appendBody(appendHeader(nil, r.pool, r.writer, r.version), r.callers)
		again, body, err := decodeHeader(same)
		if err == nil {
			err = again.decode(body)
		}
		if err != nil || again.version != r.version || !bytes.Equal(appendBody(nil, again.callers), same[len(reportPrefix)+2*digestSize+8:]) {
			t.Fatalf("%+v becomes %+v, %v", r, again, err)
		}
	})
}

func TestAPoolThatIsNotSharedAnyMoreIsNotLoaded(t *testing.T) {
	hub := statetest.NewHub()
	cs := tokenLimiters(t, "1k/day")
	var a Syncer
	end := a.Share(digest, cs)
	spend(cs, someTime, "alice", 1)
	if err := hub.Store().Put(t.Context(), a.sent(someTime)); err != nil {
		t.Fatal(err)
	}
	if hub.Len(groupOf(digest)) != 1 || hub.Len(markOf(cs.Writer())) != 1 {
		t.Error("there are other records")
	}
	end()
	if a.Groups(someTime) != nil {
		t.Error("groups are loaded for no pool")
	}
}

func TestUseDoesNotBecomeOlderWhileTheStoreHangs(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		cs := tokenLimiters(t, "60/minute")
		var syncer Syncer
		syncer.Share(digest, cs)
		calls := 0
		put := func(context.Context, []state.Record) error {
			switch calls++; calls {
			case 2:
				return errors.New("failed") // so all is sent again with the next tick
			case 3:
				time.Sleep(10 * time.Second)
				return errors.New("hung")
			}
			return nil
		}
		time.Sleep(7 * time.Second)
		go syncer.Run(t.Context(), put, func() Contact { return Contact{Whole: true, Replicas: 3} })
		time.Sleep(3*fast - 40*time.Millisecond)
		spend(cs, time.Now(), "alice", 10) // sent at once
		time.Sleep(20 * time.Millisecond)
		spend(cs, time.Now(), "alice", 10) // to be sent 50 ms after that, but there is a tick before
		for range 55 {
			time.Sleep(time.Second)
			tokensUsed(cs, time.Now(), "alice")
		}
		if used := tokensUsed(cs, time.Now(), "alice"); used != 20 {
			t.Errorf("alice has used %d, want 20", used)
		}
		if calls < 4 {
			t.Errorf("reports were sent %d times", calls)
		}
	})
}

func TestOthersHearOnlyWhatHasChangedSince(t *testing.T) {
	cs := tokenLimiters(t, "1M/minute")
	var syncer Syncer
	syncer.Share(digest, cs)
	now := someTime
	cs.Share(now, limiter.Sharing{Replicas: 3, Delay: fast})
	for i := range maxRecent + 1 {
		spend(cs, now, fmt.Sprint(i), 1)
	}
	syncer.sent(now)
	cs.Confirm(syncer.pools[0].version)
	// said returns of how many callers the record and its news are
	said := func() (kept, news int) {
		now = now.Add(slow)
		records := syncer.sent(now)
		if len(records) != 1 {
			t.Fatalf("%d records are sent", len(records))
		}
		for count, message := range map[*int][]byte{&kept: records[0].Message, &news: records[0].News} {
			r, body, err := decodeHeader(message)
			if err == nil {
				err = r.decode(body)
			}
			if err != nil {
				t.Fatal(err)
			}
			*count = len(r.callers)
		}
		return kept, news
	}
	for i := range 12 {
		spend(cs, now, fmt.Sprint(i), 1)
		if kept, news := said(); kept != i+1 || news != 1 {
			t.Errorf("%d are kept, and %d sent, want %d and 1", kept, news, i+1)
		}
		if i%3 == 2 {
			cs.Confirm(syncer.pools[0].version) // also of those of which nothing new was said since
		}
	}
}
