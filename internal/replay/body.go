// Package replay keeps the body of a request so that it can be sent to one
// backend after the other. A request that gets a 429 must go to the next
// backend with the same body, which its client sends only once.
//
// [Body.Buffer] reads the beginning of the body into memory, up to a limit.
// That part can be sent as often as needed. The rest of a longer body is
// streamed, and can be sent only once: after its first byte has been read, the
// request can go to no other backend (TestWhatIsStreamedIsSentOnce).
//
// A [Body] belongs to the client's request. For every attempt at a backend,
// [Body.Attach] returns an [Upload], which is the body of the request to that
// backend. No two attempts read from the client at the same time, because an
// attempt that has failed abandons its upload first. An Upload also knows
// whether the client kept the backend waiting, so that a slow client is not
// taken for a backend that fails
// (TestAStallIsKnownForAShortTimeAfterTheUpload).
//
// Memory is the scarce thing here. A Content-Length is believed only in
// proportion to the bytes that have arrived
// (TestADeclaredLengthTakesNoMemoryBeforeTheBodyComes). A buffer returns to a
// pool only when nothing can read it any more, because net/http may still write
// a body whose reply has come (TestABufferIsKeptForAsLongAsSomebodyMayReadIt).
// Once no backend can follow, the part in memory is released, although the
// reply may stream for minutes (TestACommittedReplyHoldsNoPrompt).
//
// Bodies that are compressed with Zstandard are decompressed for reading, and
// sent as they came (TestABodyInZstandardIsReadAndSentAsItCame).
package replay

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// errGone reports that a body cannot be read, or not again.
var errGone = errors.New("the request body is no longer available")

// Body is the body of a client's request.
type Body struct {
	// mu guards against net/http, which may still be sending the body of one
	// attempt when the next one begins.
	mu      sync.Mutex
	prefix  []byte
	buffer  *Buffer       // has the prefix
	readers int           // that may still read the prefix
	tail    io.ReadCloser // nil: prefix is all of it
	tailErr error         // why the reading of tail failed
	length  int64         // -1: unknown
	touched atomic.Bool   // tail is being read
	gone    bool          // prefix was released
	begun   bool          // Buffer read some of it, or tried to
}

const (
	// initialBufferSize limits what a Content-Length alone can make us
	// allocate.
	initialBufferSize = 32 << 10
	// trust is how many times more than what has arrived a Content-Length can
	// make us allocate.
	trust = 8
	// spareBuffer is how much of a buffer may stay unused.
	spareBuffer = 4 << 10
	// firstBuffer is for a body of unknown length.
	firstBuffer = 4 << 10
)

// Buffer reads the body of r, and keeps up to limit bytes of it in memory.
func (b *Body) Buffer(r *http.Request, limit int64) error {
	if r.Body == nil || r.Body == http.NoBody {
		return nil
	}
	b.begun = true
	// one more byte shows whether the body is longer than the limit
	most := int(limit) + 1
	size := firstBuffer
	if r.ContentLength >= 0 {
		size = int(min(r.ContentLength+1, int64(most), initialBufferSize))
	}
	buffer := GetBuffer(size)
	for buf := buffer.Bytes; len(buf) < most; {
		n, err := r.Body.Read(buf[len(buf):min(cap(buf), most)])
		buf = buf[:len(buf)+n]
		if errors.Is(err, io.EOF) && len(buf) < most {
			b.hold(buffer, buf)
			b.decode(r.Header, int(limit))
			b.length = int64(len(b.prefix))
			return nil
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if len(buf) == cap(buf) && len(buf) < most {
			buffer, buf = moved(buffer, buf, min(nextSize(len(buf), r.ContentLength), most))
		}
		buffer.Bytes = buf
	}
	b.prefix, b.buffer, b.tail, b.length = buffer.Bytes, buffer, r.Body, r.ContentLength
	return nil
}

// nextSize returns the size of the next buffer after so many bytes of a body
// have arrived. It is the whole length, if it can be trusted. Otherwise, it is
// what makes the buffer after it have the whole length, so that hardly anything
// is copied twice.
func nextSize(arrived int, length int64) int {
	whole, trusted := int(length)+1, trust*arrived
	switch {
	case whole <= arrived: // it is not known, or too short
		return 2 * arrived
	case whole <= trusted:
		return whole
	}
	return min(trusted, (whole+trust-1)/trust)
}

// Hold keeps all of a body that was read already.
func (b *Body) Hold(body []byte) {
	b.prefix, b.length, b.begun = body, int64(len(body)), true
}

// hold keeps all of a body, in a buffer of about its size.
func (b *Body) hold(buffer *Buffer, body []byte) {
	if cap(body)-len(body) > max(spareBuffer, len(body)/4) {
		buffer, body = moved(buffer, body, len(body))
	}
	b.prefix, b.buffer = body, buffer
}

func moved(from *Buffer, buf []byte, size int) (*Buffer, []byte) {
	to := GetBuffer(size)
	buf = append(to.Bytes, buf...)
	from.Put()
	return to, buf
}

// decode replaces a body in zstd by its text, if it can be read. What came is
// kept, and is sent as long as nothing in it must change.
func (b *Body) decode(header http.Header, limit int) {
	if openaiapi.ContentCoding(header) != "zstd" {
		return
	}
	if text := decodeZstandard(b.prefix, limit); text != nil {
		b.buffer.Bytes, text.coded = b.prefix, b.buffer
		b.buffer, b.prefix = text, text.Bytes
	}
}

// coded returns the body as it came, if it was decoded, and else nil.
func (b *Body) coded() *Buffer {
	if b.buffer == nil {
		return nil
	}
	return b.buffer.coded
}

// Buffered returns the part in memory, which is the beginning of the body, and
// decoded if Received says so. It must not be used after Release.
func (b *Body) Buffered() []byte { return b.prefix }

// Received returns the parts of the body that are known before a backend is
// chosen. It must not be used after Release.
func (b *Body) Received() openaiapi.Received {
	return openaiapi.Received{Bytes: b.prefix, Whole: b.Whole(), Length: b.length, Decoded: b.coded() != nil}
}

// Begun reports whether the reading of the body has begun.
func (b *Body) Begun() bool { return b.begun }

// Whole reports whether all of the body was in memory.
func (b *Body) Whole() bool { return b.tail == nil }

// Length returns the length of the body, decoded if it is, or -1 if it is not
// known.
func (b *Body) Length() int64 { return b.length }

// wholeBodySize is the largest size of a body that is passed to net/http in one
// piece, which it then sends together with the headers.
const wholeBodySize = 64 << 10

// Options say how a body is sent to a backend.
type Options struct {
	// Changes are the changes of the body.
	openaiapi.Changes
	// Request is the parsed body, with the place of the model's name.
	Request *openaiapi.Body
	// Repeatable reports whether the backend may execute the request twice.
	Repeatable bool
	// Progress is extended whenever more of a long body is about to be sent.
	Progress interface{ Extend() }
}

// Attach sets the body of an outgoing request, whose header it may change.
func (b *Body) Attach(out *http.Request, o *Options) *Upload {
	out.GetBody, out.TransferEncoding = nil, nil
	if !o.Repeatable {
		hideIdempotenceKeys(out.Header)
	}
	trailers := len(out.Trailer) > 0
	if b.length == 0 && b.tail == nil && !trailers {
		out.Body, out.ContentLength = http.NoBody, 0
		return &Upload{body: b}
	}
	upload := b.upload(o)
	if upload.decoded {
		delete(out.Header, "Content-Encoding")
	}
	out.Body, out.ContentLength = upload.reader(), upload.length
	if trailers {
		out.ContentLength = -1 // HTTP/1.1 carries trailers in chunks only
	}
	if b.tail == nil {
		// lets net/http recover by itself from an idle connection that died
		out.GetBody = func() (io.ReadCloser, error) {
			if again := b.upload(o); again != nil {
				upload.settled.Store(true)
				return again.reader(), nil
			}
			return nil, errGone
		}
	}
	return upload
}

// hideIdempotenceKeys writes the headers in another case for which net/http
// would send a request again after the backend may have executed it. To the
// backend, the case of a header's name means nothing (RFC 9110 section 5.1).
func hideIdempotenceKeys(header http.Header) {
	for _, name := range []string{"Idempotency-Key", "X-Idempotency-Key"} {
		if values, ok := header[name]; ok {
			delete(header, name)
			header[strings.ToLower(name)] = values
		}
	}
}

// upload makes the body ready to be sent from its beginning. It returns nil if
// the beginning is gone.
func (b *Body) upload(o *Options) *Upload {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.gone {
		return nil
	}
	var segments [][]byte
	if o.Changes != (openaiapi.Changes{}) {
		segments = o.Request.With(b.prefix, o.Changes)
	}
	if len(segments) <= 1 {
		return b.asItCame(o)
	}
	upload := &Upload{body: b, length: b.length, decoded: b.coded() != nil}
	if upload.length >= 0 {
		for _, segment := range segments {
			upload.length += int64(len(segment))
		}
		upload.length -= int64(len(b.prefix))
	}
	if b.tail == nil && upload.length <= wholeBodySize {
		upload.joined = GetBuffer(int(upload.length))
		for _, segment := range segments {
			upload.joined.Bytes = append(upload.joined.Bytes, segment...)
		}
		upload.setSmall(upload.joined.Bytes)
		return upload
	}
	b.readers++
	upload.long = &reader{body: b, progress: o.Progress, segments: segments}
	return upload
}

// asItCame makes a body ready in which nothing changes.
func (b *Body) asItCame(o *Options) *Upload {
	upload, text := &Upload{body: b, length: b.length}, b.prefix
	if coded := b.coded(); coded != nil {
		text = coded.Bytes
		upload.length = int64(len(text))
	}
	b.readers++
	if b.tail == nil && upload.length <= wholeBodySize {
		upload.setSmall(text)
	} else {
		upload.long = &reader{body: b, progress: o.Progress, segments: [][]byte{text}}
	}
	return upload
}

// Release frees the part in memory. Only readers that still send it keep it.
func (b *Body) Release() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.prefix, b.gone = nil, true
	b.recycle()
}

// left records that one of the readers will not read the prefix any more.
func (b *Body) left() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.readers--
	b.recycle()
}

// recycle gives the buffer back once it cannot be read any more. A reader of
// which that is not certain, because net/http failed to send all of it, keeps
// it from the pool forever.
func (b *Body) recycle() {
	if b.gone && b.readers == 0 {
		b.buffer.Put()
		b.buffer = nil
	}
}

// readTail reads what was not buffered. It remembers an error: then the client
// did not send the rest, which is no fault of the backend that waits for it.
func (b *Body) readTail(p []byte) (int, error) {
	n, err := b.tail.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.tailErr = err
	}
	return n, err
}

// Failure returns why the client's body did not arrive completely. It is nil if
// it did, or may still do so.
func (b *Body) Failure() error {
	if b.tail == nil {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.tailErr
}

// Gone stands for a body that was read. A handler that comes after the
// balancer must not treat it as empty.
type Gone struct{}

// Read implements io.Reader. It always fails.
func (Gone) Read([]byte) (int, error) { return 0, errGone }

// Close implements io.Closer.
func (Gone) Close() error { return nil }
