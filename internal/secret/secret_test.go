package secret

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestAKeyIsReadFromWhereTheConfigSays(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key")
	write(t, file, "in-a-file\n")
	t.Setenv("OPENAI_LB_TEST_KEY", " in-the-environment\t")
	for raw, want := range map[string]string{
		"plain":                    "plain",
		"{env.OPENAI_LB_TEST_KEY}": "in-the-environment",
		"{file." + file + "}":      "in-a-file",
	} {
		got, err := Resolve(raw)
		if got != want || err != nil {
			t.Errorf("%q gives %q, %v, want %q", raw, got, err, want)
		}
	}
}

func TestAKeyThatCannotBeReadIsRefusedWithoutTheKey(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key")
	write(t, file, " \n")
	t.Setenv("OPENAI_LB_TEST_LINES", "s3cret\ns3cret")
	for raw, want := range map[string]string{
		"":                             "it is empty",
		"{file." + file + "}":          "it is empty",
		"{file./nowhere}":              "open /nowhere: no such file",
		"{env.OPENAI_LB_TEST_UNSET}":   "env.OPENAI_LB_TEST_UNSET",
		"{env.OPENAI_LB_TEST_LINES}":   "must not contain white space or control characters",
		"s3cret s3cret":                "must not contain white space or control characters",
		"{env.OPENAI_LB_TEST_UNSET":    "unpaired brace",
		"s3cret}":                      "unpaired brace",
		"{s3cret}":                     "neither {env.X} nor {file./path}",
		"{http.request.header.s3cret}": "neither {env.X} nor {file./path}",
	} {
		got, err := Resolve(raw)
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "s3cret") {
			t.Errorf("%q gives %q, %v, want an error with %q", raw, got, err, want)
		}
	}
}

func TestAKeyInAFileChangesWithTheFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key")
	write(t, file, "first")
	k, err := NewKey("{file."+file+"}", "Bearer ")
	if err != nil || k.Value() != "Bearer first" || !k.InFile() {
		t.Fatalf("%q, %v", k.Value(), err)
	}
	var digests []string
	k.Changed = func(digest string) { digests = append(digests, digest) }
	first, identity := k.Digest(), k.Identity()
	for _, text := range []string{"first\n", "second", "", "third third"} {
		write(t, file, text)
		if err := k.Read(); (err != nil) != (text == "" || text == "third third") {
			t.Errorf("%q gives %v", text, err)
		}
	}
	if k.Value() != "Bearer second" || k.Identity() != identity || !slices.Equal(digests, []string{k.Digest()}) || k.Digest() == first {
		t.Errorf("now it is %q with the identity %s, and changed to %q", k.Value(), k.Identity(), digests)
	}
}

func TestKeysAreToldApartWithoutHoldingThem(t *testing.T) {
	var identities []string
	for _, raw := range []string{"s3cret-1", "s3cret-2"} {
		k, err := NewKey(raw, "")
		if err != nil || k.InFile() || strings.Contains(k.Identity(), raw) {
			t.Errorf("%s: %v, identity %s", raw, err, k.Identity())
		}
		identities = append(identities, k.Identity())
	}
	if identities[0] == identities[1] {
		t.Error("two keys have one identity")
	}
}

func TestSecretsAreReadAgainOnceASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.DebugLevel)
		r := Reloader{Logger: zap.New(core)}
		reads := 0
		var err error
		r.Add("the secret", func() error { reads++; return err })
		for range 10 {
			r.Refresh()
			time.Sleep(ReloadInterval / 2)
		}
		if reads != 5 || logs.Len() != 0 {
			t.Errorf("%d reads in 5 seconds, and %d lines in the log", reads, logs.Len())
		}
		err = errors.New("no such file")
		for range 61 {
			r.Refresh()
			time.Sleep(ReloadInterval)
		}
		err = nil
		r.Refresh()
		var got []string
		for _, entry := range logs.TakeAll() {
			got = append(got, entry.Level.String()+" "+entry.Message)
		}
		const problem = "error could not reload secret, keeping the previous one"
		if want := []string{problem, problem, "info secret reloaded"}; !slices.Equal(got, want) {
			t.Errorf("logged %q, want %q", got, want)
		}
	})
}
