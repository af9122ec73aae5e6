package replybody

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net/http"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/bufpool"
	"github.com/openai-lb/caddy-openai-lb/internal/contentcoding"
	"github.com/openai-lb/caddy-openai-lb/internal/roundtrip"
	"github.com/openai-lb/caddy-openai-lb/internal/sse"
)

// OpenStream reads ahead until it is known what the stream opens with: for the
// first byte as long as for the headers, and after it for a short time for content.
// It cannot wait for content longer: a model that thinks may send none for minutes.
// It returns the error that came in place of content, or why there is none.
func (b *Body) OpenStream() (*sse.Error, error) {
	b.watch = new(sse.Watcher)
	b.Usage.Watch(b.watch)
	b.Lesson = b.Lesson.Join(b.watch)
	b.buffer = bufpool.Get(openingRead)
	buf := b.buffer.Bytes[:openingRead]
	n, err := b.Source.Read(buf)
	inTime := b.Deadline.Stop()
	b.take(readAhead{buf[:n], err})
	if err != nil && !inTime {
		return nil, roundtrip.ErrNoReply
	}
	var timeout *time.Timer
	for {
		switch opening := b.watch.Opening; {
		case opening == sse.Content && (b.heldErr != nil || !b.failing()):
			return nil, nil
		case opening == sse.Failure:
			return b.watch.Failure, nil
		case opening == sse.End, b.heldErr != nil:
			return nil, ErrEmpty
		case len(b.held) >= OpeningLimit:
			return nil, nil
		}
		if timeout == nil {
			timeout = time.NewTimer(openingTimeout)
			defer timeout.Stop()
		}
		if !b.readMore(timeout.C) {
			return nil, nil
		}
	}
}

// ReadAhead reads ahead a reply that is not streamed. It returns why the reply
// broke off, if it did. A reply without a Content-Length is read for a short time
// only, and up to OpeningLimit.
func (b *Body) ReadAhead() error {
	if b.Response.ContentLength >= 0 {
		b.readWhole(int(b.Response.ContentLength))
	} else if !b.readUntil(openingTimeout) {
		return nil
	}
	if b.whole() {
		return nil
	}
	return b.heldErr
}

// whole reports whether all of the body was read ahead.
func (b *Body) whole() bool { return errors.Is(b.heldErr, io.EOF) }

// ErrorIn returns the error that a reply is, if it was read ahead. creates reports
// whether a response object in it was created by this request.
func (b *Body) ErrorIn(creates bool) *sse.Error {
	if !b.whole() {
		return nil
	}
	text, all := b.Text()
	if !all {
		return nil
	}
	return sse.Whole(text, creates)
}

// Text returns what was read ahead, without its compression. all reports whether it is all of that.
func (b *Body) Text() (text []byte, all bool) {
	return contentcoding.Decode(b.held, contentcoding.Of(b.Response.Header), OpeningLimit)
}

// NotJSON reports whether all of a reply was read ahead, and is not JSON although it
// says so. It parses no reply whose tokens were read from beginning to end, which
// are nearly all. A reply that cannot be decompressed is not judged.
func (b *Body) NotJSON() bool {
	if !b.whole() {
		return false
	}
	if b.Usage.Close(); b.Usage.IsObject() {
		return false
	}
	text, all := b.Text()
	return all && !json.Valid(bytes.TrimPrefix(text, []byte("\xef\xbb\xbf")))
}

// Forgive takes in that an error of the stream is not the backend's fault, now or
// later.
func (b *Body) Forgive() { b.watch = nil }

// Waits reports whether nothing was read ahead, so that the client waits for the
// first byte.
func (b *Body) Waits() bool { return len(b.held) == 0 && b.heldErr == nil }

// ForClient is the response that the client gets. It is another one than the
// backend's while a read is pending, which may still change that one.
func (b *Body) ForClient(res *http.Response) *http.Response {
	if b.pending == nil {
		return res
	}
	client := *res
	client.Trailer = maps.Clone(client.Trailer)
	b.late = &lateReply{&client, res}
	return &client
}

// readWhole reads ahead all of a body that is of this length.
func (b *Body) readWhole(length int) {
	b.buffer = bufpool.Get(length + 1) // one more, to meet the end
	buf := b.buffer.Bytes[:length+1]
	n := 0
	var err error
	for err == nil && n < len(buf) {
		var more int
		b.Deadline.Start(b.Idle, ErrIdle)
		more, err = b.Source.Read(buf[n:])
		n += more
	}
	if !b.Deadline.Stop() && !errors.Is(err, io.EOF) {
		err = ErrIdle
	}
	b.take(readAhead{buf[:n:n], err})
}

// readUntil reads ahead until the end of the body or OpeningLimit. It reports
// false if the time was up before.
func (b *Body) readUntil(limit time.Duration) bool {
	timeout := time.NewTimer(limit)
	defer timeout.Stop()
	for b.heldErr == nil && len(b.held) < OpeningLimit {
		if !b.readMore(timeout.C) {
			return false
		}
	}
	return true
}
