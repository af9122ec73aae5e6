package verdict

import (
	"maps"
	"net/http"
	"testing"
	"time"
)

func TestAClientIsToldToWaitOneTo59Seconds(t *testing.T) {
	for wait, want := range map[time.Duration][2]string{
		0:                          {"1", "1000"},
		43 * time.Millisecond:      {"1", "1000"},
		time.Second:                {"1", "1000"},
		1001 * time.Millisecond:    {"2", "1001"},
		1000001 * time.Microsecond: {"2", "1001"}, // a retry after that is not too early
		58500 * time.Millisecond:   {"59", "58500"},
		time.Hour:                  {"59", "59000"},
	} {
		header := make(http.Header)
		SetHint(header, wait)
		if got := [2]string{header.Get("Retry-After"), header.Get("Retry-After-Ms")}; got != want {
			t.Errorf("%s becomes %q, want %q", wait, got, want)
		}
	}
}

func TestABackendsHintsAreReplaced(t *testing.T) {
	for _, name := range []string{"Retry-After", "retry-after-ms", "x-ms-retry-after-ms"} {
		header := http.Header{"X-Other": {"1"}}
		header.Set(name, "86400")
		RewriteHints(header, 7*time.Second)
		want := http.Header{"X-Other": {"1"}, "Retry-After": {"7"}, "Retry-After-Ms": {"7000"}}
		if !maps.EqualFunc(header, want, func(a, b []string) bool { return a[0] == b[0] }) {
			t.Errorf("%s: got %v, want %v", name, header, want)
		}
	}
	header := http.Header{"X-Other": {"1"}}
	if RewriteHints(header, time.Second); len(header) != 1 {
		t.Errorf("a reply without a hint got %v", header)
	}
}
