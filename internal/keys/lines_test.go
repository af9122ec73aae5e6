package keys

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"
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
		synctest.Test(t, func(t *testing.T) {
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
		synctest.Test(t, func(t *testing.T) {
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
