package tools

import (
	"strings"
	"testing"
	"time"
)

func TestColorsDoNotMoveTheColumns(t *testing.T) {
	until := time.Date(2027, 3, 1, 12, 0, 0, 0, time.UTC)
	all := []*Checked{
		{Pool: "p", Backend: "a", Status: CheckOK, Address: "a:443", CertificateUntil: &until, Credential: "accepted",
			Models: []CheckedModel{{"gpt-4o", served}, {"gpt-5", served}, {"\x1b[2J", missing}}, Milliseconds: map[string]int64{"reply": 87},
			Remaining: map[string]int64{"requests": 99, "tokens": 59_990}},
		{Pool: "p", Backend: "longer-name", Status: CheckFailed, Address: "b:80", Credential: refused, Listed: new(7),
			Problems: []CheckedProblem{{CheckWarning, "slow"}, {CheckFailed, "no"}}},
	}
	const want = "" +
		"POOL  BACKEND      STATUS  ADDRESS  CERTIFICATE UNTIL  CREDENTIAL  MODELS               LATENCY  REMAINING\n" +
		"p     a            ok      a:443    2027-03-01         accepted    2 served, 1 missing  87ms     99 requests, 59990 tokens\n" +
		"p     longer-name  failed  b:80     -                  refused     7 listed             -        -\n" +
		"p longer-name: warning: slow\n" +
		"p longer-name: failed: no\n"
	for _, inColor := range []bool{false, true} {
		var out strings.Builder
		if err := showChecks(&out, all, inColor); err != nil {
			t.Fatal(err)
		}
		plain := out.String()
		for _, color := range colors {
			plain = strings.ReplaceAll(plain, color, "")
		}
		plain = strings.ReplaceAll(plain, "\x1b[0m", "")
		if plain != want || inColor != strings.Contains(out.String(), "\x1b[31mfailed\x1b[0m") {
			t.Errorf("in color %v: got\n%s\nwant\n%s", inColor, out.String(), want)
		}
	}
}

func TestAStandInKeepsThePlaceOfAVariable(t *testing.T) {
	t.Setenv("SET", "yes")
	for _, c := range []struct{ field, text, want string }{
		{"api_key", "{env.SET}", "{env.SET}"},
		{"api_key", "literal", "literal"},
		{"api_key", "{env.UNSET}", "stand-in-"},
		{"url", "{env.UNSET}/v1", "https://stand-in-"},
		{"url", "https://{env.UNSET}.openai.azure.com", "https://stand-in-"},
		{"url", "http://a:{env.UNSET}/v1", "http://a:443/v1"},
		{"address", "{env.UNSET}", "stand-in-"},
		{"ranges", "{env.UNSET}", "192.0.2.0/24"},
		{"client_keys_file", "/nonexistent/{env.UNSET}", "/dev/null"},
		{"text", "{http.request.host} {file./nonexistent/file}", "{http.request.host} stand-in-"},
	} {
		got := standInText(c.field, c.text)
		if !strings.HasPrefix(got, c.want) || strings.Contains(got, "UNSET") {
			t.Errorf("%s %s: got %s, want %s", c.field, c.text, got, c.want)
		}
	}
	if a, b := standInText("key", "{env.UNSET_A}"), standInText("key", "{env.UNSET_B}"); a == b {
		t.Error("two variables have one stand-in")
	}
}
