package statetest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/state"
)

// Conform tests what every store has to do. A test calls open once or twice.
// Each call empties the engine, and returns another store of it.
func Conform(t *testing.T, open func(t *testing.T) state.Store) {
	t.Run("records are kept as their mode says", func(t *testing.T) { testModes(t, open(t)) })
	t.Run("records that are one are merged", func(t *testing.T) { testNear(t, open(t)) })
	t.Run("records go when their time has passed", func(t *testing.T) { testExpiry(t, open(t)) })
	t.Run("groups are bounded", func(t *testing.T) { testBounds(t, open(t)) })
	t.Run("all listeners hear all messages", func(t *testing.T) { testMessages(t, open(t), open(t)) })
	t.Run("one claims a name", func(t *testing.T) { testClaims(t, open(t), open(t)) })
	t.Run("an entry is kept unless a firm one is there", func(t *testing.T) { testEntries(t, open(t), open(t)) })
	t.Run("entries go when their time has passed", func(t *testing.T) { testEntriesExpire(t, open(t)) })
	t.Run("a use ends with its context", func(t *testing.T) { testContext(t, open(t)) })
}

// odd has all that a key and a message may consist of.
const odd = "failure m \x00\xff\r\n{}*$ 1 2"

func testModes(t *testing.T, s state.Store) {
	rec := func(mode state.Mode, version string, minutes int, message string) state.Record {
		return state.Record{Group: "g", Key: odd, Mode: mode, Version: version,
			TTL: time.Duration(minutes) * time.Minute, Message: []byte(message)}
	}
	for i, step := range []struct {
		put     state.Record
		message string
		minutes int
	}{
		{rec(state.Finish, "1", 5, "nothing to finish"), "", 0},
		{rec(state.Extend, "1", 5, "first"), "first", 5},
		{rec(state.Extend, "2", 3, "shorter"), "first", 5},
		{rec(state.Extend, "1", 9, "the same, said otherwise"), "the same, said otherwise", 5},
		{rec(state.Extend, "3", 8, "longer"+odd), "longer" + odd, 8},
		{rec(state.Finish, "2", 1, "another is over"), "longer" + odd, 8},
		{rec(state.Finish, "3", 1, "over"), "over", 8},
		{rec(state.Extend, "3", 8, "an echo"), "over", 8},
		{rec(state.Extend, "4", 2, "new"), "new", 2},
		{rec(state.Replace, "", 1, "replaced"), "replaced", 1},
		{rec(state.Replace, "", 0, "for good"), "for good", 0},
		{rec(state.Replace, "", 4, "replaced again"), "replaced again", 4},
		{rec(state.Latest, "0000000000000000010 a", 3, "later"), "later", 3},
		{rec(state.Latest, "0000000000000000009 b", 9, "earlier"), "later", 3},
		{rec(state.Latest, "0000000000000000010 b", 0, "later by its end"), "later by its end", 0},
		{rec(state.Latest, "0000000000000000010 a", 5, "not later"), "later by its end", 0},
		{rec(state.Latest, "0000000000000000010 b", 2, "the same"), "the same", 2},
		{rec(state.Replace, "", 4, "replaced once more"), "replaced once more", 4},
	} {
		put(t, s, step.put)
		got := load(t, s, "other", "g")
		if step.message == "" {
			if len(got) != 0 {
				t.Fatalf("step %d: %+v is kept, want nothing", i, got)
			}
			continue
		}
		if len(got) != 1 || string(got[0].Message) != step.message || got[0].Key != odd || got[0].Group != "g" {
			t.Fatalf("step %d: %+v is kept, want %q", i, got, step.message)
		}
		if string(step.put.Message) == step.message && got[0].Version != step.put.Version {
			t.Errorf("step %d: the version %q is kept, want %q", i, got[0].Version, step.put.Version)
		}
		if want := time.Duration(step.minutes) * time.Minute; got[0].TTL > want || got[0].TTL < want-30*time.Second {
			t.Errorf("step %d: it is kept for %v, want %v", i, got[0].TTL, want)
		}
	}
}

func testNear(t *testing.T, s state.Store) {
	for _, tt := range []struct {
		name           string
		first, second  string // versions
		minutes, later int
		want           string
		wantMinutes    int
	}{
		{"the smaller version came first", "1", "2", 60, 2, "1", 62},
		{"the smaller version came second", "2", "1", 60, 2, "1", 62},
		{"the smaller version came second and ends first", "2", "1", 60, -2, "1", 60},
		{"the smaller version came first and ends last", "1", "2", 60, -2, "1", 60},
		{"one ends much later", "1", "2", 60, 20, "2", 80},
		{"one ends much earlier", "2", "1", 60, -20, "2", 60},
	} {
		rec := func(version string, minutes int) state.Record {
			return state.Record{Group: "g", Key: tt.name, Mode: state.Extend, Version: version,
				TTL:  time.Duration(minutes) * time.Minute,
				Near: 10 * time.Minute, Message: []byte(version)}
		}
		put(t, s, rec(tt.first, tt.minutes))
		put(t, s, rec(tt.second, tt.minutes+tt.later))
		for _, k := range load(t, s, "g") {
			if k.Key != tt.name {
				continue
			}
			if want := time.Duration(tt.wantMinutes) * time.Minute; string(k.Message) != tt.want || k.TTL > want ||
				k.TTL < want-30*time.Second {
				t.Errorf("%s: %q is kept for %v, want %q for %v", tt.name, k.Message, k.TTL, tt.want, want)
			}
		}
		finish := rec(tt.want, 1)
		finish.Mode, finish.Message = state.Finish, []byte("over")
		put(t, s, finish, rec(tt.want, 1))
		for _, k := range load(t, s, "g") {
			if k.Key == tt.name && string(k.Message) != "over" {
				t.Errorf("%s: %q is kept of what is finished", tt.name, k.Message)
			}
		}
	}
}

func testExpiry(t *testing.T, s state.Store) {
	put(t, s,
		state.Record{Group: "g", Key: "short", Mode: state.Extend, Version: "1", TTL: 300 * time.Millisecond,
			Message: []byte("short")},
		state.Record{Group: "g", Key: "long", Mode: state.Extend, Version: "2", TTL: time.Hour, Message: []byte("long")},
		state.Record{Group: "h", Key: "good", Mode: state.Replace, Message: []byte("for good")},
		state.Record{Group: "h", Key: "short", Mode: state.Replace, TTL: 300 * time.Millisecond, Message: []byte("short")})
	for len(load(t, s, "g", "h")) > 2 {
		time.Sleep(20 * time.Millisecond)
	}
	for _, k := range load(t, s, "g", "h") {
		if k.Key == "short" {
			t.Error("a record outlives its time")
		}
	}
	put(t, s, state.Record{Group: "g", Key: "short", Mode: state.Extend, Version: "3", TTL: time.Minute,
		Message: []byte("again")})
	if n := len(load(t, s, "g")); n != 2 {
		t.Errorf("%d records are kept, want 2", n)
	}
}

func testBounds(t *testing.T, s state.Store) {
	var records []state.Record
	for i := range state.MaxRecords {
		records = append(records, state.Record{Group: "g", Key: fmt.Sprint(i), Mode: state.Extend, Version: "1",
			TTL: time.Hour, Message: []byte("m")})
	}
	put(t, s, records...)
	one := state.Record{Group: "g", Key: "more", Mode: state.Extend, Version: "1", TTL: time.Hour, Message: []byte("m")}
	two := state.Record{Group: "h", Key: "other", Mode: state.Extend, Version: "1", TTL: time.Hour, Message: []byte("m")}
	if err := s.Put(t.Context(), []state.Record{one, two}); err == nil ||
		!strings.Contains(err.Error(), state.ErrFull.Error()) {
		t.Errorf("the error is %v, want %v", err, state.ErrFull)
	}
	if n := len(load(t, s, "g")); n != state.MaxRecords {
		t.Errorf("%d records are kept, want %d", n, state.MaxRecords)
	}
	if n := len(load(t, s, "h")); n != 1 {
		t.Error("a record of another group is not kept")
	}
	third := state.Record{Group: "h", Key: "third", Mode: state.Extend, Version: "1", Most: 1, TTL: time.Hour,
		Message: []byte("m")}
	if err := s.Put(t.Context(), []state.Record{third}); err == nil ||
		!strings.Contains(err.Error(), state.ErrFull.Error()) {
		t.Errorf("the error for a second record of one is %v, want %v", err, state.ErrFull)
	}
	third.Most = 2
	put(t, s, third)
}

func testMessages(t *testing.T, stores ...state.Store) {
	heard := make([]chan string, len(stores))
	for i, s := range stores {
		heard[i] = make(chan string, 100)
		ctx, cancel := context.WithCancel(t.Context())
		ready, done := make(chan struct{}), make(chan error, 1)
		go func() {
			done <- s.Listen(ctx, func() { close(ready) }, func(message []byte) { heard[i] <- string(message) })
		}()
		<-ready
		t.Cleanup(func() {
			cancel()
			if err := <-done; err == nil {
				t.Error("Listen returned no error")
			}
		})
	}
	put(t, stores[0],
		state.Record{Group: "g", Key: "quiet", Mode: state.Latest, TTL: time.Minute, Message: []byte("not sent"),
			News: []byte{}},
		state.Record{Group: "g", Key: "k", Mode: state.Extend, Version: "1", TTL: time.Minute, Message: []byte("first")},
		state.Record{Group: "g", Key: "k", Mode: state.Extend, Version: "2", TTL: time.Second,
			Message: []byte("not kept " + odd)},
		state.Record{Group: "g", Key: "k", Mode: state.Finish, Version: "3", TTL: time.Second, Message: []byte("not kept either")},
		state.Record{Group: "g", Key: "news", Mode: state.Replace, TTL: time.Minute, Message: []byte("all of it"),
			News: []byte("what is new" + odd)})
	for i := range stores {
		for _, want := range []string{"first", "not kept " + odd, "not kept either", "what is new" + odd} {
			if got := <-heard[i]; got != want {
				t.Errorf("%d heard %q, want %q", i, got, want)
			}
		}
	}
	kept, _, err := stores[0].Load(t.Context(), []string{"g"})
	if i := slices.IndexFunc(kept, func(k state.Kept) bool { return k.Key == "news" }); i < 0 ||
		string(kept[i].Message) != "all of it" {
		t.Errorf("%+v is kept, %v", kept, err)
	}
	if !slices.ContainsFunc(kept, func(k state.Kept) bool { return string(k.Message) == "not sent" }) {
		t.Errorf("%+v is kept, without what was not sent", kept)
	}
}

func testClaims(t *testing.T, a, b state.Store) {
	claim := func(s state.Store, name string, ttl time.Duration) bool {
		won, err := s.Claim(t.Context(), []state.Claim{{Name: name, TTL: ttl}})
		if err != nil || len(won) != 1 {
			t.Fatal(won, err)
		}
		return won[0]
	}
	if !claim(a, "x", time.Minute) || claim(b, "x", time.Minute) || !claim(a, "x", time.Minute) {
		t.Error("a name does not belong to the store that claimed it")
	}
	if !claim(b, "y", 100*time.Millisecond) {
		t.Error("another name was not claimed")
	}
	for !claim(a, "y", time.Minute) {
		time.Sleep(10 * time.Millisecond)
	}
	won, err := b.Claim(t.Context(),
		[]state.Claim{{Name: "x", TTL: time.Minute}, {Name: "z", TTL: time.Minute}, {Name: "y", TTL: time.Minute}})
	if err != nil || !slices.Equal(won, []bool{false, true, false}) {
		t.Errorf("of three names, one of which no store has, it gets %v, %v", won, err)
	}
}

func testEntries(t *testing.T, a, b state.Store) {
	soft := func(value string) state.Entry { return state.Entry{Key: "k", Value: []byte(value), TTL: time.Hour} }
	firm := func(value string) state.Entry {
		e := soft(value)
		e.Firm = true
		return e
	}
	longest := strings.Repeat("\xff", state.MaxValue-len(odd)) + odd
	for i, step := range []struct {
		keep state.Entry
		want state.Entry
	}{
		{soft(longest), soft(longest)},
		{soft("another"), soft(longest)},
		{firm("alice's"), firm("alice's")},
		{firm("bob's"), firm("alice's")},
		{soft("no caller's"), firm("alice's")},
	} {
		other := state.Entry{Key: fmt.Sprintf("Other-%d_", i), Value: []byte{0}, Firm: true, TTL: time.Minute}
		keep(t, a, step.keep, other)
		got := find(t, b, "none", "k", other.Key, "k")
		if len(got[0].Value) > 0 || got[0].TTL != 0 {
			t.Errorf("step %d: got %+v, which was never kept", i, got[0])
		}
		for _, at := range []int{1, 3} {
			if e := got[at]; string(e.Value) != string(step.want.Value) || e.Firm != step.want.Firm ||
				e.TTL > time.Hour || e.TTL < 59*time.Minute {
				t.Errorf("step %d: got %+v, want %+v", i, e, step.want)
			}
		}
		if e := got[2]; string(e.Value) != "\x00" || !e.Firm || e.TTL > time.Minute || e.TTL < time.Minute/2 {
			t.Errorf("step %d: got %+v, want %+v", i, e, other)
		}
	}
}

func testEntriesExpire(t *testing.T, s state.Store) {
	keep(t, s, state.Entry{Key: "gone", Value: []byte("1"), Firm: true, TTL: 100 * time.Millisecond},
		state.Entry{Key: "stays", Value: []byte("1"), TTL: 100 * time.Millisecond})
	keep(t, s, state.Entry{Key: "stays", Value: []byte("2"), TTL: time.Hour})
	for len(find(t, s, "gone")[0].Value) > 0 {
		time.Sleep(20 * time.Millisecond)
	}
	if e := find(t, s, "stays")[0]; len(e.Value) != 1 || e.TTL < 59*time.Minute {
		t.Errorf("got %+v, whose time began anew", e)
	}
	keep(t, s, state.Entry{Key: "gone", Value: []byte("2"), TTL: time.Hour})
	if e := find(t, s, "gone")[0]; string(e.Value) != "2" || e.Firm {
		t.Errorf("got %+v in place of one whose time had passed", e)
	}
}

func keep(t *testing.T, s state.Store, entries ...state.Entry) {
	t.Helper()
	if failed, err := s.Keep(t.Context(), entries); err != nil || len(failed) > 0 {
		t.Fatal(failed, err)
	}
}

func find(t *testing.T, s state.Store, keys ...string) []state.Entry {
	t.Helper()
	found, err := s.Find(t.Context(), keys)
	if err != nil || len(found) != len(keys) {
		t.Fatalf("found %v for %q: %v", found, keys, err)
	}
	for i, e := range found {
		if e.Key != keys[i] {
			t.Errorf("found %q in place of %q", e.Key, keys[i])
		}
	}
	return found
}

func testContext(t *testing.T, s state.Store) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if s.Listen(ctx, func() {}, func([]byte) {}) == nil {
		t.Error("Listen goes on without its context")
	}
	if _, err := s.Find(ctx, []string{"k"}); err == nil {
		t.Error("Find goes on without its context")
	}
}

func put(t *testing.T, s state.Store, records ...state.Record) {
	t.Helper()
	if err := s.Put(t.Context(), records); err != nil {
		t.Fatal(err)
	}
}

func load(t *testing.T, s state.Store, groups ...string) []state.Kept {
	t.Helper()
	kept, now, err := s.Load(t.Context(), groups)
	if err != nil {
		t.Fatal(err)
	}
	if off := time.Since(now).Abs(); off > time.Minute {
		t.Errorf("the store's clock differs by %v on this machine", off)
	}
	return kept
}
