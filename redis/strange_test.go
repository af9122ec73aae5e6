package redis

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/state"
)

func TestAKeyOfAnotherTypeKeepsNoOtherEntryOut(t *testing.T) {
	s := startServer(t)
	st := open(t, s.engine())
	s.do("lpush", "openai_lb:id:list", "1")
	entry := func(key string) state.Entry { return state.Entry{Key: key, Value: []byte("1"), TTL: time.Minute} }
	failed, err := st.Keep(t.Context(), []state.Entry{entry("a"), entry("list"), entry("b")})
	if !slices.Equal(failed, []int{1}) || err == nil || !strings.Contains(err.Error(), "WRONGTYPE") {
		t.Errorf("not kept: %v, %v", failed, err)
	}
	s.do("lpush", "openai_lb:claim:list", "1")
	claim := func(name string) state.Claim { return state.Claim{Name: name, TTL: time.Minute} }
	if won, err := st.Claim(t.Context(), []state.Claim{claim("a"), claim("list"), claim("b")}); err != nil || slices.Contains(won, false) {
		t.Errorf("got the claims %v, %v", won, err)
	}
	s.kill()
	if failed, err := st.Keep(t.Context(), []state.Entry{entry("a"), entry("b")}); len(failed) != 2 || err == nil {
		t.Errorf("without a server, not kept: %v, %v", failed, err)
	}
}

func TestAClaimIsWonOrLostAlsoWhenThatOfAnotherEndsMeanwhile(t *testing.T) {
	s := startServer(t)
	p := newProxy(t, s.address)
	ours, other := open(t, &Engine{Address: []string{p.Addr().String()}}), open(t, s.engine())
	for _, st := range []state.Store{ours, other} {
		wantUsable(t, st)
	}
	if _, err := other.Claim(t.Context(), []state.Claim{{Name: "x", TTL: dawdling / 2}}); err != nil {
		t.Fatal(err)
	}
	p.mode.Store(dawdles)
	if won, err := ours.Claim(t.Context(), []state.Claim{{Name: "x", TTL: time.Minute}}); err != nil || len(won) != 1 {
		t.Errorf("got %v, %v", won, err)
	}
}

func TestWhatNoReplicaWroteIsLeftOut(t *testing.T) {
	s := startServer(t)
	st := open(t, s.engine())
	record := func(key string) state.Record {
		return state.Record{Group: "g", Key: key, Mode: state.Extend, Version: "2", TTL: time.Minute, Message: []byte("ours")}
	}
	want := func(want ...string) {
		t.Helper()
		kept, _, err := st.Load(t.Context(), []string{"list", "g", "text"})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, k := range kept {
			got = append(got, fmt.Sprintf("%s %s %.40s", k.Group, k.Key, k.Message))
		}
		if slices.Sort(got); !slices.Equal(got, want) {
			t.Errorf("loaded %q, want %q", got, want)
		}
	}
	if err := st.Put(t.Context(), []state.Record{record("good")}); err != nil {
		t.Fatal(err)
	}
	s.do("lpush", "openai_lb:group:list", "1")
	s.do("set", "openai_lb:group:text", "1")
	for i, value := range []string{
		"", "m", "soon 0 1 1m", "99999999999999999999999999 0 1 9m", fmt.Sprint(time.Now().Add(25*time.Hour).UnixMilli(), " 0 1 9m"),
		"0 0 1 1" + strings.Repeat("m", 2*state.MaxMessage), fmt.Sprint(time.Now().Add(-time.Hour).UnixMilli(), " 0 1 1m"),
	} {
		s.do("hset", "openai_lb:group:g", i, value)
	}
	want("g good ours")
	for _, key := range []string{"0", "1", "2", "3", "4", "6"} { // they are in nobody's way
		if err := st.Put(t.Context(), []state.Record{record(key)}); err != nil {
			t.Error(err)
		}
	}
	want("g 0 ours", "g 1 ours", "g 2 ours", "g 3 ours", "g 4 ours", "g 6 ours", "g good ours")
}

func TestNoMoreRecordsAreReadThanAReplicaKeeps(t *testing.T) {
	s := startServer(t)
	st := open(t, s.engine())
	for i := range 2 * state.MaxRecords {
		s.do("hset", "openai_lb:group:g", i, "0 0 1 1message")
	}
	if kept, _, err := st.Load(t.Context(), []string{"g"}); err != nil || len(kept) != state.MaxRecords {
		t.Errorf("loaded %d records, %v, want %d", len(kept), err, state.MaxRecords)
	}
}

func TestAFullGroupIsSearchedOnceASecond(t *testing.T) {
	s := startServer(t)
	st := open(t, s.engine())
	var records []state.Record
	for i := range 2 * state.MaxRecords {
		records = append(records, state.Record{Group: "g", Key: fmt.Sprint(i), Version: "1", TTL: time.Hour, Message: []byte("m")})
	}
	began := time.Now()
	if err := st.Put(t.Context(), records); !errors.Is(err, state.ErrFull) {
		t.Errorf("the error is %v, want %v", err, state.ErrFull)
	}
	_, text, _ := strings.Cut(fmt.Sprint(s.do("info", "commandstats")), "cmdstat_hgetall:calls=")
	searches := 0
	if fmt.Sscan(strings.Split(text, ",")[0], &searches); searches == 0 || searches > 1+int(time.Since(began)/time.Second) {
		t.Errorf("the server read all of the group %d times for %d records in %v", searches, len(records), time.Since(began))
	}
	for _, key := range []string{"dead", "also"} { // and they make room for others
		s.do("hset", "openai_lb:group:g", key, "1 0 1 1m")
		s.do("hdel", "openai_lb:group:g", map[string]string{"dead": "1", "also": "2"}[key])
	}
	lbtest.WaitFor(t, func() bool {
		return st.Put(t.Context(), []state.Record{{Group: "g", Key: "new", Version: "1", TTL: time.Hour, Message: []byte("m")}}) == nil
	})
	if kept, _, err := st.Load(t.Context(), []string{"g"}); err != nil || len(kept) != state.MaxRecords-1 {
		t.Errorf("%d records are kept, %v, want %d", len(kept), err, state.MaxRecords-1)
	}
}

func TestOnlyTheBeginningOfAValueIsRead(t *testing.T) {
	s := startServer(t)
	st := open(t, s.engine())
	s.do("set", "openai_lb:id:long", strings.Repeat("+", 10<<20), "px", 60_000)
	s.do("lpush", "openai_lb:id:list", "1")
	for _, key := range []string{"full", "firm"} {
		if _, err := st.Keep(t.Context(), []state.Entry{{Key: key, Value: bytes.Repeat([]byte("v"), state.MaxValue), Firm: key == "firm", TTL: time.Minute}}); err != nil {
			t.Fatal(err)
		}
	}
	s.do("config", "resetstat")
	found, err := st.Find(t.Context(), []string{"long", "full", "list", "none", "firm"})
	if err != nil {
		t.Fatal(err)
	}
	for i, e := range found {
		if known := i == 1 || i == 4; (len(e.Value) == state.MaxValue) != known || (e.TTL > 0) != known || e.Firm != (i == 4) {
			t.Errorf("found %.100q for %s", e.Value, e.Key)
		}
	}
	var sent int
	_, text, _ := strings.Cut(fmt.Sprint(s.do("info", "stats")), "total_net_output_bytes:")
	if fmt.Sscan(text, &sent); sent == 0 || sent > 10_000 {
		t.Errorf("the server sent %d bytes for it", sent)
	}
	s.kill()
	if found, err := st.Find(t.Context(), []string{"full"}); err == nil {
		t.Errorf("without a server, found %v", found)
	}
}

// Nobody has the probe if the server cannot write who has it.
func TestNoReplicaHasAClaimThatWasNotWritten(t *testing.T) {
	s := startServer(t)
	st := open(t, s.engine())
	s.do("config", "set", "maxmemory", "1")
	if won, err := st.Claim(t.Context(), []state.Claim{{Name: "c", TTL: time.Minute}}); err == nil {
		t.Errorf("claimed: %v", won)
	}
}

// A server that refuses a connection answers, but no command was sent.
func TestNothingIsDoneByAServerThatLetsNobodyIn(t *testing.T) {
	s := startServer(t)
	s.do("acl", "setuser", "reader", "on", ">right", "~*", "&*", "+@all", "-select")
	for _, e := range []*Engine{
		{Address: []string{s.address}, Username: "reader", Password: "wrong"},
		{Address: []string{s.address}, Username: "reader", Password: "right", DB: 1},
	} {
		st := open(t, e)
		entries := []state.Entry{{Key: "a", Value: []byte("1"), TTL: time.Minute}, {Key: "b", Value: []byte("1"), TTL: time.Minute}}
		if failed, err := st.Keep(t.Context(), entries); len(failed) != 2 || err == nil {
			t.Errorf("not kept: %v, %v", failed, err)
		}
		if won, err := st.Claim(t.Context(), []state.Claim{{Name: "c", TTL: time.Minute}}); err == nil {
			t.Errorf("claimed: %v", won)
		}
		if found, err := st.Find(t.Context(), []string{"a"}); err == nil {
			t.Errorf("found %v", found)
		}
		if kept, _, err := st.Load(t.Context(), []string{"g"}); err == nil {
			t.Errorf("loaded %v", kept)
		}
		if err := st.Put(t.Context(), []state.Record{{Group: "g", Key: "k", Version: "1", TTL: time.Minute}}); err == nil {
			t.Error("put")
		}
	}
}
