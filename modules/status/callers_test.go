package status

import (
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
		"limits": [{"kind": "tokens", "window": "day", "limit": 150, "used": 1460, "then": "left\u001bover"}]}]`))
	want := "POOL  CALLER  TIER   LIMIT                          USED         IN FLIGHT  REFUSED  TODAY  MONTH\n" +
		"p     alice   batch  150 tokens/day then left�over  1460 (973%)  0          0        1460   3000\n"
	if err != nil || out.String() != want {
		t.Errorf("got %v\n%s\nwant\n%s", err, out.String(), want)
	}
}
