package clientkeys

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/callerkeys"
)

func newStore(t testing.TB, keys []Key, file string) *Store {
	t.Helper()
	s, err := New(Config{Keys: keys, File: file, Label: strings.ToUpper, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func digestOf(key string) string {
	sum := sha256.Sum256([]byte(key))
	return digestPrefix + hex.EncodeToString(sum[:])
}

func bearer(key string) *callerkeys.Presented {
	return &callerkeys.Presented{Header: []callerkeys.Line{{Name: "Authorization", Values: []string{"Bearer " + key}}}}
}

func TestACallerIsKnownByEachOfItsKeys(t *testing.T) {
	s := newStore(t, []Key{{"alice", "one"}, {"alice", digestOf("two")}, {"bob", "three"}}, "")
	if s.InFiles() {
		t.Error("a key of the config comes from a file")
	}
	for key, want := range map[string]string{"one": "alice", "two": "alice", "three": "bob", "four": "", digestOf("one"): "", digestOf("two"): ""} {
		presented := bearer(key)
		who, sent, ok := s.Identify(presented)
		if who.Name != want || who.Label != strings.ToUpper(want) || !sent || ok != (want != "") {
			t.Errorf("the key %q is that of %v (%t, %t), want %q", key, who, sent, ok, want)
		}
		if left := presented.Header; (len(left) == 0) != ok {
			t.Errorf("after the key %q, %v is left", key, left)
		}
	}
	if _, sent, ok := s.Identify(new(callerkeys.Presented)); sent || ok {
		t.Error("a caller without a key is known")
	}
}

func TestAFileIsReadAgainAndKeepsWhatItHadIfItIsWrong(t *testing.T) {
	file := filepath.Join(t.TempDir(), "keys")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("\xef\xbb\xbfalice one\r\n\n # comment\n")
	s := newStore(t, nil, file)
	if !s.InFiles() {
		t.Error("a file with keys is no file")
	}
	known := func(key string) bool {
		_, _, ok := s.Identify(bearer(key))
		return ok
	}
	if !known("one") || known("comment") || known("#") {
		t.Error("the file was not read as it is meant")
	}
	for _, wrong := range []string{"two", "bob two more\n", "bob sha256:00", "bob x\nalice x", strings.Repeat("b", 65) + " two"} {
		write(wrong)
		if err := s.Read(); err == nil || strings.Contains(err.Error(), "two") || !known("one") {
			t.Errorf("%q gives %v", wrong, err)
		}
	}
	write("bob two\n")
	if err := s.Read(); err != nil || known("one") || !known("two") {
		t.Errorf("the new file is not in force: %v", err)
	}
	write("# nobody\n")
	if err := s.Read(); err != nil || known("two") {
		t.Errorf("a file without keys lets somebody in: %v", err)
	}
}

func BenchmarkIdentify(b *testing.B) {
	for _, n := range []int{1, 10_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			var keys []Key
			for i := range n {
				keys = append(keys, Key{fmt.Sprint("caller-", i), fmt.Sprint("key-", i)})
			}
			s := newStore(b, keys, "")
			for b.Loop() {
				if _, _, ok := s.Identify(bearer("key-0")); !ok {
					b.Fatal("key-0 is not known")
				}
			}
		})
	}
}
