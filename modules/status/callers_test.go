package status

import (
	"slices"
	"strings"
	"testing"
)

func TestCallersAreATableWithALineForEachLimit(t *testing.T) {
	var out strings.Builder
	err := showCallers(&out, []byte(`[
		{"pool": "p", "name": "al\u001bice", "tier": "batch", "in_flight": 2, "max_requests": 5, "refused": 7, "tokens_today": 120, "tokens_month": 3000,
			"limits": [{"kind": "requests", "window": "minute", "limit": 60, "used": 30}, {"kind": "tokens", "window": "day", "limit": 150, "used": 120}]},
		{"pool": "p", "name": "bob", "tier": "", "in_flight": 0, "max_requests": 0, "refused": 0, "tokens_today": 1, "tokens_month": 2, "limits": []}
	]`))
	want := "POOL  CALLER  TIER   LIMIT               USED       IN FLIGHT  REFUSED  TODAY  MONTH\n" +
		"p     al�ice  batch  60 requests/minute  30 (50%)   2 of 5     7        120    3000\n" +
		"                     150 tokens/day      120 (80%)                             \n" +
		"p     bob     -      -                   -          0          0        1      2\n"
	if err != nil || out.String() != want {
		t.Errorf("got %v\n%s\nwant\n%s", err, out.String(), want)
	}
}

func TestTheTableOfCallersSaysWhichTierALimitLeavesThem(t *testing.T) {
	var out strings.Builder
	err := showCallers(&out, []byte(`[{"pool": "p", "name": "alice", "tier": "batch", "tokens_today": 1460, "tokens_month": 3000,
		"limits": [{"kind": "tokens", "window": "day", "limit": 150, "used": 1460, "then": "left\u001bover"},
			{"kind": "tokens", "window": "day", "model": "o\u001b3", "limit": 50, "used": 5, "then": "other"}]}]`))
	want := "POOL  CALLER  TIER   LIMIT                            USED         IN FLIGHT  REFUSED  TODAY  MONTH\n" +
		"p     alice   batch  150 tokens/day then left�over    1460 (973%)  0          0        1460   3000\n" +
		"                     50 tokens/day of o�3 then other  5 (10%)                                 \n"
	if err != nil || out.String() != want {
		t.Errorf("got %v\n%s\nwant\n%s", err, out.String(), want)
	}
}

func TestLimitsOfModelsAreAddedUpByModel(t *testing.T) {
	all := Caller{Limits: []CallerLimit{{Kind: "tokens", Window: "day", Used: 7, Refused: 1}, {Kind: "tokens", Window: "day", Model: "o3", Used: 5, Refused: 2}}}
	addCaller(&all, &Caller{Limits: []CallerLimit{
		{Kind: "tokens", Window: "day", Model: "o3", Used: 6, Refused: 10}, {Kind: "tokens", Window: "day", Model: "luna", Used: 9},
	}})
	want := []CallerLimit{{Kind: "tokens", Window: "day", Used: 7, Refused: 1}, {Kind: "tokens", Window: "day", Model: "o3", Used: 6, Refused: 12}}
	if !slices.Equal(all.Limits, want) {
		t.Errorf("got %+v, want %+v", all.Limits, want)
	}
}
