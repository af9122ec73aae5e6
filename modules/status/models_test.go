package status

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
)

// poolOf puts a pool of the members into use until the test ends, and returns
// how it is.
func poolOf(t *testing.T, members ...*pool.Member) func() Pool {
	t.Helper()
	e := &pools.Entry{Name: t.Name(), Pool: pool.New(members)}
	pools.Default.Add(e)
	t.Cleanup(func() {
		pools.Default.Remove(e)
		e.Pool.Close()
	})
	return func() Pool {
		all := Pools(time.Now(), nil)
		return all[slices.IndexFunc(all, func(p Pool) bool { return p.Name == t.Name() })]
	}
}

// member is a backend with its own names for models of clients:
// `gpt-4o=east-4o`. Without any it takes every model, by the name deployment if
// that is set.
func member(name, deployment string, models ...string) *pool.Member {
	m := pool.NewMember(name, new(pool.Health))
	m.Deployment, m.AnyModel = deployment, deployment == "" && models == nil
	for _, model := range models {
		theirs, its, _ := strings.Cut(model, "=")
		if m.Names == nil {
			m.Names = make(map[string]string)
		}
		m.Names[theirs], m.Models = its, append(m.Models, its)
	}
	return m
}

func TestStatesAreByTheModelsThatClientsName(t *testing.T) {
	a := member("a", "", "gpt-4o=a-4o", "best=a-4o", "mini=a-mini")
	b, c, d := member("b", "", "gpt-4o=b-4o"), member("c", "c-all"), member("d", "")
	d.Priority = 2
	state := poolOf(t, a, b, c, d)
	wants := func(want ...string) {
		t.Helper()
		var got []string
		for _, m := range state().Models(metrics.Other, "best") {
			line := m.Model + ":"
			for _, b := range m.Backends {
				line += " " + b.Backend + "/" + b.Deployment + " " + strings.TrimSpace(b.State+" "+b.Class) + ";"
			}
			got = append(got, line)
		}
		if !slices.Equal(got, want) {
			t.Errorf("got  %q\nwant %q", got, want)
		}
	}
	wants(
		"best: a/a-4o available; c/c-all available; d/best available;",
		"gpt-4o: a/a-4o available; b/b-4o available; c/c-all available; d/gpt-4o available;",
		"mini: a/a-mini available; c/c-all available; d/mini available;",
		"other: c/c-all available; d/other available;",
	)
	a.CoolDown(refusal("throttled", "a-4o", time.Minute), time.Now())
	c.CoolDown(refusal("failed", "c-all", time.Minute), time.Now())
	d.CoolDown(refusal("no_model", "made-up", time.Minute), time.Now())
	b.CoolDown(pool.Refusal{Reason: pool.Reason{Class: "credential"}, Whole: true, Wait: time.Minute}, time.Now())
	wants(
		"best: a/a-4o cooling_down throttled; c/c-all cooling_down failed; d/best available;",
		"gpt-4o: a/a-4o cooling_down throttled; b/b-4o cooling_down credential; c/c-all cooling_down failed; d/gpt-4o available;",
		"mini: a/a-mini available; c/c-all cooling_down failed; d/mini available;",
		"other: c/c-all cooling_down failed; d/other available;",
	)
	d.CoolDown(refusal("throttled", "gpt-5", 2*time.Minute), time.Now())
	d.Drain(pool.Order{})
	if got := state().Models(metrics.Other)[3].Backends[1]; got.State != Drained || got.Class != "throttled" || got.Usable() {
		t.Errorf("got %+v", got)
	}
}

// TestASilenceOfAModelThatNoConfigNames counts for all such models, so that a
// pool without model options says that no backend is available.
func TestASilenceOfAModelThatNoConfigNames(t *testing.T) {
	b := Backend{Name: "a", State: Silent, Healthy: true, Silences: []Silence{{Model: "gpt-5", Deployment: "gpt-5"}}, member: member("a", "")}
	for other, want := range map[bool]string{false: Silent, true: Available} {
		named := map[string]bool{metrics.Other: true, "gpt-5": other}
		if got := b.forModel(metrics.Other, metrics.Other, named); got.State != want {
			t.Errorf("with a named gpt-5 %t, the state is %s, want %s", other, got.State, want)
		}
	}
	if got := (Pool{Backends: []Backend{b}}).Models(metrics.Other); WhyNone(got[0]) != Unavailable {
		t.Errorf("got %+v, which is available", got)
	}
}

func TestACooldownHasTheNameOfClientsAndThatOfTheBackend(t *testing.T) {
	a, b, c := member("a", "", "gpt-4o=a-4o", "best=a-4o"), member("b", "b-all"), member("c", "")
	state := poolOf(t, a, b, c)
	for _, m := range []*pool.Member{a, b, c} {
		m.CoolDown(refusal("throttled", map[*pool.Member]string{a: "a-4o", b: "b-all", c: "gpt-5"}[m], time.Minute), time.Now())
		m.CoolDown(refusal("failed", "of another pool", time.Minute), time.Now())
	}
	var got []string
	for _, b := range state().Backends {
		for _, cooldown := range b.Cooldowns {
			if cooldown.Class == "throttled" {
				got = append(got, b.Name+" "+cooldown.Model+" "+cooldown.Deployment)
			}
		}
		got = append(got, b.LastError.Model+"|"+b.LastError.Deployment)
	}
	want := []string{"a best a-4o", "a gpt-4o a-4o", "|of another pool", "b  b-all", "|of another pool", "c gpt-5 gpt-5", "of another pool|of another pool"}
	if !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

func TestOnlyAModelThatTheBackendIsToHaveNeedsAnOperator(t *testing.T) {
	a, b := member("a", "", "gpt-4o=a-4o"), member("b", "")
	state := poolOf(t, a, b)
	a.CoolDown(refusal("no_model", "a-4o", time.Minute), time.Now())
	b.CoolDown(refusal("no_model", "made-up", time.Minute), time.Now())
	b.Served(pool.Scope{Model: "gpt-4o"}, time.Now())
	b.CoolDown(refusal("no_model", "gpt-4o", time.Minute), time.Now().Add(time.Millisecond))
	b.CoolDown(refusal("throttled", "gpt-5", time.Minute), time.Now())
	b.CoolDown(pool.Refusal{Reason: pool.Reason{Class: "quota"}, Throttle: true, Whole: true, Wait: time.Minute}, time.Now())
	got := make(map[string]bool)
	for _, b := range state().Backends {
		for _, cooldown := range b.Cooldowns {
			got[fmt.Sprint(b.Name, " ", cooldown.Class, " ", cooldown.Deployment)] = cooldown.NeedsOperator
		}
	}
	want := map[string]bool{"a no_model a-4o": true, "b no_model made-up": false, "b no_model gpt-4o": true, "b throttled gpt-5": false, "b quota ": true}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
}

func TestACooldownOfAnOperationIsShownAndLeavesTheModelAvailable(t *testing.T) {
	a := member("a", "", "gpt-4o=a-4o")
	state := poolOf(t, a)
	for _, operation := range []string{"/images/generations", "/embeddings"} {
		r := refusal("not_permitted", "a-4o", time.Minute)
		r.Operation = operation
		a.CoolDown(r, time.Now())
	}
	b := state().Backends[0]
	if b.State != Available || b.WorstCooldown.Class != "" || len(b.Cooldowns) != 2 {
		t.Fatalf("the backend is %s for %q, with %d cooldowns", b.State, b.WorstCooldown.Class, len(b.Cooldowns))
	}
	if first := b.Cooldowns[0]; first.Operation != "/embeddings" || first.Model != "gpt-4o" || !first.NeedsOperator {
		t.Errorf("it shows %+v", first)
	}
	if its := state().Models()[0].Backends[0]; its.State != Available || its.Until != nil {
		t.Errorf("for the model, it shows %+v", its)
	}
}
