package openaiapi

import (
	"bytes"
	"compress/gzip"
	"compress/zlib"
	"errors"
	"io"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
)

const textLimit = 64 << 10

// compress returns the text in each coding.
func compress(t *testing.T, text []byte) map[string][]byte {
	t.Helper()
	var gzipped, deflated, zstdCoded bytes.Buffer
	// at the least effort: the race detector makes it ten times as much
	g, gzipErr := gzip.NewWriterLevel(&gzipped, gzip.BestSpeed)
	d, zlibErr := zlib.NewWriterLevel(&deflated, zlib.BestSpeed)
	z, zstdErr := zstd.NewWriter(&zstdCoded, zstd.WithEncoderLevel(zstd.SpeedFastest))
	if err := errors.Join(gzipErr, zlibErr, zstdErr); err != nil {
		t.Fatal(err)
	}
	for _, w := range []io.WriteCloser{g, d, z} {
		w.Write(text)
		w.Close()
	}
	return map[string][]byte{"gzip": gzipped.Bytes(), "deflate": deflated.Bytes(), "zstd": zstdCoded.Bytes(), "": text, "identity": text}
}

func TestAStreamIsAcceptedFirst(t *testing.T) {
	for _, c := range []struct{ accepted, want []string }{
		{[]string{"application/json"}, []string{"text/event-stream, application/json"}},
		{nil, []string{"text/event-stream, */*"}},
		{[]string{""}, []string{"text/event-stream, */*"}},
		{[]string{"*/*"}, []string{"text/event-stream, */*"}},
		{[]string{"text/html", "application/xml;q=0.9"}, []string{"text/event-stream, text/html, application/xml;q=0.9"}},
		{[]string{"Text/Event-Stream"}, []string{"Text/Event-Stream"}},
		{[]string{"application/json", "text/event-stream;q=0.5"}, []string{"application/json", "text/event-stream;q=0.5"}},
	} {
		header := http.Header{}
		if c.accepted != nil {
			header["Accept"] = c.accepted
		}
		if AcceptStream(header); !slices.Equal(header["Accept"], c.want) {
			t.Errorf("%q becomes %q, want %q", c.accepted, header["Accept"], c.want)
		}
	}
}

func TestABodyIsReadInEachCoding(t *testing.T) {
	const want = `{"error":{"code":"insufficient_quota"}}`
	coded := compress(t, []byte(want))
	for encoding, raw := range coded {
		if text, all := Decompress(raw, encoding, textLimit); string(text) != want || !all {
			t.Errorf("%s: got %q, all: %t", encoding, text, all)
		}
		if text, all := Decompress(raw, strings.ToUpper(encoding), textLimit); string(text) != want || !all {
			t.Errorf("%s in capitals: got %q, all: %t", encoding, text, all)
		}
		if text, all := Decompress(nil, encoding, textLimit); text != nil || !all {
			t.Errorf("%s: got %q of nothing, all: %t", encoding, text, all)
		}
	}
	for _, encoding := range []string{"gzip", "deflate"} {
		raw := coded[encoding]
		if _, all := Decompress(raw[:len(raw)-2], encoding, textLimit); all {
			t.Errorf("%s: a body that is cut off is taken for all of it", encoding)
		}
	}
	for encoding, raw := range map[string]string{"br": "whatever", "gzip": "not gzip", "deflate": "?"} {
		if text, all := Decompress([]byte(raw), encoding, textLimit); string(text) != raw || all {
			t.Errorf("%s: got %q, all: %t", encoding, text, all)
		}
	}
}

// A small body may decode to one that is a thousand times as long.
func TestABodyIsReadNoFurtherThanTheLimit(t *testing.T) {
	const size = 16 << 20
	coded := compress(t, make([]byte, size))
	for _, encoding := range []string{"gzip", "deflate", "zstd"} {
		bomb := coded[encoding]
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		text, all := Decompress(bomb, encoding, textLimit)
		runtime.ReadMemStats(&after)
		if len(text) > textLimit || all {
			t.Errorf("%s: %d bytes of %d were decoded to %d", encoding, len(bomb), size, len(text))
		}
		if used := after.TotalAlloc - before.TotalAlloc; used > 8<<20 {
			t.Errorf("%s: decoding took %d bytes of memory", encoding, used)
		}
	}
}

func TestABackendIsOfferedOnlyWhatCanBeRead(t *testing.T) {
	for value, want := range map[string]string{
		"gzip":                      "gzip",
		"br, zstd":                  "",
		"br;q=1.0, GZIP;q=0.5 , *":  "GZIP;q=0.5",
		"zstd, deflate, identity":   "deflate, identity",
		"gzip;q=0, identity;q=0.1 ": "gzip;q=0, identity;q=0.1",
	} {
		header := http.Header{"Accept-Encoding": {value}}
		if AcceptReadable(header, false); header.Get("Accept-Encoding") != want {
			t.Errorf("of %q there is left %q, want %q", value, header.Get("Accept-Encoding"), want)
		}
	}
	header := make(http.Header)
	if AcceptReadable(header, false); len(header) > 0 {
		t.Errorf("a request without Accept-Encoding got %v", header)
	}
}

func TestAllLinesOfContentEncodingAreOneList(t *testing.T) {
	for _, c := range []struct {
		lines    []string
		want     string
		readable bool
	}{
		{nil, "", true},
		{[]string{""}, "", true},
		{[]string{" Identity ,,identity"}, "", true},
		{[]string{"identity", "GZIP"}, "gzip", false},
		{[]string{"gzip , br"}, "gzip,br", false},
		{[]string{"utf-8", "none"}, "utf-8,none", true},
		{[]string{"utf-8", "zstd"}, "utf-8,zstd", false},
	} {
		header := http.Header{"Content-Encoding": c.lines}
		if got := ContentCoding(header); got != c.want || IsCompressed(header) != (c.want != "") || readAsIs(header) != c.readable {
			t.Errorf("%q is %q, readable: %t", c.lines, got, readAsIs(header))
		}
	}
	if n := testing.AllocsPerRun(100, func() { readAsIs(http.Header{}) }); n > 0 {
		t.Errorf("no coding takes %v allocations", n)
	}
}
