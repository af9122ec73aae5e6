package openaiapi

import (
	"bytes"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
)

// decodePieces decodes a body that comes in pieces of the size.
func decodePieces(encoding string, body []byte, size int) string {
	var text strings.Builder
	d := NewDecoder(encoding, func(p []byte) { text.Write(p) })
	for piece := range slices.Chunk(body, size) {
		d.Write(piece)
	}
	d.Close()
	return text.String()
}

func TestABodyIsDecodedHoweverItIsCut(t *testing.T) {
	want := strings.Repeat(`{"usage":{"prompt_tokens":1}} `, 300)
	for encoding, body := range compress(t, []byte(want)) {
		if encoding == "" || encoding == "identity" {
			continue
		}
		for _, size := range []int{1 << 20, 100, 1} {
			for range 2 { // the second one gets the decoder of the first
				if got := decodePieces(strings.ToUpper(encoding), body, size); got != want {
					t.Errorf("%s, %d bytes at a time: got %d bytes", encoding, size, len(got))
				}
				if got := decodePieces(encoding, body[:len(body)/2], size); !strings.HasPrefix(want, got) {
					t.Errorf("%s, %d bytes at a time: half of it is %q", encoding, size, got)
				}
				decodePieces(encoding, []byte(want), size)
			}
		}
	}
	twice := compress(t, []byte("one"))["gzip"]
	if got := decodePieces("gzip", append(twice, twice...), 2); got != "oneone" {
		t.Errorf("two members are %q", got)
	}
	if NewDecoder("br", nil) != nil {
		t.Error("there is a decoder for br")
	}
}

// Every goroutine of a bubble must end.
func TestADecoderLeavesNothingBehind(t *testing.T) {
	for encoding, body := range compress(t, []byte("a text")) {
		if encoding == "" || encoding == "identity" {
			continue
		}
		bubble.Test(t, func(*testing.T) {
			for size := range body {
				d := NewDecoder(encoding, func([]byte) {})
				if size > 0 {
					d.Write(body[:size])
				}
				d.Close()
				d.Close()
				d.Write(body[size:])
			}
		})
	}
}

func TestABombIsNotDecoded(t *testing.T) {
	const size = 8 << 20
	for encoding, bomb := range compress(t, make([]byte, size)) {
		if encoding == "" || encoding == "identity" {
			continue
		}
		got := 0
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		d := NewDecoder(encoding, func(p []byte) { got += len(p) })
		for piece := range slices.Chunk(bomb, 512) {
			d.Write(piece)
		}
		d.Close()
		runtime.ReadMemStats(&after)
		if got > freeGrowth+maxGrowth*len(bomb) {
			t.Errorf("%s: %d bytes were decoded to %d", encoding, len(bomb), got)
		}
		if used := after.TotalAlloc - before.TotalAlloc; used > 8<<20 {
			t.Errorf("%s: decoding took %d bytes of memory", encoding, used)
		}
	}
}

func TestRepetitionsAreNoBomb(t *testing.T) {
	var text bytes.Buffer
	for i := range 20_000 {
		fmt.Fprintf(&text, `{"token":" the","logprob":-0.%d,"bytes":[32,116,104,101],"top_logprobs":[]},`, i*i)
	}
	body := compress(t, text.Bytes())["gzip"]
	if got := decodePieces("gzip", body, 4096); len(got) != text.Len() {
		t.Errorf("of %d bytes in %d, %d were decoded", text.Len(), len(body), len(got))
	}
}
