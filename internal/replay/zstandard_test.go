package replay

import (
	"bytes"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

func zstandardOf(t testing.TB, text string, options ...zstd.EOption) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := zstd.NewWriter(&b, options...)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(w, text); err != nil || w.Close() != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// letters returns a text that hardly compresses.
func letters(n int) string {
	random := rand.New(rand.NewPCG(1, 2))
	text := make([]byte, n)
	for i := range text {
		text[i] = "abcdefghijklmnopqrstuvwxyz012345"[random.IntN(32)]
	}
	return string(text)
}

func codedBody(t *testing.T, coded []byte, limit int64) *Body {
	t.Helper()
	r := request(t, bytes.NewReader(coded))
	r.Header.Set("Content-Encoding", "ZSTD")
	b := new(Body)
	if err := b.Buffer(r, limit); err != nil {
		t.Fatal(err)
	}
	return b
}

func TestABodyInZstandardIsReadAndSentAsItCame(t *testing.T) {
	for name, input := range map[string]string{"short": "x", "long": letters(300_000), "repetitive": strings.Repeat("ab ", 60_000)} {
		text := `{"model":"a","input":"` + input + `"}`
		coded := zstandardOf(t, text)
		b := codedBody(t, coded, 1<<20)
		received := b.Received()
		if string(received.Bytes) != text || received.Length != int64(len(text)) || !received.Whole || !received.Decoded {
			t.Fatalf("%s: %d bytes of %d were read, length %d", name, len(received.Bytes), len(text), received.Length)
		}
		parsed := openaiapi.ParseJSON(received.Bytes, nil)
		for model, want := range map[string]string{"": string(coded), "a": string(coded), "other": strings.Replace(text, `"a"`, `"other"`, 1)} {
			out := request(t, nil)
			out.Header.Set("Content-Encoding", "ZSTD")
			b.Attach(out, &Options{Changes: openaiapi.Changes{Model: model}, Request: &parsed, Repeatable: true, Progress: noProgress{}})
			again, err := out.GetBody()
			if err != nil {
				t.Fatal(err)
			}
			for _, body := range []io.Reader{out.Body, again} {
				if got, err := io.ReadAll(body); string(got) != want || err != nil || out.ContentLength != int64(len(want)) {
					t.Errorf("%s, model %q: %d bytes are sent, %v, declared as %d, want %d", name, model, len(got), err, out.ContentLength, len(want))
				}
			}
			if wantCoding := model != "other"; (out.Header.Get("Content-Encoding") == "ZSTD") != wantCoding {
				t.Errorf("%s, model %q is sent as %q", name, model, out.Header)
			}
		}
		if b.Release(); b.prefix != nil {
			t.Errorf("%s: the text is still held", name)
		}
	}
}

func TestAZstandardBodyThatCannotBeReadIsSentAsItCame(t *testing.T) {
	text := `{"input":"` + letters(100_000) + `"}`
	whole := zstandardOf(t, text)
	for name, c := range map[string]struct {
		coded []byte
		limit int64
	}{
		"cut off":           {whole[:len(whole)-5], 1 << 20},
		"not zstd":          {[]byte(text), 1 << 20},
		"over the limit":    {whole, 90_000},
		"a bomb":            {zstandardOf(t, strings.Repeat("x", 20<<20)), 32 << 20},
		"a too wide window": {zstandardOf(t, letters(17<<20), zstd.WithWindowSize(16<<20)), 32 << 20},
	} {
		b := codedBody(t, c.coded, max(c.limit, int64(len(c.coded))))
		if c.limit < int64(len(c.coded)) {
			b = codedBody(t, c.coded, c.limit)
		}
		if b.Received().Decoded {
			t.Errorf("%s: it was decoded to %d bytes", name, len(b.Buffered()))
		}
		out := request(t, nil)
		b.Attach(out, &quiet)
		if got, err := io.ReadAll(out.Body); !bytes.Equal(got, c.coded) || err != nil {
			t.Errorf("%s: %d bytes are sent, %v, want %d", name, len(got), err, len(c.coded))
		}
	}
}

// A header costs a client nothing, so what it declares takes no memory.
func TestADeclaredSizeTakesNoMemory(t *testing.T) {
	header, err := (&zstd.Header{HasFCS: true, FrameContentSize: 30 << 20, WindowSize: 8 << 20}).AppendTo(nil)
	if err != nil {
		t.Fatal(err)
	}
	if used := testing.Benchmark(func(b *testing.B) {
		b.ReportAllocs()
		for range b.N {
			if decodeZstandard(header, 32<<20) != nil {
				b.Fatal("it was decoded")
			}
		}
	}).AllocedBytesPerOp(); used > 64<<10 {
		t.Errorf("a header alone takes %d bytes", used)
	}
}

func BenchmarkZstandard(b *testing.B) {
	text := `{"input":"` + strings.Repeat(letters(200_000), 5) + `"}`
	coded := zstandardOf(b, text)
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	for b.Loop() {
		r, _ := http.NewRequest(http.MethodPost, "http://x", bytes.NewReader(coded))
		r.Header.Set("Content-Encoding", "zstd")
		var body Body
		if body.Buffer(r, 32<<20) != nil || !body.Received().Decoded {
			b.Fatal("it cannot be read")
		}
		body.Release()
	}
}
