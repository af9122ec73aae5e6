package keys

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
)

func newStore(t testing.TB, keys []ClientKey, file string) *Clients {
	t.Helper()
	config := ClientsConfig{Keys: keys, Location: time.UTC, Label: strings.ToUpper, Logger: zap.NewNop()}
	if file != "" {
		config.File = &file
	}
	s, err := NewClients(config)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func digestOf(key string) string {
	sum := sha256.Sum256([]byte(key))
	return digestPrefix + hex.EncodeToString(sum[:])
}

func bearer(key string) *Presented {
	return &Presented{Header: []Line{{Name: "Authorization", Values: []string{"Bearer " + key}}}}
}

// long makes a word a key that is long enough.
func long(word string) string { return "client-key-" + word + "-0123" }

func TestACallerIsKnownByEachOfItsKeys(t *testing.T) {
	s := newStore(t, []ClientKey{{"alice", long("one")}, {"alice", digestOf("two")}, {"bob", long("three")}}, "")
	if s.InFiles() {
		t.Error("a key of the config comes from a file")
	}
	for key, want := range map[string]string{long("one"): "alice", "two": "alice", long("three"): "bob", "four": "", digestOf(long("one")): "", digestOf("two"): ""} {
		presented := bearer(key)
		who, err := s.Identify(t.Context(), presented)
		if who.Name != want || who.Label != strings.ToUpper(want) || (err == nil) != (want != "") || want == "" && err != errUnknownKey {
			t.Errorf("the key %q is that of %v (%v), want %q", key, who, err, want)
		}
		if left := presented.Header; (len(left) == 0) != (err == nil) {
			t.Errorf("after the key %q, %v is left", key, left)
		}
	}
	if _, err := s.Identify(t.Context(), new(Presented)); err != ErrNoKey {
		t.Errorf("a caller without a key gives %v", err)
	}
}

func TestKeysOfDifferentCallersDoNotSayWhoIsAsking(t *testing.T) {
	s := newStore(t, []ClientKey{{"alice", long("one")}, {"alice", long("two")}, {"bob", long("three")}}, "")
	for keys, want := range map[[3]string]error{
		{"one", "two", "one"}:    nil,
		{"one", "four", "two"}:   nil,
		{"four", "five", "one"}:  nil,
		{"one", "three", "one"}:  ErrTwoCallers,
		{"three", "one", "two"}:  ErrTwoCallers,
		{"one", "four", "three"}: ErrTwoCallers,
		{"four", "four", "five"}: errUnknownKey,
	} {
		presented := new(Presented)
		for _, key := range keys {
			presented.Header = append(presented.Header, bearer(long(key)).Header...)
		}
		who, err := s.Identify(t.Context(), presented)
		if err != want || (who != Caller{}) != (err == nil) {
			t.Errorf("%q gives %v, %v, want %v", keys, who, err, want)
		}
	}
}

func TestAFileIsReadAgain(t *testing.T) {
	file := filepath.Join(t.TempDir(), "keys")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	one, two := long("one"), long("two")
	write("\xef\xbb\xbfalice " + one + "\r\n\n # comment\n")
	s := newStore(t, nil, file)
	if !s.InFiles() {
		t.Error("a file with keys is no file")
	}
	known := func(key string) bool {
		_, err := s.Identify(t.Context(), bearer(key))
		return err == nil
	}
	if !known(one) || known("comment") || known("#") {
		t.Error("the file was not read as it is meant")
	}
	write("bob " + two + "\n")
	if err := s.Read(); err != nil || known(one) || !known(two) {
		t.Errorf("the new file is not in force: %v", err)
	}
	write("# nobody\n")
	if err := s.Read(); err != nil || known(two) {
		t.Errorf("a file without keys lets somebody in: %v", err)
	}
}

func TestALineWithoutALineFeedCountsOnceTheFileIsSettled(t *testing.T) {
	file := filepath.Join(t.TempDir(), "keys")
	write := func(text string, age time.Duration) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(file, time.Time{}, time.Now().Add(-age)); err != nil {
			t.Fatal(err)
		}
	}
	one, two := long("one"), long("two")
	bubble.Test(t, func(t *testing.T) {
		write("alice "+one+"\nbob "+two, 0)
		s := newStore(t, nil, file)
		wantKnown := func(key string, want bool) {
			t.Helper()
			if err := s.Read(); err != nil {
				t.Error(err)
			}
			if _, err := s.Identify(t.Context(), bearer(key)); (err == nil) != want {
				t.Errorf("%s gives %v", key, err)
			}
		}
		wantKnown(one, true)
		wantKnown(two, false)
		time.Sleep(time.Second)
		wantKnown(two, true)
		write("alice "+one+"\nbob "+one[:16], 0) // half of a longer key
		time.Sleep(500 * time.Millisecond)
		wantKnown(one[:16], false)
		wantKnown(two, true) // as before, until the file is written
		write("bob "+one, settleTime-time.Millisecond)
		wantKnown(two, true)
		write("bob "+one, time.Second)
		wantKnown(two, false)
		wantKnown(one, true)
		write("bob "+two, -time.Hour) // by a clock that is ahead
		wantKnown(two, false)
		time.Sleep(time.Second)
		wantKnown(two, true)
	})
}

func BenchmarkIdentify(b *testing.B) {
	for _, n := range []int{1, 10_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			var keys []ClientKey
			for i := range n {
				keys = append(keys, ClientKey{fmt.Sprint("caller-", i), long(fmt.Sprint(i))})
			}
			s := newStore(b, keys, "")
			for b.Loop() {
				if _, err := s.Identify(b.Context(), bearer(long("0"))); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func TestAKeyInThePlaceOfItsNameIsNotShown(t *testing.T) {
	err := new(WrittenKeys).Add(ClientKey{Name: "key-of-alice-0123456789", Key: "alice"})
	if err == nil || strings.Contains(err.Error(), "0123456789") {
		t.Errorf("the error is %v", err)
	}
}
