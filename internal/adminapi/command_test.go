package adminapi

import (
	"strings"
	"testing"
)

func TestATableShowsWhatClientsMadeUpWithoutEffectOnATerminal(t *testing.T) {
	var out strings.Builder
	err := show(&out, strings.NewReader(`[
		{"pool": "p", "name": "a", "priority": 1, "weight": 3, "state": "benched", "class": "throttled", "model": "\u001b[2Jgpt\n4o\u202e",
			"remaining_ms": 61250, "in_flight": 2, "requests": 7, "failures": 1, "healthy": true},
		{"pool": "p", "name": "b", "priority": 2, "weight": 1, "state": "available", "healthy": false}
	]`))
	want := "POOL  NAME  PRIORITY  WEIGHT  STATE                 CLASS      MODEL        REMAINING  IN FLIGHT  REQUESTS  FAILURES\n" +
		"p     a     1         3       benched               throttled  �[2Jgpt�4o�  1m1.25s    2          7         1\n" +
		"p     b     2         1       available, unhealthy  -          -            -          0          0         0\n"
	if err != nil || out.String() != want {
		t.Errorf("got %v\n%s\nwant\n%s", err, out.String(), want)
	}
	if err := show(&out, strings.NewReader(`{"error": "no"}`)); err == nil {
		t.Error("an answer that is no list of backends is not noticed")
	}
}

func TestANameIsOneSegmentOfAPath(t *testing.T) {
	for name, want := range map[string]string{"ptu": "ptu", "team/a b": "team%2Fa%20b", ".": "%2E", "..": "%2E%2E", "a.b": "a.b", "100%": "100%25"} {
		if got := escape(name); got != want {
			t.Errorf("%s became %s, want %s", name, got, want)
		}
	}
}
