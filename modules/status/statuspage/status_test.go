package statuspage

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/modules/status"
)

// statusOf returns what the page shows of a pool in use, of which so much was
// counted.
func statusOf(name string, counts map[metrics.Key]metrics.Counts, others ...*status.View) poolStatus {
	for _, p := range status.Pools(time.Now(), counts) {
		if p.Name == name {
			spans := status.SpansOf(name, []metrics.Span{{Length: 10 * time.Second, Counts: counts}})
			return poolStatusOf(time.Now(), p, replica{"0000", "one 0000"}, status.View{Counts: counts, Traffic: status.Traffic{Spans: spans}}, others, nil)
		}
	}
	return poolStatus{}
}

// requests are counts of lines like `backend model class 12`, in which - is
// nothing.
func requests(pool string, lines ...string) map[metrics.Key]metrics.Counts {
	counts := make(map[metrics.Key]metrics.Counts)
	for _, line := range lines {
		var n float64
		var words [3]string
		fmt.Sscan(line, &words[0], &words[1], &words[2], &n)
		for i, word := range words {
			words[i] = strings.TrimPrefix(word, "-")
		}
		counts[metrics.Key{Pool: pool, Backend: words[0], Model: words[1], Class: words[2]}] = metrics.Counts{Requests: n}
	}
	return counts
}

func TestThePageShowsWhatClientsGot(t *testing.T) {
	usePool(t, t.Name(), "a", "b")
	got := statusOf(t.Name(), requests(t.Name(),
		"a gpt served 60", "b gpt served 10", "b mini served 10", "- gpt all_throttled 15", "a gpt unreachable 5",
		"- - unauthenticated 900", "- gpt-6 no_such_model 7", "a gpt client_error 3", "- - ready 5000", "- - models 40",
	))
	if *got.NotServedRatio != .2 || got.NotServed != 20 || got.Served != 80 || got.CallerErrors != 910 || got.Requests != 1010 {
		t.Errorf("got %+v", got)
	}
	var classes []string
	for _, c := range got.Classes {
		classes = append(classes, fmt.Sprint(c.Class, " ", c.Requests, " ", c.Fault))
	}
	want := []string{"unauthenticated 900 caller", "all_throttled 15 service", "no_such_model 7 caller", "unreachable 5 service", "client_error 3 caller"}
	if !slices.Equal(classes, want) {
		t.Errorf("got %q", classes)
	}
	if got, want := got.Named([]string{"other", "", "gpt-4o", "mini", "x"}), "other models, no model named, gpt-4o, 2 more"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if none := statusOf(t.Name(), nil); none.NotServedRatio != nil || none.Level() != "none" || none.SpilloverRatio != nil || none.NameOf("other") != "all models" {
		t.Errorf("without requests: %+v", none)
	}
}

func TestRequestsWithoutAKeyAreOfNoModel(t *testing.T) {
	usePool(t, t.Name(), "a")["a"].Names = map[string]string{"gpt": "gpt"}
	got := statusOf(t.Name(), requests(t.Name(), "a gpt served 1", "- - unauthenticated 900"))
	if len(got.Models) != 1 || got.Models[0].Requests != 1 || got.CallerErrors != 900 {
		t.Errorf("got %+v", got.Models)
	}
}

func TestThePageShowsSpillover(t *testing.T) {
	members := usePool(t, t.Name(), "ptu", "east", "west") // of priorities 1, 2 and 3
	members["ptu"].Names = map[string]string{"gpt": "ptu-gpt"}
	members["east"].Names = map[string]string{"gpt": "east-gpt", "mini": "east-mini"}
	got := statusOf(t.Name(), requests(t.Name(),
		"ptu gpt served 60", "east gpt served 15", "west gpt served 25", "- gpt all_throttled 100", "east mini served 100",
	))
	if *got.SpilloverRatio != .2 {
		t.Errorf("%v of all was served by other priorities than the first one of the model", *got.SpilloverRatio)
	}
	var models []string
	for _, m := range got.Models {
		line := fmt.Sprintf("%s %d of %d:", m.Model.Model, m.Served, m.Requests)
		for _, part := range m.Parts() {
			line += fmt.Sprintf(" %d %s", part.Priority, part.Percent)
		}
		models = append(models, line)
	}
	want := []string{"gpt 100 of 200: 1 60 % 2 15 % 3 25 %", "mini 100 of 100: 2 100 % 3 0 %", "other 0 of 0: 3 –"}
	if !slices.Equal(models, want) {
		t.Errorf("got  %q\nwant %q", models, want)
	}
}

// viewOfOther returns what another replica sees of the pool, if its backends
// are in the state in which this one has them now.
func viewOfOther(t *testing.T, pool, name string, counts map[metrics.Key]metrics.Counts) *status.View {
	t.Helper()
	s := statusOf(pool, counts)
	v := &status.View{Replica: name, Problems: s.Problems, Counts: counts, Traffic: status.Traffic{Spans: s.Spans, Waiting: metrics.Waiting{Requests: 3, OldestSeconds: 70, Overdue: 1}}}
	for _, b := range s.Backends {
		b.States, b.DrainedAt = map[string]int{b.State: 1}, map[string]bool{name: b.Drain != nil}
		v.Backends = append(v.Backends, b.Backend)
	}
	for i := range v.Problems {
		v.Problems[i].Replicas = []string{name}
	}
	return v
}

func TestThePageShowsSumsOverReplicas(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		members := usePool(t, t.Name(), "a", "b")
		for _, m := range members {
			m.Names = map[string]string{"gpt": "gpt"}
		}
		cooldown := func(name, class string) {
			members[name].CoolDown(pool.Refusal{Reason: pool.Reason{Class: class}, Whole: true, Wait: time.Minute}, time.Now())
		}
		cooldown("b", "credential")
		here := requests(t.Name(), "a gpt served 10", "- gpt all_throttled 1")
		there := requests(t.Name(), "a gpt served 100", "b gpt served 300", "- gpt all_throttled 2")
		idle := viewOfOther(t, t.Name(), "three", requests(t.Name()))
		members["b"].Reset(pool.Order{})
		cooldown("a", "unreachable")
		cooldown("b", "unreachable")
		both := viewOfOther(t, t.Name(), "two", there)
		members["a"].Reset(pool.Order{})
		members["b"].Reset(pool.Order{})
		cooldown("b", "credential")
		got := statusOf(t.Name(), here, both, idle)
		if got.Served != 410 || got.NotServed != 3 || got.Waiting.Requests != 6 || !got.Waiting.Stuck() || got.Spans[0].Requests != 413 {
			t.Errorf("got %+v", got)
		}
		for i, want := range []string{"a cooling_down at 1 of 3 replicas 110", "b cooling_down 300"} {
			b := got.Backends[i]
			if line := fmt.Sprint(b.Name, " ", b.State, got.At(b), " ", b.Requests); line != want {
				t.Errorf("got %s, want %s", line, want)
			}
		}
		m := got.Models[0]
		if m.Condition() != "None available at 1 of 3 replicas" || m.State() != status.Unhealthy || m.Why(m.Backends[0]) != "unreachable at 1 of 3 replicas" {
			t.Errorf("the model is %s, %s: %s", m.Condition(), m.State(), m.Why(m.Backends[0]))
		}
		var problems []string
		for _, p := range got.Problems {
			problems = append(problems, strings.TrimSpace(fmt.Sprint(p.Backend, " ", p.Class, " ", where(p))))
		}
		want := []string{"unavailable at two", "b credential at one 0000, three", "a unreachable at two", "b unreachable at two"}
		if !slices.Equal(problems, want) {
			t.Errorf("got  %q\nwant %q", problems, want)
		}
		if alone := statusOf(t.Name(), here); alone.Backends[1].States["cooling_down"] != 1 || alone.At(alone.Backends[1]) != "" || where(alone.Problems[0]) != "" {
			t.Errorf("alone it is %+v", alone)
		}
		time.Sleep(2 * time.Minute) // what was answered long ago is over
		got = statusOf(t.Name(), here, both)
		if got.Backends[0].State != status.Probing || len(got.Backends[0].Cooldowns) != 0 || got.Models[0].NoneAt != 0 {
			t.Errorf("after the cooldown, it is %+v", got.Backends[0])
		}
	})
}

// A backend that only another replica has, as in the middle of an upgrade, is
// shown, too.
func TestABackendOfAnotherReplicaIsShown(t *testing.T) {
	usePool(t, t.Name(), "a")
	v := &status.View{Replica: "two", Counts: requests(t.Name(), "new gpt served 5"), Backends: []status.Backend{
		{Pool: t.Name(), Name: "new", Priority: 1, State: status.Available, Healthy: true, States: map[string]int{status.Available: 1}, DrainedAt: map[string]bool{}},
	}}
	got := statusOf(t.Name(), requests(t.Name()), v)
	if len(got.Backends) != 2 || got.Backends[1].Requests != 5 || got.At(got.Backends[1]) != " at 1 of 2 replicas" {
		t.Errorf("got %+v", got.Backends)
	}
}

// problemLines are the problems of a pool as text.
func problemLines(s poolStatus) (lines []string) {
	for _, p := range s.Problems {
		_, section, _ := strings.Cut(p.RunbookURL, "#")
		lines = append(lines, fmt.Sprintf("%v %s %s %s %s", p.NeedsOperator, p.Backend, p.Class, s.Named(p.Models), section))
	}
	return lines
}

func TestProblemsAreThoseThatNeedAnOperatorFirst(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		members := usePool(t, t.Name(), "a", "b", "c", "d")
		for _, m := range members {
			m.Names = map[string]string{"gpt": m.Name + "-gpt", "mini": m.Name + "-mini"}
			m.Models = []string{m.Name + "-gpt", m.Name + "-mini"}
		}
		wants := func(want ...string) {
			t.Helper()
			if got := problemLines(statusOf(t.Name(), nil)); !slices.Equal(got, want) {
				t.Errorf("got  %q\nwant %q", got, want)
			}
		}
		cooldown := func(name, class, model string) {
			members[name].CoolDown(pool.Refusal{
				Reason: pool.Reason{Class: class}, Throttle: class == "throttled" || class == "quota", Whole: model == "", Model: model,
				Unreachable: class == "unreachable", Wait: time.Minute,
			}, time.Now())
		}
		wants()
		cooldown("a", "throttled", "a-gpt")
		wants() // as it is meant to be: others serve
		cooldown("b", "unreachable", "")
		cooldown("c", "credential", "")
		cooldown("d", "no_model", "d-mini")
		cooldown("d", "failed", "d-gpt")
		wants(
			"true  unavailable gpt no-backend-is-available",
			"true c credential  502-upstream_credentials_rejected",
			"true d no_model mini 404-for-a-model",
			"false b unreachable  502-upstream_unreachable",
			"false d failed gpt many-requests-fail",
		)
		members["b"].Reset(pool.Order{})
		members["c"].Reset(pool.Order{})
		members["d"].Reset(pool.Order{})
		for _, name := range []string{"b", "c", "d"} {
			cooldown(name, "throttled", name+"-gpt")
		}
		wants("false  all_throttled gpt all-backends-throttle")
		members["d"].Reset(pool.Order{})
		members["d"].Drain(pool.Order{}) // it serves when no other is left
		wants()
		cooldown("d", "quota", "")
		wants(
			"true  unavailable gpt no-backend-is-available",
			"true d quota  429-and-it-stays-for-minutes",
		)
		time.Sleep(2 * time.Minute) // no request has tried again
		wants("true d quota  429-and-it-stays-for-minutes")
		members["d"].Served(pool.Scope{Model: "d-gpt"}, time.Now())
		wants()
	})
}

func TestProblemsOfOneKindAreOne(t *testing.T) {
	members := usePool(t, t.Name(), "a")
	for i := range 200 { // a client makes up models
		members["a"].CoolDown(pool.Refusal{Reason: pool.Reason{Class: "no_model"}, Model: fmt.Sprintf("model-%03d", i), Wait: time.Minute}, time.Now())
	}
	got := problemLines(statusOf(t.Name(), nil))
	if len(got) != 1 || !strings.HasPrefix(got[0], "false a no_model model-") || !strings.Contains(got[0], ", 197 more ") {
		t.Errorf("got %q", got)
	}
}

// fieldsIn are the names of the fields in JSON, with those that they are in.
func fieldsIn(value any, path string, into map[string]bool) {
	switch value := value.(type) {
	case map[string]any:
		for name, its := range value {
			into[strings.TrimPrefix(path+"."+name, ".")] = true
			fieldsIn(its, path+"."+name, into)
		}
	case []any:
		for _, its := range value {
			fieldsIn(its, path, into)
		}
	}
}

func TestThePageIsAvailableAsJSON(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		members := usePool(t, t.Name(), "a", "b")
		members["a"].Names = map[string]string{"gpt": "a-gpt"}
		members["a"].CoolDown(throttle("a-gpt", time.Minute), time.Now())
		members["b"].CoolDown(pool.Refusal{Reason: pool.Reason{Class: "credential", Status: 401}, Whole: true, Wait: time.Minute}, time.Now())
		h, _ := newHandler(t, 1)
		answer, err := ask(t, h, http.MethodGet, "/status?json")
		if err != nil || answer.Header().Get("Content-Type") != "application/json" || answer.Header().Get("Cache-Control") != "no-store" {
			t.Fatalf("got %v, %v", err, answer.Header())
		}
		var got map[string]any
		if err := json.Unmarshal(answer.Body.Bytes(), &got); err != nil {
			t.Fatal(err)
		}
		fields := make(map[string]bool)
		fieldsIn(got, "", fields)
		for field := range strings.FieldsSeq(`version caddy_version time window_seconds states
			pools.pool pools.requests pools.served pools.not_served pools.not_served_ratio pools.caller_errors pools.left_waiting pools.spillover_ratio
			pools.failovers pools.tokens pools.classes pools.spans pools.time_to_first_byte_seconds.p50 pools.time_to_first_byte_seconds.p95
			pools.problems.needs_operator pools.problems.backend pools.problems.class pools.problems.status pools.problems.cause
			pools.problems.models pools.problems.since pools.problems.until pools.problems.until_reached pools.problems.runbook_url
			pools.backends.name pools.backends.priority pools.backends.weight pools.backends.state pools.backends.requests
			pools.backends.requests_ratio pools.backends.throttles pools.backends.failures pools.backends.failovers pools.backends.tokens
			pools.backends.in_flight pools.backends.healthy pools.backends.time_to_first_byte_seconds.p95 pools.backends.deployment_utilization_ratio
			pools.backends.cooldowns.model pools.backends.cooldowns.deployment pools.backends.cooldowns.class pools.backends.cooldowns.until
			pools.backends.cooldowns.needs_operator pools.models.model pools.models.backends.backend pools.models.backends.deployment
			pools.models.backends.state pools.models.backends.class pools.models.requests pools.models.served
			pools.models.priorities.priority pools.models.priorities.served pools.models.priorities.served_ratio
			pools.recent_cooldowns.backend pools.recent_cooldowns.class pools.recent_cooldowns.model pools.recent_cooldowns.deployment
			pools.recent_cooldowns.times pools.recent_cooldowns.since pools.recent_cooldowns.latest pools.recent_cooldowns.until`) {
			if !fields[field] {
				t.Errorf("there is no %s", field)
			}
		}
		if head, err := ask(t, h, http.MethodHead, "/status?json"); err != nil || head.Body.Len() > 0 || head.Header().Get("Content-Length") == "" {
			t.Errorf("HEAD: got %v, %v", err, head)
		}
		if t.Failed() {
			t.Log(answer.Body)
		}
	})
}
