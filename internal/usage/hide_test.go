package usage

import (
	"bufio"
	"errors"
	"io"
	"regexp"
	"strings"
	"testing"
	"testing/iotest"
)

const only = "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"choices\":[]," + chatUsage + "}\n\n"

var pieces = regexp.MustCompile(`(?s)<.*?>`)

// In the streams below, what is taken out stands between < and >.
var hidings = map[string]string{
	"nothing":             "",
	"no usage":            chunk("") + chunk("") + "data: [DONE]\n\n",
	"the last but one":    chunk("null") + "<" + only + ">data: [DONE]\n\n",
	"the first":           "<" + only + ">" + chunk("null"),
	"the last":            chunk("null") + "<" + only + ">",
	"without an end":      chunk("null") + "<" + strings.TrimSpace(only) + ">",
	"half of it":          chunk("null") + only[:len(only)/2],
	"a null, no choices":  "data: {\"choices\":[],\"usage\":null}\n\n",
	"usage with a choice": chunk(`{"prompt_tokens":1}`),
	"no list of choices":  "data: {\"usage\":{\"prompt_tokens\":1}}\n\ndata: {\"choices\":null,\"usage\":{}}\n\n",
	"usage elsewhere":     "data: {\"choices\":[],\"x\":{\"usage\":{\"prompt_tokens\":1}}}\n\n",
	"a response's":        "event: response.completed\ndata: {\"response\":{\"choices\":[]," + responseUsage + "}}\n\n",
	"the data in lines":   "<event: message\nid: 7\ndata: {\"choices\":[],\ndata: \"usage\":{\"prompt_tokens\":1}}\n\n>data: [DONE]\n\n",
	"white space":         "<data:{ \"usage\" : { } , \"choices\" : [ ] }\n\n>data: [DONE]\n\n",
	"comments":            ": hello\n<" + only + ">: ping\n\n: ping\ndata: [DONE]\n\n<" + only + ">:\n",
	"a comment inside":    "<data: {\"choices\":[],\n: ping\ndata: \"usage\":{}}\n\n>\n\n",
	"CRLF":                strings.ReplaceAll(chunk("")+"<"+only+">: ping\n\n<"+only+">data: [DONE]\n\n", "\n", "\r\n"),
	"CR":                  strings.ReplaceAll(chunk("")+"<"+only+">: ping\n\n<"+only+">data: [DONE]\n\n", "\n", "\r"),
	"every line end":      "data: a\r\n\r<" + strings.TrimSpace(only) + "\r\r\n>data: b\n\r\n<" + strings.TrimSpace(only) + "\n\r>data: c\r\r\n\r\n\n",
	"too long":            "data: {\"choices\":[],\"x\":\"" + strings.Repeat("x", 2*maxHeld) + "\",\"usage\":{}}\n\n<" + only + ">data: [DONE]\n\n",
	"long ones":           "data: " + strings.Repeat("x", 5*maxHeld) + "\r\n\r\n<" + only + ">: " + strings.Repeat("x", 5*maxHeld) + "\n<" + only + ">",
}

// inLongPieces reads with as much room as reverse_proxy.
func inLongPieces(r io.Reader) io.Reader { return bufio.NewReaderSize(r, 32<<10) }

func TestTheChunkOfTheUsageIsTakenOut(t *testing.T) {
	broken := errors.New("broken")
	for name, marked := range hidings {
		stream := strings.NewReplacer("<", "", ">", "").Replace(marked)
		want := pieces.ReplaceAllString(marked, "")
		for readName, cut := range map[string]func(io.Reader) io.Reader{
			"at once":          func(r io.Reader) io.Reader { return r },
			"with the end":     iotest.DataErrReader,
			"a byte at a time": iotest.OneByteReader,
			"in halves":        iotest.HalfReader,
		} {
			for givenName, give := range map[string]func(io.Reader) io.Reader{
				"in short pieces": func(r io.Reader) io.Reader { return r },
				"in long pieces":  inLongPieces,
				"byte by byte":    iotest.OneByteReader,
			} {
				got, err := io.ReadAll(give(Hide(io.NopCloser(cut(strings.NewReader(stream))))))
				if string(got) != want || err != nil {
					t.Errorf("%s, read %s, given %s: got %.300q, %v, want %.300q", name, readName, givenName, got, err, want)
				}
			}
		}
		if name == "without an end" {
			want = stream // it is not known to be all of the event
		}
		got, err := io.ReadAll(Hide(io.NopCloser(io.MultiReader(strings.NewReader(stream), iotest.ErrReader(broken)))))
		if string(got) != want || !errors.Is(err, broken) {
			t.Errorf("%s, broken: got %.300q, %v, want %.300q", name, got, err, want)
		}
	}
}

// What comes whole is not held back until more comes.
func TestOnlyHalfAnEventIsHeldBack(t *testing.T) {
	for _, c := range []struct{ sent, want string }{
		{chunk(""), chunk("")},
		{chunk("") + only + "data: [DO", chunk("")},
		{": ping\n", ": ping\n"},
		{": pi", ": pi"},
		{"data: " + strings.Repeat("x", 2*maxHeld), "data: " + strings.Repeat("x", 2*maxHeld)},
	} {
		r, w := io.Pipe()
		go io.WriteString(w, c.sent)
		h := Hide(r)
		got := make([]byte, len(c.want))
		if _, err := io.ReadFull(h, got); string(got) != c.want || err != nil {
			t.Errorf("of %.100q the client got %.100q, %v", c.sent, got, err)
		}
		h.Close()
	}
}

func FuzzHide(f *testing.F) {
	for _, marked := range hidings {
		if len(marked) < 4096 {
			f.Add(strings.NewReplacer("<", "", ">", "").Replace(marked))
		}
	}
	f.Fuzz(func(t *testing.T, stream string) {
		whole, err := io.ReadAll(Hide(io.NopCloser(strings.NewReader(stream))))
		cut, _ := io.ReadAll(Hide(io.NopCloser(iotest.OneByteReader(strings.NewReader(stream)))))
		long, _ := io.ReadAll(inLongPieces(Hide(io.NopCloser(iotest.HalfReader(strings.NewReader(stream))))))
		if err != nil || string(cut) != string(whole) || string(long) != string(whole) {
			t.Errorf("%q becomes %q at once, %q byte by byte, and %q in long pieces", stream, whole, cut, long)
		}
		if !strings.Contains(stream, "usage") && string(whole) != stream {
			t.Errorf("%q becomes %q", stream, whole)
		}
		if again, _ := io.ReadAll(Hide(io.NopCloser(strings.NewReader(string(whole))))); string(again) != string(whole) {
			t.Errorf("%q becomes %q, and that %q", stream, whole, again)
		}
	})
}

func BenchmarkHide(b *testing.B) {
	stream := strings.Repeat(chunk("null"), 200) + only
	buf := make([]byte, 32<<10)
	b.SetBytes(int64(len(stream)))
	b.ReportAllocs()
	for b.Loop() {
		h := Hide(io.NopCloser(strings.NewReader(stream)))
		for {
			if _, err := h.Read(buf); err != nil {
				break
			}
		}
	}
}
