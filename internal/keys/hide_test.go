package keys

import (
	"bytes"
	"fmt"
	"html"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"
	"unicode/utf16"
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

// encodings are those of programs that write errors.
var encodings = map[string]func(string) string{
	"none":             func(s string) string { return s },
	"JSON":             strconv.Quote,
	"PHP's JSON":       strings.NewReplacer("/", `\/`, `"`, `\"`, `\`, `\\`, "ü", `\u00fc`, "🔑", `\ud83d\udd11`).Replace,
	".NET's JSON":      each(func(c rune) string { return fmt.Sprintf(`\u%04X`, c) }),
	"all JSON escapes": escapeAll,
	"HTML":             html.EscapeString,
	"decimal HTML":     each(func(c rune) string { return fmt.Sprintf("&#%d;", c) }),
	"hexadecimal HTML": each(func(c rune) string { return fmt.Sprintf("&#x%X;", c) }),
	"named HTML":       strings.NewReplacer("/", "&sol;", "+", "&plus;", "=", "&equals;", "&", "&amp;", `"`, "&quot;", "<", "&lt;", ">", "&gt;").Replace,
	"a query":          url.QueryEscape,
	"a path":           url.PathEscape,
	"all of a query":   percentAll,
	"Python":           func(s string) string { return strings.ReplaceAll(strconv.Quote(s), "/", `\x2f`) },
	"all of C":         func(s string) string { return strings.ReplaceAll(percentAll(s), "%", `\x`) },
}

func each(encode func(rune) string) func(string) string {
	return func(s string) string {
		var b strings.Builder
		for _, c := range s {
			if c < 0x80 && (c == '-' || c >= '0' && c <= '9' || c >= 'a' && c <= 'z') || c > 0xffff {
				b.WriteRune(c)
			} else {
				b.WriteString(encode(c))
			}
		}
		return b.String()
	}
}

func escapeAll(s string) string {
	var b strings.Builder
	for _, unit := range utf16.Encode([]rune(s)) {
		fmt.Fprintf(&b, `\u%04x`, unit)
	}
	return b.String()
}

func percentAll(s string) string {
	var b strings.Builder
	for i := range len(s) {
		fmt.Fprintf(&b, "%%%02x", s[i])
	}
	return b.String()
}

func TestASecretIsFoundAsItsReaderDecodesIt(t *testing.T) {
	for _, secret := range []string{"sk-a/b+c=d", "sk-a&b<c>\"d\\e'f", "sk-ü/🔑+x"} {
		secrets := Secrets{"another-secret", secret}
		for first, encode := range encodings {
			for second, again := range encodings {
				encoded := again("an echo of " + encode(secret) + ", and more")
				if !secrets.In(encoded) {
					t.Errorf("%s in %s in %s is not found in %s", secret, first, second, encoded)
				}
				for name, reader := range map[string]io.Reader{
					"at once":      strings.NewReader(encoded),
					"byte by byte": iotest.OneByteReader(strings.NewReader(encoded)),
					"halves":       iotest.HalfReader(strings.NewReader(encoded)),
				} {
					got, err := io.ReadAll(secrets.Body(io.NopCloser(reader)))
					if err != nil || len(got) != len(encoded) || secrets.In(string(got)) || !strings.Contains(string(got), "**********") {
						t.Errorf("%s in %s in %s, %s: got %s (%v) of %s", secret, first, second, name, got, err, encoded)
					}
				}
			}
		}
	}
}

// TestASecretIsFoundAsIfEveryPlaceWasTried compares texts made of parts of
// secrets and of encodings with a search that skips nothing.
func TestASecretIsFoundAsIfEveryPlaceWasTried(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for _, secrets := range []Secrets{
		{"sk-a/b+c=d"}, {`sk-\/looks&amp;encoded%2Fitself`}, {"sk-ü/🔑+x", "another-secret"}, {`sk-a&b<c>"d\e'f`},
		{`sk-5%25\u-key`}, {"u005cx2f-key", "0025amp;-key"},
	} {
		parts := []string{"%", `\`, "&", "u", "x", "n", "#", ";", "00", "5c", "25", "26", "2f", "amp", "sol", `"`, "/", "'", " ", "\n", "ü"}
		for _, secret := range secrets {
			parts = append(parts, secret, secret[:3], secret[3:], secret[:6], secret[6:], secret[3:6])
			for _, name := range slices.Sorted(maps.Keys(encodings)) {
				encode := encodings[name]
				parts = append(parts, encode(secret), encode(secret[6:]), encode(encode(secret[:6])))
			}
		}
		starred := 0
		for range 500 {
			var text string
			for range 1 + random.IntN(6) {
				text += parts[random.IntN(len(parts))]
			}
			want := starEverywhere(text, secrets)
			got, err := io.ReadAll(secrets.Body(io.NopCloser(iotest.HalfReader(strings.NewReader(text)))))
			if err != nil || string(got) != want {
				t.Fatalf("%q in %q becomes %q (%v), want %q", secrets, text, got, err, want)
			}
			if want != text {
				starred++
			}
		}
		if starred < 40 {
			t.Errorf("only %d of the texts have one of %q", starred, secrets)
		}
	}
}

func starEverywhere(text string, secrets Secrets) string {
	held := []byte(text)
	for at := range held {
		for _, secret := range secrets {
			n, whole := match(held[at:], secret, maxDepth)
			if !whole {
				n, whole = match(held[at:], secret, 0)
			}
			for i := range n {
				if whole {
					held[at+i] = '*'
				}
			}
		}
	}
	return string(held)
}

func TestASecretThatLooksEncodedIsFound(t *testing.T) {
	const secret = `sk-\/looks&amp;encoded%2Fitself`
	if text := []byte("a " + secret); (Secrets{secret}).Star(text, true) != len(text) || strings.Contains(string(text), "looks") || !(Secrets{secret}).In(secret) {
		t.Errorf("got %s", text)
	}
}

func TestWhatIsNoSecretIsNotStarred(t *testing.T) {
	secrets := Secrets{"sk-a/b+c=d"}
	for _, text := range []string{"", "&", "%", `\`, `\u`, `\u00`, `\ud83d`, `\ud83d\u`, "&#", "&#4", "&amp", "&nothing;", "%2", "sk-a%2", "sk-a&sol", `sk-a\u002`,
		strings.Repeat("&", 1<<16), strings.Repeat("%25", 1<<16), strings.Repeat(`\`, 1<<16), strings.Repeat(`\u0026#`, 1<<14), strings.Repeat("sk-a%2525", 1<<12)} {
		got, err := io.ReadAll(secrets.Body(io.NopCloser(iotest.HalfReader(strings.NewReader(text)))))
		if err != nil || string(got) != text {
			t.Errorf("%.40q becomes %.40q (%v)", text, got, err)
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

// BenchmarkStar reads an event of a stream, as it comes through a WebSocket,
// and a long one that has a text with escapes.
func BenchmarkStar(b *testing.B) {
	const event = `{"type":"response.completed","sequence_number":9,"response":{"id":"resp_0123456789","object":"response","status":"completed","model":"gpt-5","output":[{"type":"message","content":[{"type":"output_text","text":"Hello, how may I assist you today?"}]}],"usage":{"input_tokens":5,"output_tokens":7,"total_tokens":12}}}`
	secrets := Secrets{"sk-backend-0123456789abcdef0123456789abcdef", "sk-alice-0123456789abcdef"}
	for name, content := range map[string]string{
		"an event": event,
		"64 KiB":   strings.Repeat(`A caf\u00e9 and so-called \"hyphens\", at 100 % of the price.\n`, 1<<10),
	} {
		b.Run(name, func(b *testing.B) {
			text := []byte(content)
			b.SetBytes(int64(len(text)))
			for b.Loop() {
				secrets.Star(text, true)
			}
		})
	}
}
