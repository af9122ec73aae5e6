package statuspage

import (
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/modules/status"
)

func TestACurveShowsRates(t *testing.T) {
	pool := poolStatus{Spans: []status.Span{{Seconds: 5, Requests: 15, Failovers: 5, Tokens: 1000}, {Seconds: 10, Requests: 15, Failovers: 0, Tokens: 30}}}
	want := []chart{
		{"Requests", "1.5", "3", "294.9,3.0 300.0,33.0", "294.9,64 294.9,3.0 300.0,33.0 300,64"},
		{"Failovers", "0", "1", "294.9,3.0 300.0,63.0", "294.9,64 294.9,3.0 300.0,63.0 300,64"},
		{"Tokens", "3", "200", "294.9,3.0 300.0,62.1", "294.9,64 294.9,3.0 300.0,62.1 300,64"},
	}
	for i, got := range pool.Charts() {
		if got != want[i] {
			t.Errorf("got %+v, want %+v", got, want[i])
		}
	}
}

func TestAChartHasRoomForFiveMinutes(t *testing.T) {
	points := strings.Fields(newChart("", make([]float64, chartSpans)).Line)
	if len(points) != chartSpans || points[0] != "0.0,63.0" || points[chartSpans-1] != "300.0,63.0" {
		t.Errorf("got %q", points)
	}
}

func TestTheSummaryNamesEachStateThatThereIs(t *testing.T) {
	partly := []modelStatus{{Model: status.Model{Model: "gpt", Backends: []status.ModelBackend{{Backend: "partly", State: status.Available, Healthy: true}}}}}
	for want, backends := range map[string][]status.Backend{
		"1 of 1 backend available.": {{State: status.Available, Healthy: true}},
		"0 of 7 backends available, 1 cooling down, 1 cooling down for some models, 1 probing, 2 drained, 2 failing health checks.": {
			{State: status.CoolingDown, Healthy: true}, {Name: "partly", State: status.CoolingDown, Healthy: true},
			{State: status.Probing, Healthy: true}, {State: status.Drained, Healthy: true},
			{State: status.Drained}, {State: status.Available}, {State: status.CoolingDown},
		},
	} {
		pool := poolStatus{Models: partly}
		for _, b := range backends {
			pool.Backends = append(pool.Backends, backendStatus{Backend: b})
		}
		if got := pool.Summary(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestASharesRoundingHidesNothing(t *testing.T) {
	for ratio, want := range map[float64]string{
		0: "0 %", .0001: "< 0.1 %", .0014: "0.1 %", .0349: "3.5 %", .0994: "9.9 %", .0996: "10 %", .994: "99 %", .9951: "> 99 %", 1: "100 %", 1.382: "138 %",
	} {
		if got := percent(&ratio); got != want {
			t.Errorf("%v is %q, want %q", ratio, got, want)
		}
	}
	if got := percent(nil); got != "–" {
		t.Errorf("no share is %q", got)
	}
}

func TestDurationsHaveTwoDigits(t *testing.T) {
	for s, want := range map[float64]string{
		.005: "< 10 ms", .0123: "12 ms", .0994: "99 ms", .0996: "100 ms", .234: "230 ms", .994: "990 ms", 1: "1.0 s", 2.34: "2.3 s", 9.94: "9.9 s", 9.96: "10 s", 120: "120 s",
	} {
		if got := seconds(&s); got != want {
			t.Errorf("%v is %q, want %q", s, got, want)
		}
	}
}

func TestABackendIsShownAsSilent(t *testing.T) {
	b := backendStatus{Backend: status.Backend{Name: "east", State: status.Silent, Healthy: true, Silences: []status.Silence{
		{Model: "gpt-4o", Slow: false, Since: time.Date(2026, 3, 1, 3, 4, 5, 0, time.UTC)},
	}}}
	var page strings.Builder
	err := templates.ExecuteTemplate(&page, "state", Status{Pools: []poolStatus{{Pool: "p", Backends: []backendStatus{b}}}})
	if text := page.String(); err != nil || !strings.Contains(text, "since 03:04:05") || strings.Count(text, "Silent") != 1 || !strings.Contains(text, "gpt-4o") || strings.Contains(text, "Available") {
		t.Errorf("the page (%v) is %s", err, text)
	}
}

func TestABackendThatIsNotReachedIsNotCalledSilentToo(t *testing.T) {
	since := time.Date(2026, 3, 1, 3, 4, 5, 0, time.UTC)
	b := backendStatus{Backend: status.Backend{Name: "east", State: status.CoolingDown, Healthy: true,
		Silences:  []status.Silence{{Model: "gpt-4o", Since: since}},
		Untried:   []status.Untried{{Model: "mini", Since: since}},
		Cooldowns: []status.Cooldown{{Scope: status.BackendScope, Class: "unreachable", Cause: "refused", UntilReached: true}},
	}}
	var page strings.Builder
	err := templates.ExecuteTemplate(&page, "state", Status{Pools: []poolStatus{{Pool: "p", Backends: []backendStatus{b}}}})
	if text := page.String(); err != nil || strings.Contains(text, "Silent") || strings.Contains(text, "03:04:05: gpt-4o") || strings.Contains(text, "was silent") {
		t.Errorf("the page (%v) is %s", err, text)
	}
}

func TestAnIdleBackendThatWasSilentIsNotCalledSilent(t *testing.T) {
	b := backendStatus{Backend: status.Backend{Name: "spare", State: status.Probing, Healthy: true, Untried: []status.Untried{
		{Model: "gpt-4o", Since: time.Date(2026, 3, 1, 3, 4, 5, 0, time.UTC)},
	}}}
	var page strings.Builder
	err := templates.ExecuteTemplate(&page, "state", Status{Pools: []poolStatus{{Pool: "p", Backends: []backendStatus{b}}}})
	if text := page.String(); err != nil || !strings.Contains(text, "was silent, not tried since 03:04:05: gpt-4o") || strings.Contains(text, "Silent") {
		t.Errorf("the page (%v) is %s", err, text)
	}
	if got := problemsOf(b); len(got) != 0 {
		t.Errorf("the problems are %+v", got)
	}
}

func TestASilenceIsAProblem(t *testing.T) {
	since, later := time.Date(2026, 3, 1, 3, 4, 5, 0, time.UTC), time.Date(2026, 3, 1, 3, 5, 0, 0, time.UTC)
	b := backendStatus{Backend: status.Backend{Name: "east", State: status.Silent, Healthy: true, Silences: []status.Silence{
		{Model: "a", Since: later}, {Model: "b", Since: since}, {Model: "c", Slow: true, Since: later},
	}}}
	got := problemsOf(b)
	if len(got) != 2 || got[0].Class != "silent" || len(got[0].Models) != 2 || !got[0].Since.Equal(since) || got[0].NeedsOperator ||
		got[0].Meaning != "accepts requests and sends nothing" || !strings.HasSuffix(got[0].RunbookURL, "#a-backend-is-silent") ||
		got[1].Class != "slow" || got[1].Meaning != "answers much later than usual" {
		t.Errorf("the problems are %+v", got)
	}
}

func TestThePageSaysWhoEndsAProblem(t *testing.T) {
	for cause, want := range map[string][]string{
		"certificate": {"Needs action", "has a certificate that is not accepted", "Renew its certificate"},
		"dns":         {"Needs action", "has a host name without an address", "Correct the host"},
		"refused":     {"Retried", "refuses connections", "every 60 s"},
		"timeout":     {"Retried", "does not accept connections in time", "every 60 s"},
	} {
		bubble.Test(t, func(t *testing.T) {
			usePool(t, t.Name(), "east", "west")["east"].CoolDown(pool.Refusal{
				Reason: pool.Reason{Class: "unreachable", Cause: cause}, Whole: true, Unreachable: true,
			}, time.Now())
			var page strings.Builder
			s := statusOf(t.Name(), nil)
			if err := templates.ExecuteTemplate(&page, "state", Status{Pools: []poolStatus{s}}); err != nil {
				t.Fatal(err)
			}
			_, text, _ := strings.Cut(page.String(), "<h3>Problems</h3>")
			text, _, _ = strings.Cut(text, "<h3>")
			for _, part := range want {
				if !strings.Contains(text, part) {
					t.Errorf("%s: the page lacks %q: %s", cause, part, text)
				}
			}
			if needs := want[0] == "Needs action"; s.Problems[0].NeedsOperator != needs || s.Backends[0].NeedsOperator() != needs {
				t.Errorf("%s: the problem is %+v", cause, s.Problems[0])
			}
		})
	}
}

func problemsOf(b backendStatus) []status.Problem {
	return status.Pool{Backends: []status.Backend{b.Backend}}.Problems(time.Now(), nil, nil)
}

func TestThePageHasTheGrammarOfOne(t *testing.T) {
	refused := func(n uint64) status.Caller {
		c := status.Caller{Name: "alice"}
		c.LastHour.Refused = map[string]uint64{"requests": n}
		return c
	}
	for _, tt := range []struct {
		callers       []status.Caller
		sentence, all string
	}{
		{[]status.Caller{refused(1)}, "1 caller. In the last hour, 1 request was refused.", "The caller"},
		{[]status.Caller{refused(2)}, "1 caller. In the last hour, 2 requests were refused.", "The caller"},
		{[]status.Caller{refused(0), refused(1)}, "2 callers. In the last hour, 1 request of 1 of them was refused.", "All 2 callers"},
		{[]status.Caller{refused(3), refused(1000)}, "2 callers. In the last hour, 1003 requests of 2 of them were refused.", "All 2 callers"},
	} {
		s := poolStatus{callers: tt.callers, Callers: tt.callers, Found: len(tt.callers)}
		if got := s.CallersSummary(); got != tt.sentence {
			t.Errorf("got %q, want %q", got, tt.sentence)
		}
		if got := s.AllCallers(); got != tt.all {
			t.Errorf("got %q, want %q", got, tt.all)
		}
	}
	one := poolStatus{requestCounts: requestCounts{Served: 1, NotServedRatio: new(float64)}, Problems: make([]status.Problem, 1), Backends: []backendStatus{
		{Backend: status.Backend{Name: "a", State: status.Available, Healthy: true, Cooldowns: make([]status.Cooldown, maxShown+1)}},
	}}
	var page strings.Builder
	if err := templates.ExecuteTemplate(&page, "state", Status{Pools: []poolStatus{one, one}}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"0 of 1 request<", "1 of 1 backend available.", ">1 problem<", "and 1 more cooldown<"} {
		if !strings.Contains(page.String(), want) {
			t.Errorf("the page lacks %q: %s", want, page.String())
		}
	}
}

func TestTheRecentListSaysWhatHappenedAndThatItIsOver(t *testing.T) {
	now := time.Date(2026, 3, 1, 3, 10, 0, 0, time.UTC)
	at := func(minutes int) time.Time { return now.Add(time.Duration(minutes-10) * time.Minute) }
	s := Status{Time: now, Pools: []poolStatus{{Pool: "p", Cooldowns: []status.Episode{
		{Backend: "east", Class: status.Silent, Model: "gpt", Times: 1, Since: at(1), Latest: at(1), Until: at(5)},
		{Backend: "west", Class: status.Silent, Model: "gpt", Times: 1, Since: at(1), Latest: at(1), Until: at(1), Lasts: true},
		{Class: status.Unavailable, Model: "gpt", Times: 1, Since: at(1), Latest: at(1), Until: at(6)},
		{Class: status.NoFirstByte, Times: 1, Since: at(2), Latest: at(2), Until: at(2), Lasts: true},
		{Backend: "north", Class: "unreachable", Cause: "certificate", Detail: "it expired at 2026-02-28T00:00:00Z", Times: 1, Since: at(1), Latest: at(1), Until: at(9), UntilReached: true},
	}}}}
	var page strings.Builder
	if err := templates.ExecuteTemplate(&page, "state", s); err != nil {
		t.Fatal(err)
	}
	_, text, _ := strings.Cut(page.String(), "<h3>Recent cooldowns and silences</h3>")
	text = regexp.MustCompile(`<[^>]*>`).ReplaceAllString(text, "")
	for _, want := range []string{
		"03:01:00 east silent, gpt over at 03:05:00",
		"03:01:00 west silent, gpt until it answers in time",
		"03:01:00 no backend is available, gpt over at 03:06:00",
		"03:02:00 requests wait and get no byte not over",
		"03:01:00 north unreachable: certificate, it expired at 2026-02-28T00:00:00Z until it is reached",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the list lacks %q: %s", want, text)
		}
	}
}
