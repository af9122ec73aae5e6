package status

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/admin"
)

func TestATableShowsWhatClientsMadeUpWithoutEffectOnATerminal(t *testing.T) {
	var out strings.Builder
	err := showBackends(&out, []byte(`[
		{"pool": "p", "name": "a", "priority": 1, "weight": 3, "state": "cooling_down", "class": "throttled", "model": "\u001b[2Jgpt\n4o\u202e",
			"remaining_ms": 61250, "in_flight": 2, "requests": 7, "failures": 1, "healthy": true},
		{"pool": "p", "name": "b", "priority": 2, "weight": 1, "state": "drained", "healthy": false, "drain": {"since": "2026-01-02T03:04:05.6Z", "by": "al\u001bice", "reason": "why"}},
		{"pool": "p", "name": "c", "priority": 2, "weight": 1, "state": "cooling_down", "class": "failed", "healthy": true, "cooldowns": [{"scope": "model", "class": "failed"}]},
		{"pool": "p", "name": "d", "priority": 2, "weight": 1, "state": "cooling_down", "class": "quota", "healthy": true, "cooldowns": [{"scope": "backend", "class": "quota", "needs_operator": true}, {"scope": "model", "class": "throttled"}],
			"silences": [{"model": "gpt\u001b-4o", "since": "2026-01-02T03:04:06.7Z"}, {"model": "gpt", "slow": true, "since": "2026-01-02T03:04:07Z"}]}
	]`))
	want := "p d has no budget left. needs action: Raise the budget of its account, or pay for it.\n\n" +
		"POOL  NAME  PRIORITY  WEIGHT  STATE               CLASS      MODEL         REMAINING  IN FLIGHT  REQUESTS  FAILURES\n" +
		"p     a     1         3       cooling down        throttled  �[2Jgpt�4o�   1m1.25s    2          7         1\n" +
		"p     b     2         1       drained, unhealthy  -          -             -          0          0         0\n" +
		"p     c     2         1       cooling down        failed     (none named)  -          0          0         0\n" +
		"p     d     2         1       cooling down        quota      -             -          0          0         0\n" +
		"p b was drained at 2026-01-02T03:04:05Z by al�ice: why\n" +
		"p b fails health checks. meanwhile: It is checked again at each health_interval. The log has the cause.\n" +
		"p c answers with errors. meanwhile: A request tries it again when its cooldown is over.\n" +
		"p d accepts requests and sends nothing. meanwhile: One request tries it after 1, 2, 4, 8 and then every 16 s. If it stays silent, check the status page of the provider.\n" +
		"p d answers much later than usual. meanwhile: Requests go to other backends first. It ends with a reply in time.\n" +
		"p d is silent since 2026-01-02T03:04:06Z: gpt�-4o\n" +
		"p d is slow since 2026-01-02T03:04:07Z: gpt\n"
	if err != nil || out.String() != want {
		t.Errorf("got %v\n%s\nwant\n%s", err, out.String(), want)
	}
	if err := showBackends(&out, []byte(`{"error": "no"}`)); err == nil {
		t.Error("an answer that is no list of backends is not noticed")
	}
}

// TestWhatNeedsActionComesFirst has more backends than a terminal has lines.
func TestWhatNeedsActionComesFirst(t *testing.T) {
	var backends []Backend
	for i := range 60 {
		backends = append(backends, Backend{Pool: "p", Name: fmt.Sprint("b", i), Priority: 1, Weight: 1, State: Available, Healthy: true})
	}
	backends[57].Cooldowns = []Cooldown{{Scope: BackendScope, Class: "unreachable", Cause: "refused"}}
	backends[58].Cooldowns = []Cooldown{{Scope: BackendScope, Class: "credential", Status: 401, NeedsOperator: true}}
	rows, err := json.Marshal(backends)
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	err = showStatus(&out, rows, []byte(`[
		{"pool": "p", "needs_operator": false, "backend": "", "class": "not_in_touch", "models": [], "meaning": "not connected to other replicas", "next": "Wait."},
		{"pool": "p", "needs_operator": true, "backend": "", "class": "unavailable", "models": ["gpt\u001b", "b", "c", "d"], "meaning": "no backend is available", "next": "Solve the problems."},
		{"pool": "p", "needs_operator": false, "backend": "a", "class": "silent", "models": [], "meaning": "accepts requests and sends nothing", "next": "Wait."}
	]`))
	lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
	want := []string{
		"p gpt�, b, c, 1 more: no backend is available. needs action: Solve the problems.",
		"p b58 refuses its key. needs action: Replace its key with a valid one.",
		"",
	}
	if err != nil || !slices.Equal(lines[:3], want) || !strings.HasPrefix(lines[3], "POOL ") {
		t.Errorf("got %v\n%s\nwant first\n%q", err, out.String(), want)
	}
	if rest := lines[len(lines)-2:]; rest[0] != "p not connected to other replicas. meanwhile: Wait." || !strings.HasPrefix(rest[1], "p b57 refuses connections. meanwhile: ") {
		t.Errorf("the last lines are %q", rest)
	}
	if err := showStatus(&out, rows, []byte(`{"error": "no"}`)); err == nil {
		t.Error("an answer that is no list of problems is not noticed")
	}
}

func TestReplicasAreATable(t *testing.T) {
	var out strings.Builder
	err := showReplicas(&out, []byte(`[
		{"in_touch": true, "queue": 0, "replicas": [
			{"id": "0f", "host": "pod\u001b-1", "since": "2026-01-02T03:04:05.6Z", "heard": "2026-01-02T05:04:05+01:00"},
			{"id": "1f", "host": "pod-2", "since": "2026-01-02T03:04:06Z", "heard": "2026-01-02T04:04:04Z", "configs": [
				{"pool": "a\u001b", "digest": "0123456789ab"}, {"pool": "b", "digest": "ab0123456789", "differs_since": "2026-01-02T03:04:07.8Z"}]}
		]},
		{"in_touch": false, "near": "redis\u001b 2", "queue": 7, "replicas": []}
	]`))
	want := "HOST    ID  SINCE                 HEARD                 CONFIGURATION\n" +
		"pod�-1  0f  2026-01-02T03:04:05Z  2026-01-02T04:04:05Z  -\n" +
		"pod-2   1f  2026-01-02T03:04:06Z  2026-01-02T04:04:04Z  a� 0123456789ab; b ab0123456789, differs since 2026-01-02T03:04:07Z\n" +
		"near: redis� 2\n" +
		"not connected: 7 messages to be sent\n"
	if err != nil || out.String() != want {
		t.Errorf("got %v\n%s\nwant\n%s", err, out.String(), want)
	}
}

func TestReplicasThatAreNotConnectedAreATableToo(t *testing.T) {
	var out strings.Builder
	err := showReplicas(&out, []byte(`[{"in_touch": false, "queue": 7, "replicas": [
		{"id": "0f", "host": "pod-1", "since": "2026-01-02T03:04:05Z", "heard": "2026-01-02T04:04:05Z", "configs": [{"pool": "a", "digest": "0123456789ab"}]}
	]}]`))
	want := "HOST   ID  SINCE                 HEARD                 CONFIGURATION\n" +
		"pod-1  0f  2026-01-02T03:04:05Z  2026-01-02T04:04:05Z  a 0123456789ab\n" +
		"not connected: 7 messages to be sent\n"
	if err != nil || out.String() != want {
		t.Errorf("got %v\n%s\nwant\n%s", err, out.String(), want)
	}
}

// Something else may answer in place of Caddy.
func TestAnAnswerThatIsNoJSONIsAnError(t *testing.T) {
	var out strings.Builder
	for _, answer := range []string{"", "<html>", "\x1b[2J", `{"a":1} {"b":2}`} {
		if err := admin.ShowJSON(&out, []byte(answer)); err == nil || strings.ContainsRune(err.Error(), '\x1b') {
			t.Errorf("the answer %q gives %v", answer, err)
		}
	}
	if out.Len() > 0 {
		t.Errorf("it printed %q", out.String())
	}
	const sent, want = "{\"a\":\"é\u009b2J\u202e\U000e0001\"}\n\n", `{"a":"é\u009b2J\u202e\udb40\udc01"}` + "\n"
	if err := admin.ShowJSON(&out, []byte(sent)); err != nil || out.String() != want {
		t.Errorf("it printed %q (%v)", out.String(), err)
	}
}

func TestAnErrorOfTheAdminAPIHasNoEffectOnATerminal(t *testing.T) {
	for _, body := range []string{`{"error":"\u001b[2Jno"}`, "\x1b[2Jno"} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusNotFound)
			io.WriteString(w, body)
		}))
		defer server.Close()
		_, err := admin.Ask(strings.TrimPrefix(server.URL, "http://"), http.MethodGet, backendsPath, nil)
		if err == nil || strings.ContainsRune(err.Error(), '\x1b') || !strings.HasSuffix(err.Error(), "�[2Jno") {
			t.Errorf("the answer %q gives %q", body, err)
		}
	}
}

// A key that was refused stays a problem until a request shows that it is
// accepted, on the page and for the command, at whichever replica that was.
func TestStatusShowsAProblemThatOutlivesItsCooldown(t *testing.T) {
	due := Backend{Pool: "llm", Name: "ptu", State: Probing, Healthy: true, Due: []Cooldown{
		{Scope: BackendScope, Class: "credential", Status: 401, Cause: "invalid_api_key", NeedsOperator: true},
		{Scope: BackendScope, Class: "timeout"},
	}}
	fine := Backend{Pool: "llm", Name: "ptu", State: Available, Healthy: true}
	a, others := backendsOf(self, replica(t, "aaaa", []Backend{due}))
	rows, err := json.Marshal(others.with([]Backend{fine}, a))
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := showBackends(&out, rows); err != nil || strings.Count(out.String(), "refuses its key") != 1 || strings.Contains(out.String(), "in time") {
		t.Errorf("got %v:\n%s", err, &out)
	}
}
