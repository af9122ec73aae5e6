package ratelimit

import (
	"encoding/json"
	"strings"
	"testing"
)

func TestALimitIsReadAsItIsWritten(t *testing.T) {
	for text, want := range map[string]Limit{
		"600/minute":            {Amount: 600, Unit: Minute},
		"200k/minute":           {Amount: 200_000, Unit: Minute},
		"5M/day":                {Amount: 5_000_000, Unit: Day},
		"2G/month":              {Amount: 2_000_000_000, Unit: Month},
		"1/second":              {Amount: 1, Unit: Second},
		"1000000000000000/hour": {Amount: MaxAmount, Unit: Hour},
		"1000000G/hour":         {Amount: MaxAmount, Unit: Hour},
	} {
		want.Kind = Tokens
		got, err := ParseLimit(Tokens, text)
		if err != nil || got != want {
			t.Errorf("%s: got %+v, %v, want %+v", text, got, err, want)
		}
		again, err := ParseLimit(Tokens, got.String())
		if err != nil || again != want {
			t.Errorf("%s: its text is %s, which is %+v, %v", text, got, again, err)
		}
	}
	if got := (Limit{Kind: Tokens, Amount: 1_500_000, Unit: Day, Then: "nightly"}).String(); got != "1500k/day then nightly" {
		t.Errorf("got %s", got)
	}
}

func TestABadLimitIsAnErrorThatSaysWhatIsAllowed(t *testing.T) {
	for _, text := range []string{
		"", "/", "600", "600/", "/minute", "0/minute", "-1/minute", "+1/minute", "1.5M/day", "1_000/day", "600 /minute",
		"600/min", "600/Minute", "600/year", "1000000000000001/day", "1000001G/day", "99999999999999999999/day", "k/day", "1K/day", "1kk/day", "600/minute/day",
	} {
		l, err := ParseLimit(Requests, text)
		if err == nil {
			t.Errorf("%q is read as %s", text, l)
			continue
		}
		for _, want := range []string{`"` + text + `"`, "requests", "10^15", "k, M or G", "second, minute, hour, day or month"} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%q: the error lacks %q: %v", text, want, err)
			}
		}
	}
}

func TestAnIDNamesAKindAndAUnit(t *testing.T) {
	seen := make(map[string]bool)
	for id := range ID(MaxLimits) {
		if got := (Limit{Kind: id.Kind(), Unit: id.Unit()}).ID(); got != id || !id.Valid() {
			t.Errorf("%d became %d", id, got)
		}
		seen[id.String()] = true
	}
	if len(seen) != MaxLimits || !seen["requests/second"] || !seen["tokens/month"] || ID(MaxLimits).Valid() {
		t.Errorf("the ids are %v", seen)
	}
	text, err := json.Marshal(Limit{Kind: Tokens, Unit: Day}.ID())
	if err != nil || string(text) != `"tokens/day"` {
		t.Errorf("an id is written as %s, %v", text, err)
	}
	var id ID
	if err := json.Unmarshal([]byte(`"tokens/year"`), &id); err == nil {
		t.Errorf("an unknown limit is read as %s", id)
	}
}
