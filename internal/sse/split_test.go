package sse

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"
)

// split cuts a stream that comes in pieces of the size, and writes each event
// as one string.
func split(stream string, size int) (events []string) {
	var s Splitter
	each := func(e Event) {
		text := fmt.Sprintf("%s|%s", e.Name, e.Data)
		if e.TooLong {
			text += "…"
		}
		events = append(events, text)
	}
	for piece := range slices.Chunk([]byte(stream), size) {
		s.Split(piece, each)
		clear(piece) // it is not the splitter's to keep
	}
	s.End(each)
	return events
}

func TestEventsOfAStream(t *testing.T) {
	full := strings.Repeat("x", MaxEvent)
	for _, c := range []struct {
		name   string
		stream string
		want   []string
	}{
		{"nothing", "", nil},
		{"blank lines", "\n\r\n\r\r\n\n", nil},
		{"two events", "data: a\n\ndata: b\n\n", []string{"|a", "|b"}},
		{"lines that end in CRLF", "event: e\r\ndata: a\r\n\r\ndata: b\r\n\r\n", []string{"e|a", "|b"}},
		{"lines that end in CR", "event: e\rdata: a\r\rdata: b\r\r", []string{"e|a", "|b"}},
		{"every line end at once", "data: a\r\n\rdata: b\n\r\ndata: c\r\r\ndata: d\n\n", []string{"|a", "|b", "|c", "|d"}},
		{"a CR within CRLF ends no event", "data: a\r\ndata: b\r\n\r\n", []string{"|a\nb"}},
		{"a name after the data", "data: a\nevent: e\n\n", []string{"e|a"}},
		{"the last of two names", "event: d\nevent: e\ndata: a\n\n", []string{"e|a"}},
		{"a name ends with its event", "event: e\ndata: a\n\ndata: b\n\n", []string{"e|a", "|b"}},
		{"a name without data is no event", "event: e\n\ndata: b\n\n", []string{"|b"}},
		{"empty data is no event", "data:\n\ndata\n\nevent: e\ndata: \n\n", nil},
		{"several lines", "data: a\ndata:b\ndata\ndata:  c\n\n", []string{"|a\nb\n\n c"}},
		{"lines that begin with an empty one", "data\ndata: a\n\n", []string{"|\na"}},
		{"comments and other fields", ": hello\nid: 7\nretry: 10\ndata: a\nx\n: data: b\n\n", []string{"|a"}},
		{"fields that only look alike", "data : a\n data: b\nDATA: c\ndatas: d\n\n", nil},
		{"colons in the data", "data: a: b:c\n\n", []string{"|a: b:c"}},
		{"a byte order mark", bom + "data: a\n\n", []string{"|a"}},
		{"a byte order mark before a comment", bom + ": hello\ndata: a\n\n", []string{"|a"}},
		{"a byte order mark later on", "data: a\n\n" + bom + "data: b\n\n", []string{"|a"}},
		{"no empty line at the end", "data: a\n\nevent: e\ndata: b\n", []string{"|a", "e|b"}},
		{"no line's end at the end", "data: a\n\ndata: b", []string{"|a", "|b"}},
		{"a CR at the end", "data: a\n\ndata: b\r", []string{"|a", "|b"}},
		{"as much data as is kept", "data: " + full + "\n\n", []string{"|" + full}},
		{"a byte more", "data: " + full + "y\n\ndata: b\n\n", []string{"|" + full + "…", "|b"}},
		{"far more", "data: " + full + full + full + "\r\rdata: b\r\r", []string{"|" + full + "…", "|b"}},
		{"as much data as is kept, in two lines", "data: a\ndata: " + full[2:] + "\n\n", []string{"|a\n" + full[2:]}},
		{"a byte more, in two lines", "data: a\ndata: " + full[1:] + "\n\n", []string{"|a\n" + full[2:] + "…"}},
		{"a line more", "data: " + full + "\ndata\n\ndata: b\n\n", []string{"|" + full + "…", "|b"}},
		{"a comment longer than what is kept", ":" + full + full + "\ndata: a\n\n", []string{"|a"}},
		{"a name longer than what is kept", "event: " + full + "\ndata: a\n\n", []string{full[:maxName] + "|a"}},
	} {
		for _, size := range []int{1 << 30, 4096, 100, 3, 2, 1} {
			if got := split(c.stream, size); !slices.Equal(got, c.want) {
				t.Errorf("%s, %d bytes at a time: got %.200q, want %.200q", c.name, size, got, c.want)
			}
		}
	}
}

// In the streams below, events lie between < and >, and an unfinished one after
// (.
func TestWhereAnEventLies(t *testing.T) {
	for _, marked := range []string{
		"<data: a\n\n><data: b\n\n>",
		"\n\n<data: a\n\n>\n\n",
		": hello\n<data: a\n: hello\n\n>: hello\n\n: hel",
		": hello\r\n<event: e\r\nid: 7\r\ndata: a\r\n\r\n>: hello\r\n\r\n(data: b\r\n",
		"<data: a\r\r>:\r<data: b\r\n\n>\n\r<data: c\n\r\n>\r",
		"id: 7\n\n<data: a\n\n>data:\n\n(d",
		"<" + bom + ": hello\ndata: a\n\n>(" + bom,
		": " + strings.Repeat("x", 2*maxLine) + "\n<data: " + strings.Repeat("x", 2*maxLine) + "\n\n>(data: " + strings.Repeat("x", 2*maxLine),
	} {
		stream := strings.NewReplacer("<", "", ">", "", "(", "").Replace(marked)
		_, unfinished, _ := strings.Cut(marked, "(")
		for _, size := range []int{1 << 30, 4096, 3, 2, 1} {
			var s Splitter
			begun, before, got := 0, 0, ""
			each := func(Event) {
				begin, end := s.Bounds()
				begin, end = before+begin, before+end
				if stream[end-1] == '\r' && strings.HasPrefix(stream[end:], "\n") { // which is in the next piece
					end++
				}
				got += stream[begun:begin] + "<" + stream[begin:end] + ">"
				begun = end
			}
			for piece := range slices.Chunk([]byte(stream), size) {
				s.Split(piece, each)
				before += len(piece)
			}
			got += stream[begun : before-s.Unfinished()]
			if n := s.Unfinished(); n > 0 {
				got += "(" + stream[before-n:]
			}
			if got != marked || s.Unfinished() != len(unfinished) {
				t.Errorf("%d bytes at a time: got %.300q, want %.300q", size, got, marked)
			}
		}
	}
}

func TestAllOfALongEventsDataIsShown(t *testing.T) {
	full := strings.Repeat("x", MaxEvent)
	stream := bom + "data: a\n\ndata: " + full + "y" + full + "\n\n" + ": " + full + "z\nevent: " + full + "\n\n" +
		"data:" + full + "bcd\r\ndata: e" + full + "\r\n\r\ndata\ndata: " + full + "\n\ndata: " + full + "f"
	want := full + "y" + full + full + "bcd\ne" + full + "\n" + full + full + "f"
	for _, size := range []int{1 << 30, 100 << 10, 4096, 100, 3, 2, 1} {
		var shown []byte
		events := 0
		s := Splitter{Long: func(data []byte) { shown = append(shown, data...) }}
		for piece := range slices.Chunk([]byte(stream), size) {
			s.Split(piece, func(Event) { events++ })
			clear(piece)
		}
		s.End(func(Event) { events++ })
		if string(shown) != want || events != 5 {
			t.Errorf("%d bytes at a time: of %d bytes in %d events it showed %d", size, len(want), events, len(shown))
		}
	}
}

func TestASplitterKeepsOnlySoMuch(t *testing.T) {
	var s Splitter
	each := func(Event) {}
	line := bytes.Repeat([]byte("x"), 1<<10)
	for _, field := range []string{"data: ", "event: ", ": ", "x"} {
		s.Split([]byte(field), each)
		for range 1 << 10 {
			s.Split(line, each)
		}
		s.Split([]byte("\n"), each)
	}
	for range 1 << 10 {
		s.Split([]byte("data: "), each)
		s.Split(line, each)
		s.Split([]byte("\n"), each)
	}
	if held := cap(s.partial.text) + cap(s.joined.text); held > 4*MaxEvent {
		t.Errorf("it holds %d bytes within an event", held)
	}
	s.Split([]byte("\n"), each)
	if held := cap(s.partial.text) + cap(s.joined.text); held > 2*maxSmall || s.partial.large != nil || s.joined.large != nil {
		t.Errorf("it holds %d bytes between events", held)
	}
}

// A buffer for long events is borrowed, and not made for each of them.
func TestALongEventTakesNoMemoryOfItsOwn(t *testing.T) {
	event := []byte("data: {\"x\":\"" + strings.Repeat("x", 60<<10) + "\"}\n\n")
	w := Watcher{Opening: Content}
	watch := func() {
		for piece := range slices.Chunk(event, 32<<10) {
			w.Watch(piece)
		}
	}
	watch()
	if n := testing.AllocsPerRun(100, watch); n >= 1 { // the race detector has pools forget some
		t.Errorf("it allocates %v times", n)
	}
}

const token = "data: {\"id\":\"chatcmpl-9abcdefghijklmnop\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"gpt-4o-2024-11-20\",\"system_fingerprint\":\"fp_1\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n"

const responseToken = "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"sequence_number\":7,\"item_id\":\"msg_1234567890abcdef\",\"output_index\":0,\"content_index\":0,\"delta\":\" word\",\"logprobs\":[],\"obfuscation\":\"abcdefgh\"}\n\n"

func TestEventsWithinAPieceAllocateNothing(t *testing.T) {
	for name, stream := range map[string]string{
		"chat":        token + token,
		"responses":   responseToken + responseToken,
		"CRLF":        strings.ReplaceAll(token, "\n", "\r\n"),
		"a null":      "data: {\"error\":null,\"choices\":[]}\n\n",
		"a long one":  "data: " + strings.Repeat("x", 1<<17) + "\n\n",
		"half events": token[:100],
	} {
		tokens, piece := 0, []byte(stream)
		w := Watcher{Each: func(Event) { tokens++ }, Opening: Content}
		w.Watch(piece) // the half event's buffer is there now
		if name == "half events" {
			piece = append([]byte(token[100:]), piece...)
		}
		if n := testing.AllocsPerRun(100, func() { w.Watch(piece) }); n != 0 || tokens == 0 {
			t.Errorf("%s: %v allocations for %d events", name, n, tokens)
		}
	}
}

func FuzzSplit(f *testing.F) {
	f.Add([]byte("event: e\r\ndata: a\r\rdata\n\n: x\n"), 2)
	f.Add([]byte(bom+"data: a\ndata: b\r\n\r\ndata:c"), 1)
	f.Add([]byte("data\r\n\ndata: \ndata:x\revent:\r\r\n"), 3)
	f.Fuzz(func(t *testing.T, stream []byte, size int) {
		if size < 1 {
			return
		}
		// A plain reading of the same rules, for a stream that is there as a
		// whole.
		text := strings.TrimPrefix(string(stream), bom)
		text = strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(text)
		var want, data []string
		name := ""
		for line := range strings.SplitSeq(text+"\n\n", "\n") {
			field, value, _ := strings.Cut(line, ":")
			value = strings.TrimPrefix(value, " ")
			switch {
			case line == "":
				if joined := strings.Join(data, "\n"); joined != "" {
					want = append(want, name+"|"+joined)
				}
				name, data = "", nil
			case field == "event":
				name = value[:min(len(value), maxName)]
			case field == "data":
				data = append(data, value)
			}
		}
		if got := split(string(stream), size); len(stream) < MaxEvent && !slices.Equal(got, want) {
			t.Errorf("%q, %d bytes at a time: got %q, want %q", stream, size, got, want)
		}
	})
}

func BenchmarkWatch(b *testing.B) {
	for _, bb := range []struct{ name, piece string }{
		{"one token a piece", token},
		{"20 tokens a piece", strings.Repeat(token, 20)},
		{"20 tokens of a response", strings.Repeat(responseToken, 20)},
		{"20 tokens, CRLF", strings.ReplaceAll(strings.Repeat(token, 20), "\n", "\r\n")},
		{"20 tokens, CR", strings.ReplaceAll(strings.Repeat(token, 20), "\n", "\r")},
		{"20 tokens with a null error", strings.Repeat(strings.Replace(token, `"created"`, `"error":null,"created"`, 1), 20)},
		{"32 KiB of line ends", strings.Repeat("\r", 32<<10)},
	} {
		b.Run(bb.name, func(b *testing.B) {
			piece := []byte(bb.piece)
			w := Watcher{Opening: Content}
			b.SetBytes(int64(len(piece)))
			b.ReportAllocs()
			for b.Loop() {
				w.Watch(piece)
			}
			if w.Failure != nil {
				b.Fatal(w.Failure)
			}
		})
	}
	for _, size := range []int{4 << 10, 16 << 10, 60 << 10, 1 << 20} {
		b.Run(fmt.Sprintf("events of %d KiB", size>>10), func(b *testing.B) {
			event := []byte("data: {\"choices\":[{\"delta\":{\"content\":\"" + strings.Repeat("x", size) + "\"}}]}\n\n")
			w := Watcher{Opening: Content}
			b.SetBytes(int64(len(event)))
			b.ReportAllocs()
			for b.Loop() {
				for piece := range slices.Chunk(event, 32<<10) { // as a reply is read
					w.Watch(piece)
				}
			}
		})
	}
	b.Run("20 tokens in halves", func(b *testing.B) {
		piece := []byte(strings.Repeat(token, 20))
		w := Watcher{Opening: Content}
		b.SetBytes(int64(len(piece)))
		b.ReportAllocs()
		for b.Loop() {
			for part := range slices.Chunk(piece, len(token)/2+1) {
				w.Watch(part)
			}
		}
	})
}
