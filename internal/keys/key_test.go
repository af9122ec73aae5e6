package keys

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestAKeyInAFileChangesWithTheFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key")
	write(t, file, "first")
	k, err := newKey("{file."+file+"}", Bearer)
	if err != nil || *k.current.Load() != Bearer("first") || !k.InFile() {
		t.Fatalf("%v, %v", k.current.Load(), err)
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
	if *k.current.Load() != Bearer("second") || k.Identity() != identity || !slices.Equal(digests, []string{k.Digest()}) || k.Digest() == first {
		t.Errorf("now it is %v with the identity %s, and changed to %q", k.current.Load(), k.Identity(), digests)
	}
}

func TestKeysAreToldApartWithoutHoldingThem(t *testing.T) {
	var identities []string
	for _, raw := range []string{"s3cret-1", "s3cret-2"} {
		k, err := newKey(raw, apiKey)
		if err != nil || k.InFile() || strings.Contains(k.Identity(), raw) {
			t.Errorf("%s: %v, identity %s", raw, err, k.Identity())
		}
		identities = append(identities, k.Identity())
	}
	if identities[0] == identities[1] {
		t.Error("two keys have one identity")
	}
}
