package keys

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
)

// wantKnown checks which keys are known.
func (c *Clients) wantKnown(t *testing.T, want map[string]bool) {
	t.Helper()
	for key, known := range want {
		if who, err := c.Identify(t.Context(), bearer(key)); (err == nil) != known {
			t.Errorf("the key %q is that of %q (%v), want it known: %t", key, who.Name, err, known)
		}
	}
}

func TestRemovalsAndValidLinesApplyNextToWrongOnes(t *testing.T) {
	one, two, three, four := long("one"), long("two"), long("three"), long("four")
	for wrong, want := range map[string]string{
		four:                                           "line 2: expected a name, a key",
		"bob " + four + " more":                        "line 2: expected a name, a key",
		"bob " + four + " expires=later":               "line 2: expected a name, a key",
		"bob sha256:00":                                "line 2: expected 64 hexadecimal digits",
		"bob too-short":                                "line 2: a key must have at least 16 characters",
		strings.Repeat("b", 65) + " " + four:           "line 2: expected a name of 1 to 64 bytes",
		"b\x07b-" + four + " " + four:                  "line 2: expected a name of printable characters",
		"alice " + three:                               `line 2: it is also the key of "carol"`,
		"carol " + three + " expires=2001-01-01":       `line 2: "carol" has the same key with another date`,
		"x\nbob " + one + "\n\n#x\ny\nz\nz\nz\nz\nz\n": "line 2: expected a name, a key and at most tier=<name> and a date like expires=2027-01-31; line 6: ",
	} {
		bubble.Test(t, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "keys")
			write(t, file, "alice "+one+"\nbob "+two+"\n")
			s := newStore(t, nil, file)
			s.wantKnown(t, map[string]bool{one: true, two: true})
			write(t, file, "carol "+three+"\n"+wrong+"\ndave "+long("dave")+"\n")
			for range 2 {
				err := s.Read()
				if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), file) {
					t.Errorf("%q gives %v, want %q", wrong, err, want)
				}
				if err != nil && (strings.Contains(err.Error(), "client-key") || strings.Contains(err.Error(), "too-short") || len(err.Error()) > 500) {
					t.Errorf("%q: the error shows a key, or is long: %v", wrong, err)
				}
			}
			s.wantKnown(t, map[string]bool{one: strings.HasPrefix(wrong, "x"), two: false, three: true, four: false, long("dave"): true})
			if who, _ := s.Identify(t.Context(), bearer(three)); who.Name != "carol" {
				t.Errorf("carol's key is that of %q", who.Name)
			}
			write(t, file, "bob "+four+"\n")
			if err := s.Read(); err != nil {
				t.Errorf("after the file was mended: %v", err)
			}
			s.wantKnown(t, map[string]bool{three: false, four: true})
		})
	}
}

func TestAWrongLineIsAnErrorAtLoad(t *testing.T) {
	file := filepath.Join(t.TempDir(), "keys")
	write(t, file, "alice "+long("one")+"\nbob\n")
	if _, err := NewClients(ClientsConfig{File: &file, Label: strings.ToUpper}); err == nil || !strings.Contains(err.Error(), "line 2") {
		t.Errorf("it gives %v", err)
	}
}

func TestAKeyThatCannotBeReadStaysAndTheOthersAreRead(t *testing.T) {
	folder := t.TempDir()
	file, ofAlice, ofBob := filepath.Join(folder, "keys"), filepath.Join(folder, "alice"), filepath.Join(folder, "bob")
	one, two, three, four := long("one"), long("two"), long("three"), long("four")
	write(t, ofAlice, one)
	write(t, ofBob, two)
	write(t, file, "carol "+three+"\n")
	s := newStore(t, []ClientKey{{"alice", "{file." + ofAlice + "}"}, {"bob", "{file." + ofBob + "}"}}, file)
	remove := func(path string) {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	wantError := func(wants ...string) {
		t.Helper()
		err := s.Read()
		for _, want := range wants {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("got %v, want %s", err, want)
			}
		}
	}
	remove(ofAlice)
	write(t, file, "carol "+four+"\n")
	wantError(`client_key "alice"`)
	s.wantKnown(t, map[string]bool{one: true, two: true, three: false, four: true})
	write(t, ofBob, "short")
	wantError(`client_key "alice"`, `client_key "bob": a key must have`)
	s.wantKnown(t, map[string]bool{one: true, two: true, four: true})
	remove(file)
	write(t, ofBob, three)
	wantError("client_keys_file", `client_key "alice"`)
	s.wantKnown(t, map[string]bool{one: true, two: false, three: true, four: true})
	write(t, ofAlice, two)
	write(t, file, "")
	if err := os.Chtimes(file, time.Time{}, time.Now().Add(-time.Hour)); err != nil {
		t.Fatal(err)
	}
	if err := s.Read(); err != nil {
		t.Error(err)
	}
	s.wantKnown(t, map[string]bool{one: false, two: true, three: true, four: false})
}

// A program that writes the file anew empties it first, and may pause anywhere.
func TestAFileThatIsBeingWrittenTakesNoKeyAway(t *testing.T) {
	one, two := long("one"), long("two")
	for _, half := range []string{"", "#", "# all ke", "alice " + one + "\n# and bo", "alice " + one + "\n  ", "alice", "alice " + one[:16], "bo"} {
		bubble.Test(t, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "keys")
			write(t, file, "alice "+one+"\nbob "+two+"\n")
			s := newStore(t, nil, file)
			write(t, file, half)
			if err := s.Read(); err != nil {
				t.Errorf("%q gives %v", half, err)
			}
			s.wantKnown(t, map[string]bool{one: true, two: true, one[:16]: false})
			time.Sleep(time.Second)
			_ = s.Read()
			s.wantKnown(t, map[string]bool{one: strings.Contains(half, one), two: false, one[:16]: half == "alice "+one[:16]})
		})
	}
}

func TestAFileIsReadAgainOnlyIfItHasChanged(t *testing.T) {
	file := filepath.Join(t.TempDir(), "keys")
	one, two, three := long("one"), long("two"), long("six")
	write(t, file, "alice "+one+"\n")
	hour := time.Now().Add(-time.Hour)
	age := func(at time.Time) {
		t.Helper()
		if err := os.Chtimes(file, time.Time{}, at); err != nil {
			t.Fatal(err)
		}
	}
	age(hour)
	s := newStore(t, nil, file)
	read := func() bool {
		t.Helper()
		before := s.latest.read
		if err := s.Read(); err != nil {
			t.Error(err)
		}
		return s.latest.read != before
	}
	if read() {
		t.Error("it was read again without a change")
	}
	write(t, file, "alice "+two+"\n") // of the same length
	if age(hour.Add(time.Second)); !read() {
		t.Error("it was not read although its time has changed")
	}
	s.wantKnown(t, map[string]bool{one: false, two: true})
	write(t, file+".new", "alice "+three+"\n")
	if err := os.Rename(file+".new", file); err != nil {
		t.Fatal(err)
	}
	if age(hour.Add(time.Second)); !read() {
		t.Error("it was not read although it is another file")
	}
	s.wantKnown(t, map[string]bool{two: false, three: true})
	// its clock is no more exact
	age(time.Now())
	for range 2 {
		if !read() {
			t.Error("a file that was changed a moment ago was not read again")
		}
	}
	age(hour)
	read()
	if s.latest.read = time.Now().Add(-2 * longestUnread); !read() {
		t.Error("it was not read for a long time")
	}
}

func TestOnlyChangedLinesAreParsed(t *testing.T) {
	c := &Clients{}
	parse := func(lines ...string) (parsed []foundKey) {
		c.listed = c.parse(lines, false)
		return c.listed
	}
	a, b, d := "alice "+long("one"), "bob "+long("two"), "dave "+long("four")
	parse(a, "# comment", b, "")
	c.listed[0].tier, c.listed[2].tier = "kept", "kept" // which a parse would lose
	got := parse(a, d, "", "# comment", b, "")
	want := []foundKey{
		{line: 1, name: "alice", key: long("one"), tier: "kept"}, {line: 2, name: "dave", key: long("four")}, {}, {}, {line: 5, name: "bob", key: long("two"), tier: "kept"}, {},
	}
	for i := range want {
		if got[i].digest, got[i].id = (blinded{}), ""; got[i] != want[i] {
			t.Errorf("line %d is %+v, want %+v", i+1, got[i], want[i])
		}
	}
	for _, lines := range [][]string{{b}, {}, {b, b, b}, {b, b}, {a, b, b, a}} {
		got := parse(lines...)
		for i, line := range lines {
			if fields := strings.Fields(line); got[i].name != fields[0] || got[i].key != fields[1] || got[i].line != i+1 {
				t.Errorf("line %d of %q is %+v", i+1, lines, got[i])
			}
		}
	}
}

// BenchmarkReadFile reads a file of 200,000 keys: unchanged, and with one
// changed line.
func BenchmarkReadFile(b *testing.B) {
	var lines strings.Builder
	for i := range 200_000 {
		fmt.Fprintf(&lines, "caller-%d %s\n", i, long(fmt.Sprint(i)))
	}
	for name, changes := range map[string]bool{"unchanged": false, "changed": true} {
		b.Run(name, func(b *testing.B) {
			file := filepath.Join(b.TempDir(), "keys")
			put := func(text string) {
				if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
					b.Fatal(err)
				}
			}
			put(lines.String())
			if err := os.Chtimes(file, time.Time{}, time.Now().Add(-time.Hour)); err != nil {
				b.Fatal(err)
			}
			s := newStore(b, nil, file)
			for i := 0; b.Loop(); i++ {
				if changes {
					b.StopTimer()
					put(fmt.Sprintf("another %s\n", long(fmt.Sprint("other", i))) + lines.String())
					b.StartTimer()
				}
				if err := s.Read(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
