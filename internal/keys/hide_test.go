package keys

import (
	"bytes"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/iotest"
)

func TestASecretInABodyIsStarredHoweverItArrives(t *testing.T) {
	const secret, other = "sk-secret-secret", "secret-of-another"
	for body, want := range map[string]string{
		"":                               "",
		"nothing in it":                  "nothing in it",
		secret:                           "****************",
		"a " + secret + " and " + secret: "a **************** and ****************",
		"sk-secret-" + secret + "!":      "sk-secret-****************!",
		"it ends with a part: sk-secret": "it ends with a part: sk-secret",
		other + secret[:5] + other:       "*****************sk-se*****************",
	} {
		for name, reader := range map[string]io.Reader{
			"at once":        strings.NewReader(body),
			"byte by byte":   iotest.OneByteReader(strings.NewReader(body)),
			"halves":         iotest.HalfReader(strings.NewReader(body)),
			"data with EOF":  iotest.DataErrReader(strings.NewReader(body)),
			"in two by five": io.MultiReader(strings.NewReader(body[:min(5, len(body))]), strings.NewReader(body[min(5, len(body)):])),
		} {
			got, err := io.ReadAll(Secrets{secret, other}.Body(io.NopCloser(reader)))
			if err != nil || string(got) != want {
				t.Errorf("%q, %s: got %q (%v), want %q", body, name, got, err, want)
			}
		}
	}
}

func TestABodyWithoutASecretIsNotHeldBack(t *testing.T) {
	r, w := io.Pipe()
	body := Secrets{"sk-secret-secret"}.Body(r)
	defer body.Close()
	for _, piece := range []string{"one", "two", "three"} {
		go io.WriteString(w, piece)
		got := make([]byte, 10)
		if n, err := body.Read(got); err != nil || string(got[:n]) != piece {
			t.Errorf("got %q (%v), want %q", got[:n], err, piece)
		}
	}
}

func FuzzStarredBody(f *testing.F) {
	f.Add([]byte("a sk-secret-secret b"), "sk-secret-secret", 3)
	f.Add([]byte("aaaaaaaaaaaaaaaaaaab"), "aaaaaaaab", 1)
	f.Fuzz(func(t *testing.T, text []byte, secret string, size int) {
		if len(secret) < minLength || size < 1 || strings.Trim(secret, "*") == "" {
			t.Skip()
		}
		body := Secrets{secret}.Body(io.NopCloser(bytes.NewReader(text)))
		var got []byte
		buf := make([]byte, min(size, 1<<10))
		for {
			n, err := body.Read(buf)
			got = append(got, buf[:n]...)
			if err == io.EOF {
				break
			} else if err != nil {
				t.Fatal(err)
			}
		}
		want := text
		for bytes.Contains(want, []byte(secret)) {
			want = bytes.Replace(want, []byte(secret), bytes.Repeat([]byte("*"), len(secret)), 1)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	})
}

func TestASecretInAHeaderIsFoundHoweverItIsEncoded(t *testing.T) {
	var secrets Secrets
	secrets.Add("sk-secret/secret+1")
	for value, dropped := range map[string]bool{
		"https://elsewhere.example/?key=sk-secret/secret+1":             true,
		"https://elsewhere.example/?key=sk-secret%2Fsecret%2B1":         true,
		"https://elsewhere.example/?key=%73k-secret%2fsecret%2b1":       true,
		"https://elsewhere.example/?to=%3Fkey%3Dsk-secret%252Fsecret+1": true,
		"https://elsewhere.example/?key=sk-another%2Fsecret":            false,
		"100 % of nothing": false,
		"https://elsewhere.example/?to=" + strings.Repeat("%25", 3) + strings.Repeat("25", 1<<20): false,
	} {
		header := http.Header{"Location": {value}}
		if secrets.DropFrom(header); (header["Location"] == nil) != dropped {
			t.Errorf("of %q there is left %q", value, header["Location"])
		}
	}
}
