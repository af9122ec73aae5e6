package status

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/openai-lb/caddy-openai-lb/internal/admin"
	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

// replica is what another replica that shares the pool llm answers.
func replica(t testing.TB, id string, rows any) seam.PeerAnswer {
	t.Helper()
	text, err := json.Marshal(rows)
	if err != nil {
		t.Fatal(err)
	}
	return seam.PeerAnswer{Peer: seam.Peer{ID: id, Host: "host-" + id}, Connected: true, Whole: true, SharedPools: inLLM, Packed: seam.Pack(text)}
}

var (
	inLLM  = seam.SharedPools{Pools: []string{"llm"}}
	self   = seam.PeerAnswer{Peer: seam.Peer{ID: "0000"}, Self: true, Connected: true, Whole: true, SharedPools: inLLM}
	silent = seam.PeerAnswer{Peer: seam.Peer{ID: "ffff"}, Connected: true, Whole: true, SharedPools: inLLM}
)

func every(string) bool { return true }

func backendsOf(answers ...seam.PeerAnswer) (admin.Read, *backendSum) {
	others := newBackends()
	return admin.ReadAnswers(context.Background(), answers, admin.MaxRow, others.take(every)), others
}

func callersOf(answers ...seam.PeerAnswer) (o OtherCallers) {
	o.sum = newCallers()
	o.read = admin.ReadAnswers(context.Background(), answers, admin.MaxRow, o.take(every))
	return o
}

func TestBackendsAreAddedUpOverReplicas(t *testing.T) {
	now := time.Date(2026, 11, 25, 12, 0, 0, 0, time.UTC)
	b := func(state string, requests int64, cooldowns ...Cooldown) []Backend {
		b := Backend{Pool: "llm", Name: "ptu", State: state, Healthy: true, InFlight: 2, MaxRequests: 5, Counts: Counts{Requests: requests}, Cooldowns: cooldowns}
		b.sortCooldowns()
		return []Backend{b, {Pool: "another", Name: "ptu", State: Drained}}
	}
	cooldown := func(class string, left time.Duration) Cooldown {
		return Cooldown{Scope: ModelScope, Model: "gpt", Class: class, Until: now.Add(left), RemainingMs: left.Milliseconds()}
	}
	a, others := backendsOf(self, replica(t, "aaaa", b(CoolingDown, 10, cooldown("throttled", 3*time.Second))), silent,
		replica(t, "bbbb", b(CoolingDown, 100, cooldown("throttled", 5*time.Second), cooldown("timeout", time.Second))))
	got := others.with(b(Available, 1)[:1], a)
	if len(got) != 1 || got[0].Requests != 111 || got[0].InFlight != 6 || got[0].MaxRequests != 15 || got[0].stateText() != "cooling down at 2 of 3" ||
		len(got[0].Cooldowns) != 2 || got[0].Class != "throttled" || got[0].RemainingMs != 5000 {
		t.Errorf("got %+v", got)
	}
	var included []bool
	for _, s := range a.Replicas {
		included = append(included, s.Included)
	}
	if fmt.Sprint(included) != "[true true false true]" || !a.Connected {
		t.Errorf("included are %v", included)
	}
	if a, _ := backendsOf(replica(t, "aaaa", b(Available, 10))); a.Self {
		t.Error("the one that was asked is among the others")
	}
}

func TestCallersAreAddedUpOverReplicas(t *testing.T) {
	c := func(name string, used int64, refused map[string]uint64) Caller {
		return Caller{
			Pool: "llm", Name: name, InFlight: 1, MaxRequests: 3, TokensToday: used, LastHour: ratelimit.LastHour{Requests: 1, Tokens: used, Refused: refused},
			Limits: []CallerLimit{{Kind: "tokens", Window: "day", Limit: 1000, Used: used, Refused: 1}},
		}
	}
	o := callersOf(
		self, replica(t, "aaaa", []Caller{c("alice", 900, map[string]uint64{"model": 2}), c("fresh", 10, nil)}),
		replica(t, "bbbb", []Caller{c("fresh", 500, map[string]uint64{"tokens/day": 4}), c("alice", 20, nil)}), silent,
		replica(t, "cccc", []Caller{{Pool: "another"}}), // it has no such pool
	)
	known := c("alice", 700, map[string]uint64{"model": 1})
	known.Own = true
	all := newCallers()
	all.add(known)
	all.add(o.sum.rows...)
	rows := all.rows
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
}

func TestMadeUpAnswersAreBounded(t *testing.T) {
	list := func(row string, n int) seam.PeerAnswer {
		return seam.PeerAnswer{SharedPools: inLLM, Packed: seam.Pack([]byte("[" + strings.Repeat(row+",", n-1) + row + "]"))}
	}
	caller := func(more string) string { return `{"pool":"llm","name":"a"` + more + `}` }
	reasons := make(map[string]int)
	for i := range maxReasons + 1 {
		reasons[fmt.Sprint(i)] = 1
	}
	many, _ := json.Marshal(reasons)
	for name, test := range map[string]struct {
		answer   seam.PeerAnswer
		rows     int
		included bool
	}{
		"a list":       {list(caller(""), admin.MaxRows), admin.MaxRows, true},
		"many rows":    {list(caller(""), admin.MaxRows+1), admin.MaxRows, false},
		"empty rows":   {list("{}", 5<<20), 0, false},
		"a long row":   {list(caller(`,"limits":[`+strings.Repeat("{},", admin.MaxRow/3)+"{}]"), 1), 0, false},
		"long rows":    {list(caller(`,"x":"`+strings.Repeat("x", admin.MaxRow/2)+`"`), 200), 127, false},
		"a long name":  {list(`{"pool":"llm","name":"`+strings.Repeat("x", maxWord+1)+`"}`, 1), 0, true},
		"a long tier":  {list(caller(`,"tier":"`+strings.Repeat("x", maxWord+1)+`"`), 1), 0, true},
		"many reasons": {list(caller(`,"last_hour":{"refused":`+string(many)+"}"), 1), 0, true},
		"no list":      {seam.PeerAnswer{SharedPools: inLLM, Packed: seam.Pack([]byte(`{"pool":"llm"}`))}, 0, false},
		"half a list":  {seam.PeerAnswer{SharedPools: inLLM, Packed: seam.Pack([]byte("[" + caller("")))}, 1, false},
		"null":         {seam.PeerAnswer{SharedPools: inLLM, Packed: seam.Pack([]byte("null"))}, 0, true},
	} {
		o := callersOf(self, test.answer)
		if o.Number != test.rows || o.read.Replicas[1].Included != test.included {
			t.Errorf("%s: %d rows count, want %d; %+v", name, o.Number, test.rows, o.read.Replicas[1])
		}
	}
	var answers []seam.PeerAnswer
	for i := range admin.MaxSum/admin.MaxRows + 2 {
		var rows []Caller
		for j := range admin.MaxRows {
			rows = append(rows, Caller{Pool: "llm", Name: fmt.Sprint(i, "-", j)})
		}
		answers = append(answers, replica(t, fmt.Sprint(i), rows))
	}
	if n := len(callersOf(answers...).sum.rows); n != admin.MaxSum {
		t.Errorf("a sum has %d rows, want %d", n, admin.MaxSum)
	}
}

func TestMaxRequestsIsThatOfTheReplicasWithThePool(t *testing.T) {
	a, others := backendsOf(self, replica(t, "aaaa", []Backend{{Pool: "llm", Name: "ptu", MaxRequests: 5}}), replica(t, "bbbb", []Backend{{Pool: "other", Name: "x"}}))
	if got := others.with([]Backend{{Pool: "llm", Name: "ptu", MaxRequests: 5}}, a); got[0].MaxRequests != 10 {
		t.Errorf("two replicas with 5 each allow %d", got[0].MaxRequests)
	}
}

// TestMaxRequestsOfACallerIsOfAllReplicas that share it.
func TestMaxRequestsOfACallerIsOfAllReplicas(t *testing.T) {
	fresh := replica(t, "bbbb", []Caller{})
	fresh.Configs = []seam.PeerConfig{{Pool: "llm"}}
	alice := func(inFlight int) []Caller {
		return []Caller{{Pool: "llm", Name: "alice", MaxRequests: 5, InFlight: inFlight}}
	}
	o := callersOf(self, replica(t, "aaaa", alice(1)), replica(t, "cccc", alice(3)), fresh)
	if got := o.With(time.Now(), every).Rows; len(got) != 1 || got[0].MaxRequests != 5 || got[0].InFlight != 4 {
		t.Errorf("three replicas that share 5 have %+v", got)
	}
}

func TestNoQuestionHasAnotherForm(t *testing.T) {
	for question, want := range map[string]bool{"view": true, "view x": false, "callers": true, "callers 1": false, "callers ": false, "backends": true, "backends x": false, "?": false} {
		if got := admin.AnswerQuestion(t.Context(), question, inLLM) != nil; got != want {
			t.Errorf("%q is answered: %v", question, got)
		}
	}
}

// Whatever another client of the store makes up, the page can be shown.
func TestMadeUpViewsAreBounded(t *testing.T) {
	long := strings.Repeat("x", maxWord+1)
	for name, row := range map[string]pageRow{
		"a long backend":     {Backend: &Backend{Pool: "llm", Name: long}},
		"another pool":       {Backend: &Backend{Pool: "other", Name: "a"}},
		"a long problem":     {Problem: &Problem{Class: long}},
		"a long episode":     {Episode: &Episode{Cause: long}},
		"a negative count":   {Key: &metrics.Key{Backend: "a"}, Counts: &metrics.Counts{Requests: -1}},
		"a huge count":       {Key: &metrics.Key{Backend: "a"}, Counts: &metrics.Counts{Requests: 1.7e308}},
		"a huge span":        {Traffic: &Traffic{Spans: []Span{{Seconds: 5, Requests: 1.7e308}}}},
		"a long model":       {Key: &metrics.Key{Model: long}, Counts: &metrics.Counts{}},
		"no span":            {Traffic: &Traffic{Spans: make([]Span, 1)}},
		"many spans":         {Traffic: &Traffic{Spans: make([]Span, maxSpans+1)}},
		"another one's row":  {Caller: &Caller{Pool: "other", Name: "alice"}},
		"a long utilization": {Backend: &Backend{Pool: "llm", Name: "a"}, Utilization: map[string]float64{long: 1}},
	} {
		o := newOthers(time.Now())
		if row.Pool = "llm"; row.Caller == nil {
			o.take(replica(t, "aaaa", nil), pageRow{Pool: "llm", Traffic: &Traffic{}}) // there is a view
		}
		if pool, full := o.take(replica(t, "aaaa", nil), row); pool != "" || full {
			t.Errorf("%s counts", name)
		}
	}
	o, n, from := newOthers(time.Now()), 0, replica(t, "aaaa", nil)
	for full := false; !full; n++ {
		_, full = o.take(from, pageRow{Pool: "llm", Key: &metrics.Key{Model: fmt.Sprint(n)}, Counts: &metrics.Counts{}})
	}
	if n != admin.MaxSum+1 {
		t.Errorf("it has taken %d rows", n)
	}
	o, row := newOthers(time.Now()), pageRow{Pool: "llm", Problem: &Problem{Class: "x", Models: make([]string, 30_000)}}
	if pool, _ := o.take(from, row); pool != "llm" || len(o.Views["llm"][0].Problems[0].Models) != maxModels {
		t.Errorf("a problem of %d models is not one of %d", len(row.Problem.Models), maxModels)
	}
}

// FuzzAnswers answers with arbitrary bytes, as another client of the store
// could. Neither the command nor the API may break, and no control character
// may reach the terminal.
func FuzzAnswers(f *testing.F) {
	for _, rows := range []any{
		[]Backend{{Pool: "llm", Name: "a\x1b[2J", State: "x\x07", WorstCooldown: WorstCooldown{Class: "\x1b"}, Cooldowns: []Cooldown{{Scope: "model"}}, Drain: &Drain{}, Silences: []Silence{{}}}},
		[]Caller{{Pool: "llm", Name: "\u202e", Limits: []CallerLimit{{Kind: "\x1b", Limit: -1, Used: 1 << 62}}, LastHour: ratelimit.LastHour{Refused: map[string]uint64{"\n": 1 << 63}}}},
	} {
		text, _ := json.Marshal(rows)
		f.Add(text, text)
	}
	f.Add([]byte(`[{"pool":"llm","until":"9999-12-31T23:59:59-12:00"}]`), []byte(`[null,{}]`))
	f.Fuzz(func(t *testing.T, one, other []byte) {
		shared := seam.SharedPools{Pools: []string{"llm", ""}}
		answers := []seam.PeerAnswer{self, {SharedPools: shared, Packed: seam.Pack(one), Peer: seam.Peer{Host: string(one)}}, {SharedPools: shared, Packed: seam.Pack(other)}}
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
		rows := backends.with([]Backend{{Pool: "llm", Name: "a", State: Available}}, a)
		write(func(text []byte) error { return showBackends(&out, text) }, rows)
		admin.ShowWhose(&out, a.Connected, a.Replicas)
		none := func(string) bool { return false }
		write(func(text []byte) error { return showCallers(&out, text) }, callersOf(answers...).With(time.Now(), none).Rows)
		for _, r := range out.String() {
			if !unicode.IsPrint(r) && r != '\n' {
				t.Fatalf("%q reaches the terminal: %q", r, out.String())
			}
		}
	})
}
