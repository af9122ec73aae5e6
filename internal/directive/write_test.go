package directive

import "testing"

func TestAWordIsOneArgument(t *testing.T) {
	for _, c := range []struct {
		text, want string
		ok         bool
	}{
		{"gpt-4o", "gpt-4o", true},
		{"a b", `"a b"`, true},
		{"#", `"#"`, true},
		{"<<A", `"<<A"`, true},
		{`a"b`, "`a\"b`", true},
		{"a`b", "\"a`b\"", true},
		{"a\"`b", `""`, false},
		{"", `""`, false},
		{"a\nb", `""`, false},
		{"\xff", `""`, false},
		{`a\b`, `""`, false},
		{"{env.HOME}", `""`, false},
		{"{$HOME}", `""`, false},
	} {
		if got, ok := Word(c.text); got != c.want || ok != c.ok {
			t.Errorf("%q: got %s, %v, want %s, %v", c.text, got, ok, c.want, c.ok)
		}
	}
	if got, want := Line("api_key", "{env.KEY}", "{$KEY}"), `api_key {env.KEY} ""`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestACommentIsOneLineWithoutPlaceholders(t *testing.T) {
	if got, want := Comment("a\n\tb {$HOME}\x00"), "# a b ($HOME)"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}
