package admin

import (
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/openai-lb/caddy-openai-lb/internal/meter"
	"github.com/openai-lb/caddy-openai-lb/internal/replicas"
)

// replica is what another replica that shares the pool llm answers.
func replica(t testing.TB, id string, rows any) replicas.Answer {
	t.Helper()
	text, err := json.Marshal(rows)
	if err != nil {
		t.Fatal(err)
	}
	return replicas.Answer{Peer: replicas.Peer{ID: id, Host: "host-" + id}, Connected: true, Pools: []string{"llm"}, Text: text}
}

var (
	self   = replicas.Answer{Peer: replicas.Peer{ID: "0000"}, Self: true, Connected: true, Pools: []string{"llm"}}
	silent = replicas.Answer{Peer: replicas.Peer{ID: "ffff"}, Connected: true, Pools: []string{"llm"}}
)

func inLLM[T any](pool func(T) string) func(T, func(string) bool) bool {
	return func(row T, shared func(string) bool) bool { return shared(pool(row)) }
}

func backendsOf(answers ...replicas.Answer) (All[Backend], []answered[Backend]) {
	return readAnswers(answers, inLLM(func(b Backend) string { return b.Pool }))
}

func TestBackendsAreAddedUpOverReplicas(t *testing.T) {
	now := time.Date(2026, 11, 25, 12, 0, 0, 0, time.UTC)
	b := func(state string, requests int64, benches ...Bench) []Backend {
		b := Backend{Pool: "llm", Name: "ptu", State: state, Healthy: true, InFlight: 2, MaxRequests: 5, Counts: Counts{Requests: requests}, Benches: benches}
		b.sortBenches()
		return []Backend{b, {Pool: "another", Name: "ptu", State: Drained}}
	}
	bench := func(class string, left time.Duration) Bench {
		return Bench{Scope: ModelScope, Model: "gpt", Class: class, Until: now.Add(left), RemainingMs: left.Milliseconds()}
	}
	a, answers := backendsOf(self, replica(t, "aaaa", b(Benched, 10, bench("throttled", 3*time.Second))), silent,
		replica(t, "bbbb", b(Benched, 100, bench("throttled", 5*time.Second), bench("timeout", time.Second))))
	got := sumBackends(b(Available, 1)[:1], answers)
	if len(got) != 1 || got[0].Requests != 111 || got[0].InFlight != 6 || got[0].MaxRequests != 15 || got[0].stateText() != "benched at 2 of 3" ||
		len(got[0].Benches) != 2 || got[0].Class != "throttled" || got[0].RemainingMs != 5000 {
		t.Errorf("got %+v", got)
	}
	var included []bool
	for _, s := range a.Replicas {
		included = append(included, s.Included)
	}
	if fmt.Sprint(included) != "[true true false true]" || !a.Connected {
		t.Errorf("included are %v", included)
	}
	if _, answers := backendsOf(replica(t, "aaaa", b(Available, 10))); !withoutSelf(answers) {
		t.Error("the one that was asked is among the others")
	}
}

func TestCallersAreAddedUpOverReplicas(t *testing.T) {
	c := func(name string, used int64, refused map[string]uint64) Caller {
		return Caller{
			Pool: "llm", Name: name, InFlight: 1, MaxRequests: 3, TokensToday: used, LastHour: meter.LastHour{Requests: 1, Tokens: used, Refused: refused},
			Limits: []CallerLimit{{Kind: "tokens", Window: "day", Limit: 1000, Used: used, Refused: 1}},
		}
	}
	a, answers := readAnswers([]replicas.Answer{
		self, replica(t, "aaaa", []Caller{c("alice", 900, map[string]uint64{"model": 2}), c("fresh", 10, nil)}),
		replica(t, "bbbb", []Caller{c("fresh", 500, map[string]uint64{"tokens/day": 4}), c("alice", 20, nil)}), silent,
	}, inLLM(func(c Caller) string { return c.Pool }))
	o := sumCallers(a, answers)
	known := c("alice", 700, map[string]uint64{"model": 1})
	known.own = true
	rows := sum([]Caller{known}, []answered[Caller]{{rows: o.Rows}}, (*Caller).called, (*Caller).add)
	if o.Number != 4 || len(rows) != 2 {
		t.Fatalf("got %+v", rows)
	}
	alice, fresh := rows[0], rows[1]
	// what this replica knows of a limit is that of all, and the newest
	if alice.InFlight != 3 || alice.Limits[0].Used != 700 || alice.Limits[0].Refused != 3 || alice.LastHour.Requests != 3 || alice.LastHour.Refused["model"] != 3 {
		t.Errorf("got %+v", alice)
	}
	if fresh.Limits[0].Used != 500 || fresh.TokensToday != 500 || !maps.Equal(fresh.LastHour.Refused, map[string]uint64{"tokens/day": 4}) {
		t.Errorf("got %+v", fresh)
	}
	if known.Limits[0].Refused != 1 || known.LastHour.Refused["model"] != 1 {
		t.Error("a sum changes what it is the sum of")
	}
	for name, row := range map[string]Caller{"alice": alice, "fresh": fresh} {
		if n := sharing(o.answers, row.Pool); n != 3 {
			t.Errorf("%s may have requests at %d replicas, want 3", name, n)
		}
	}
}

func TestAReplicaIsFoundByItsHostOrTheBeginningOfItsID(t *testing.T) {
	answers := []replicas.Answer{self, replica(t, "aaaabbbb", 1), replica(t, "aaaacccc", 1), {Peer: replicas.Peer{ID: "dddddddd", Host: "host-aaaabbbb"}, Engine: 1}}
	for name, want := range map[string]string{
		"*": "0000 aaaabbbb aaaacccc dddddddd", "host-aaaacccc": "aaaacccc", "aaaab": "aaaabbbb", "host-aaaabbbb": "aaaabbbb dddddddd",
		"aaaa": "several replicas are called 'aaaa'", "aaa": "no replica is called 'aaa'", "": "no replica is called ''", "dddd": "dddddddd",
	} {
		its, err := chosen(answers, name)
		var ids []string
		for _, a := range its {
			ids = append(ids, a.ID)
		}
		if got := strings.Join(ids, " "); err == nil && got != want || err != nil && !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s is %s (%v), want %s", name, got, err, want)
		}
	}
}

// FuzzAnswers has whoever can write to the engine answer: the command and the API must not break, nor the terminal.
func FuzzAnswers(f *testing.F) {
	for _, rows := range []any{
		[]Backend{{Pool: "llm", Name: "a\x1b[2J", State: "x\x07", WorstBench: WorstBench{Class: "\x1b"}, Benches: []Bench{{Scope: "model"}}, Drain: &Drain{}, Silences: []Silence{{}}}},
		[]Caller{{Pool: "llm", Name: "\u202e", Limits: []CallerLimit{{Kind: "\x1b", Limit: -1, Used: 1 << 62}}, LastHour: meter.LastHour{Refused: map[string]uint64{"\n": 1 << 63}}}},
	} {
		text, _ := json.Marshal(rows)
		f.Add(text, text)
	}
	f.Add([]byte(`[{"pool":"llm","until":"9999-12-31T23:59:59-12:00"}]`), []byte(`[null,{}]`))
	f.Fuzz(func(t *testing.T, one, other []byte) {
		answers := []replicas.Answer{self, {Pools: []string{"llm", ""}, Text: one, Peer: replicas.Peer{Host: string(one)}}, {Pools: []string{"llm", ""}, Text: other}}
		var out strings.Builder
		write := func(show func(text []byte) error, value any) {
			text, err := json.Marshal(value)
			if err == nil {
				err = show(text)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		a, backends := backendsOf(answers...)
		a.Rows = sumBackends([]Backend{{Pool: "llm", Name: "a", State: Available}}, backends)
		write(func(text []byte) error { return showBackends(&out, text) }, a.Rows)
		showWhose(&out, a.Connected, a.Replicas)
		callers, its := readAnswers(answers, func(c Caller, shared func(string) bool) bool { return shared(c.Pool) })
		write(func(text []byte) error { return showCallers(&out, text) }, sumCallers(callers, its).With(time.Now(), func(string) bool { return false }).Rows)
		for _, r := range out.String() {
			if !unicode.IsPrint(r) && r != '\n' {
				t.Fatalf("%q reaches the terminal: %q", r, out.String())
			}
		}
	})
}
