package pool

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func TestATextIsCutBetweenTwoCharacters(t *testing.T) {
	for _, c := range []struct {
		text  string
		limit int
		want  string
	}{
		{"", 4, ""},
		{"gpt", 4, "gpt"},
		{"gpt-4", 4, "gpt-"},
		{"aéé", 3, "aé"},
		{"aéé", 4, "aé"},
		{"aéé", 5, "aéé"},
		{"a😀b", 4, "a"},
		{"a😀b", 5, "a😀"},
		{"é", 1, ""},
		{"é", 0, ""},
		{"m\xff", 9, "m\uFFFD"},
		{"m\xff\xfe!", 9, "m\uFFFD!"},
		{"m\xff", 3, "m"},
		{"m\x80\x80\x80\x80\x80\x80", 6, "m\uFFFD"},
		{"\xe2\x82", 9, "\uFFFD"},
	} {
		if got := CutText(c.text, c.limit); got != c.want {
			t.Errorf("%q in %d bytes is %q, want %q", c.text, c.limit, got, c.want)
		}
	}
}

func TestATextThatFitsIsNotCopied(t *testing.T) {
	text := strings.Repeat("é", 100)
	if n := testing.AllocsPerRun(100, func() { text = CutText(text, 256) }); n > 0 {
		t.Errorf("it costs %v allocations", n)
	}
}

func FuzzCutText(f *testing.F) {
	f.Add("aé😀\xff", 4)
	f.Add("\x80\x80\x80\x80\x80", 3)
	f.Fuzz(func(t *testing.T, text string, limit int) {
		limit = max(0, limit)
		got := CutText(text, limit)
		if !utf8.ValidString(got) || len(got) > limit {
			t.Fatalf("%q in %d bytes is %q", text, limit, got)
		}
		if again := CutText(got, limit); again != got {
			t.Fatalf("%q is cut again, to %q", got, again)
		}
		if utf8.ValidString(text) && (!strings.HasPrefix(text, got) || len(text) <= limit && got != text || len(text) > limit && len(got) < limit-3) {
			t.Fatalf("%q in %d bytes is %q", text, limit, got)
		}
	})
}
