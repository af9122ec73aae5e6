package replay

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"testing/iotest"
	"time"
	"unsafe"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

func request(t *testing.T, body io.Reader) *http.Request {
	t.Helper()
	r, err := http.NewRequest(http.MethodPost, "http://x", body)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func buffered(t *testing.T, body io.Reader, limit int64) *Body {
	t.Helper()
	b := new(Body)
	r := request(t, body)
	r.ContentLength = -1 // as in a server
	if err := b.Buffer(r, limit); err != nil {
		t.Fatal(err)
	}
	return b
}

type noProgress struct{}

func (noProgress) Extend() {}

var quiet = Options{Request: new(openaiapi.Body), Progress: noProgress{}}

func TestACommittedReplyHoldsNoPrompt(t *testing.T) {
	b := buffered(t, strings.NewReader(strings.Repeat("x", 100_000)), 200_000)
	out, late := request(t, nil), request(t, nil)
	b.Attach(out, &quiet)
	b.Attach(late, &quiet)
	again, err := out.GetBody()
	if err != nil {
		t.Fatal(err)
	}
	b.Release()
	if text, err := io.ReadAll(again); len(text) != 100_000 || err != nil {
		t.Errorf("a reader that had begun got %d bytes, %v, want all 100,000", len(text), err)
	}
	if again.(*reader).segments != nil || b.prefix != nil {
		t.Error("the bytes are still held")
	}
	if _, err := late.GetBody(); err != errGone {
		t.Errorf("a body that was released could be sent again: %v", err)
	}
}

// net/http sends the headers and such a body in one packet, if it sees the
// type of the reader.
func TestASmallBodyIsAReaderThatNetHTTPKnows(t *testing.T) {
	b := buffered(t, strings.NewReader(`{"model":"a"}`), 1<<20)
	parsed := openaiapi.ParseJSON(b.Buffered(), nil)
	for model, want := range map[string]string{"": `{"model":"a"}`, "bcd": `{"model":"bcd"}`} {
		out := request(t, nil)
		up := b.Attach(out, &Options{Changes: openaiapi.Changes{Model: model}, Request: &parsed, Progress: noProgress{}})
		if got, want := reflect.TypeOf(out.Body), reflect.TypeOf(io.NopCloser(new(bytes.Reader))); got != want {
			t.Fatalf("the body is a %s, want a %s", got, want)
		}
		inner := reflect.ValueOf(out.Body).Field(0).Interface().(*bytes.Reader)
		if got, err := io.ReadAll(out.Body); string(got) != want || err != nil || out.ContentLength != int64(len(want)) {
			t.Errorf("%q, %v with Content-Length %d is sent, want %q", got, err, out.ContentLength, want)
		}
		if up.Sent(); inner.Size() != 0 {
			t.Error("a body that was sent is still held")
		}
		if !up.Abandon() || up.Stalled() {
			t.Error("a body in memory cannot be sent again")
		}
	}
}

func TestWhatIsStreamedIsSentOnce(t *testing.T) {
	text := strings.Repeat("x", 1000)
	b := buffered(t, io.MultiReader(strings.NewReader(text)), 100)
	if b.Whole() || b.Length() >= 0 {
		t.Fatalf("whole: %t, length %d", b.Whole(), b.Length())
	}
	out := request(t, nil)
	if up := b.Attach(out, &quiet); !up.Abandon() || out.GetBody != nil {
		t.Error("a body of which nothing was read cannot be sent by another attempt")
	}
	if n, err := out.Body.Read(make([]byte, 1)); n > 0 || err != errGone {
		t.Errorf("an abandoned attempt reads %d bytes, %v", n, err)
	}
	up := b.Attach(out, &quiet)
	if got, err := io.ReadAll(out.Body); string(got) != text || err != nil {
		t.Errorf("%d bytes are sent, %v, want 1000", len(got), err)
	}
	if up.Abandon() {
		t.Error("a body of which all was read can be sent again")
	}
}

func TestAnUploadThatFailsIsTheClients(t *testing.T) {
	reset := errors.New("connection reset")
	b := buffered(t, io.MultiReader(strings.NewReader(strings.Repeat("x", 200)), iotest.ErrReader(reset)), 100)
	out := request(t, nil)
	b.Attach(out, &quiet)
	if b.Failure() != nil {
		t.Error("it failed before it was read")
	}
	if _, err := io.ReadAll(out.Body); err != reset || b.Failure() != reset {
		t.Errorf("reading failed with %v, and the failure is %v", err, b.Failure())
	}
}

// TestAStallIsKnownForAShortTimeAfterTheUpload because a backend that gave it
// up may have been written to until its end: the kernel takes the last bytes of
// an upload also for a connection that the other side has closed.
func TestAStallIsKnownForAShortTimeAfterTheUpload(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		client, feed := io.Pipe()
		go func() {
			io.WriteString(feed, strings.Repeat("x", 200))
			time.Sleep(4 * time.Second)
			io.WriteString(feed, "x")
			feed.Close()
		}()
		b := buffered(t, client, 100)
		out := request(t, nil)
		up := b.Attach(out, &quiet)
		if up.Ended() {
			t.Error("the upload ended before it began")
		}
		if got, err := io.ReadAll(out.Body); len(got) != 201 || err != nil || !up.Stalled() || !up.Ended() {
			t.Errorf("of %d bytes, %v: the client did not stall", len(got), err)
		}
		if time.Sleep(stall); up.Stalled() {
			t.Error("what the backend does later is blamed on the client")
		}
	})
}

func TestAnAttemptThatNeverBeganHasNoUpload(t *testing.T) {
	var up *Upload
	if up.Sent(); !up.Abandon() || up.Stalled() {
		t.Error("it holds a body")
	}
}

// A buffer may be used again only when nobody reads it any more.
func TestABufferIsKeptForAsLongAsSomebodyMayReadIt(t *testing.T) {
	sent := func(up *Upload, out *http.Request) { io.Copy(io.Discard, out.Body); up.Sent() }
	for name, c := range map[string]struct {
		size int
		use  func(b *Body)
		kept bool
	}{
		"nobody":       {100, func(*Body) {}, false},
		"sent":         {100, func(b *Body) { out := request(t, nil); sent(b.Attach(out, &quiet), out) }, false},
		"being sent":   {100, func(b *Body) { b.Attach(request(t, nil), &quiet) }, true},
		"long, sent":   {100_000, func(b *Body) { out := request(t, nil); sent(b.Attach(out, &quiet), out) }, false},
		"long, closed": {100_000, func(b *Body) { out := request(t, nil); b.Attach(out, &quiet); out.Body.Close() }, false},
		"long, begun": {100_000, func(b *Body) {
			out := request(t, nil)
			b.Attach(out, &quiet)
			io.CopyN(io.Discard, out.Body, 10)
		}, true},
		"the second one is being sent": {100, func(b *Body) {
			out, late := request(t, nil), request(t, nil)
			up := b.Attach(out, &quiet)
			b.Attach(late, &quiet)
			sent(up, out)
		}, true},
		"sent twice over": {100, func(b *Body) {
			out, late := request(t, nil), request(t, nil)
			up := b.Attach(out, &quiet)
			b.Attach(late, &quiet)
			sent(up, out)
			up.Sent()
		}, true},
		"sent anew, and nobody knows which": {100, func(b *Body) {
			out := request(t, nil)
			up := b.Attach(out, &quiet)
			if _, err := out.GetBody(); err != nil {
				t.Error(err)
			}
			sent(up, out)
		}, true},
		"sent, and then anew": {100, func(b *Body) {
			out := request(t, nil)
			sent(b.Attach(out, &quiet), out)
			if _, err := out.GetBody(); err != nil {
				t.Error(err)
			}
		}, true},
	} {
		b := buffered(t, strings.NewReader(strings.Repeat("x", c.size)), 1<<20)
		c.use(b)
		if b.buffer == nil {
			t.Errorf("%s: the buffer is gone before the body was released", name)
		}
		b.Release()
		if kept := b.buffer != nil; kept != c.kept {
			t.Errorf("%s: the buffer is kept: %t, want %t", name, kept, c.kept)
		}
	}
}

// BenchmarkBody measures what keeping a body costs, sending it, and letting it
// go.
func BenchmarkBody(b *testing.B) {
	for _, size := range []int{300, 8000, 200_000, 1 << 20, 10 << 20} {
		prompt := []byte(`{"model":"a","text":"` + strings.Repeat("x", size) + `"}`)
		parsed := openaiapi.ParseJSON(prompt, nil)
		for name, model := range map[string]string{"as it came": "", "another model": "bcd"} {
			b.Run(fmt.Sprintf("%d/%s", size, name), func(b *testing.B) {
				from := bytes.NewReader(prompt)
				in, out := &http.Request{Body: io.NopCloser(from), ContentLength: int64(len(prompt))}, new(http.Request)
				b.ReportAllocs()
				for b.Loop() {
					from.Reset(prompt)
					var body Body
					if err := body.Buffer(in, 32<<20); err != nil {
						b.Fatal(err)
					}
					up := body.Attach(out, &Options{Changes: openaiapi.Changes{Model: model}, Request: &parsed, Repeatable: true, Progress: noProgress{}})
					io.Copy(io.Discard, out.Body)
					up.Sent()
					out.Body.Close()
					body.Release()
				}
			})
		}
	}
}

// trickling is a body of which only some bytes arrive. It records for how many
// the reader has room.
type trickling struct {
	left int
	room func(arrived, room int)
	sent int
}

func (b *trickling) Read(p []byte) (int, error) {
	b.room(b.sent, b.sent+len(p))
	if b.left == 0 {
		return 0, io.ErrUnexpectedEOF
	}
	n := min(len(p), b.left, 4000)
	b.left, b.sent = b.left-n, b.sent+n
	return n, nil
}

func TestADeclaredLengthTakesNoMemoryBeforeTheBodyComes(t *testing.T) {
	for _, arrives := range []int{0, 1, 100, 31_000, 40_000, 300_000, 3_000_000} {
		r := request(t, nil)
		r.ContentLength = 32 << 20
		r.Body = io.NopCloser(&trickling{left: arrives, room: func(arrived, room int) {
			if most := max(initialBufferSize, trust*arrived); room > most*17/16+1 { // the sizes of buffers are rounded up
				t.Fatalf("after %d bytes there is room for %d", arrived, room)
			}
		}})
		if err := new(Body).Buffer(r, 64<<20); err != io.ErrUnexpectedEOF {
			t.Errorf("the error is %v", err)
		}
	}
}

func TestABufferHasTheDeclaredLengthAfterFewCopies(t *testing.T) {
	for _, size := range []int{1, 1000, 31 << 10, 33 << 10, 1 << 20, 10 << 20, 32 << 20, 63 << 20} {
		copies, last := 0, 0
		r := request(t, nil)
		r.ContentLength = int64(size)
		r.Body = io.NopCloser(io.MultiReader(&whole{trickling{left: size, room: func(arrived, room int) {
			if room != last && last > 0 {
				copies += arrived
			}
			last = room
		}}}))
		b := new(Body)
		if err := b.Buffer(r, 64<<20); err != nil {
			t.Fatal(err)
		}
		if copies > size/4+initialBufferSize {
			t.Errorf("of %d bytes, %d are copied", size, copies)
		}
		if spare := cap(b.prefix) - size; len(b.prefix) != size || spare > size/16+1024 {
			t.Errorf("a body of %d bytes has %d, and %d more", size, len(b.prefix), spare)
		}
		b.Release()
	}
}

// whole is a body of which all arrives.
type whole struct{ trickling }

func (b *whole) Read(p []byte) (int, error) {
	if b.left == 0 {
		return 0, io.EOF
	}
	return b.trickling.Read(p)
}

// writes is a writer that a test looks into.
type writes func(p []byte) (int, error)

func (w writes) Write(p []byte) (int, error) { return w(p) }

func TestALongBodyInMemoryIsWrittenWithoutACopy(t *testing.T) {
	text := `{"model":"a","input":"` + strings.Repeat("0123456789", 100_000) + `"}`
	b := buffered(t, strings.NewReader(text), 2<<20)
	parsed := openaiapi.ParseJSON(b.Buffered(), nil)
	for model, want := range map[string]string{"": text, "bcd": strings.Replace(text, `"a"`, `"bcd"`, 1)} {
		out := request(t, nil)
		b.Attach(out, &Options{Changes: openaiapi.Changes{Model: model}, Request: &parsed, Progress: noProgress{}})
		var got bytes.Buffer
		copied := 0
		n, err := out.Body.(io.WriterTo).WriteTo(writes(func(p []byte) (int, error) {
			if len(p) > writeSize {
				t.Errorf("%d bytes are written at a time, want %d at most", len(p), writeSize)
			}
			if !within(p, b.prefix) {
				copied += len(p)
			}
			return got.Write(p)
		}))
		if int(n) != len(want) || got.String() != want || err != nil {
			t.Errorf("%d of %d bytes are written, %v", n, len(want), err)
		}
		if copied > len(`"bcd"`) {
			t.Errorf("%d bytes are written from a copy", copied)
		}
	}
}

// within reports whether a part of some memory begins in it.
func within(part, memory []byte) bool {
	begin := uintptr(unsafe.Pointer(unsafe.SliceData(memory)))
	at := uintptr(unsafe.Pointer(unsafe.SliceData(part)))
	return begin <= at && at < begin+uintptr(len(memory))
}

func TestABodyThatIsStreamedIsWrittenWhole(t *testing.T) {
	for _, limit := range []int64{0, 1, 100, writeSize - 1, writeSize, 200_000} {
		text := strings.Repeat("0123456789", 30_000)
		b := buffered(t, io.MultiReader(strings.NewReader(text)), limit)
		out := request(t, nil)
		up := b.Attach(out, &quiet)
		var got bytes.Buffer
		n, err := out.Body.(io.WriterTo).WriteTo(&got)
		if int(n) != len(text) || got.String() != text || err != nil || up.Abandon() {
			t.Errorf("with %d bytes in memory, %d of %d are written, %v", limit, n, len(text), err)
		}
	}
}

func TestABodyIsWrittenFromWhereAWriteFailed(t *testing.T) {
	text := strings.Repeat("0123456789", 30_000)
	b := buffered(t, strings.NewReader(text), 1<<20)
	out := request(t, nil)
	b.Attach(out, &quiet)
	var got bytes.Buffer
	for err := io.ErrShortWrite; err != nil; {
		_, err = out.Body.(io.WriterTo).WriteTo(writes(func(p []byte) (int, error) {
			n, _ := got.Write(p[:(len(p)+1)/2])
			if n < len(p) {
				return n, io.ErrShortWrite
			}
			return n, nil
		}))
	}
	if got.String() != text {
		t.Errorf("of %d bytes, others were written: %d", len(text), got.Len())
	}
}

func TestABodyThatIsBeingWrittenKeepsItsMemory(t *testing.T) {
	for name, end := range map[string]func(up *Upload, out *http.Request){
		"closed":    func(_ *Upload, out *http.Request) { out.Body.Close() },
		"abandoned": func(up *Upload, _ *http.Request) { up.long.abandon() },
	} {
		b := buffered(t, strings.NewReader(strings.Repeat("x", 300_000)), 1<<20)
		out := request(t, nil)
		up := b.Attach(out, &quiet)
		calls := 0
		_, err := out.Body.(io.WriterTo).WriteTo(writes(func(p []byte) (int, error) {
			calls++
			end(up, out)
			b.Release()
			if b.buffer == nil {
				t.Errorf("%s: the memory is free for others while it is being written", name)
			}
			return len(p), nil
		}))
		if err != errGone || calls != 1 {
			t.Errorf("%s: after %d writes it ends with %v", name, calls, err)
		}
		if b.buffer != nil {
			t.Errorf("%s: the memory is kept after that", name)
		}
	}
}
