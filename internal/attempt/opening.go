package attempt

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/replay"
	"github.com/openai-lb/caddy-openai-lb/internal/sse"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// open holds a reply to inference back until it is certain that the request was
// served. A stream that has an error instead of content is classified as that
// error. An empty stream, or a reply that is not JSON, is a failure.
//
// The reply to a request that must not be executed twice is held back until it
// is complete. If it is cut after the client has the status, the client can no
// longer be told not to retry.
//
// The reply to a GET is passed on at once, because a stored response that
// failed long ago is not a failure.
func (s *Sender) open(r *Reply) {
	traits, res := &r.sent.Traits, r.Response
	inferred := traits.Kind.Infers() && r.Status == http.StatusOK
	once := !traits.Kind.Repeatable() && r.Status < 300
	kind := r.sent.kind
	if r.body != nil && r.sent.IDs != nil {
		r.body.ids = r.sent.IDs(res)
	}
	counts := inferred && (r.sent.CountsTokens || kind == openaiapi.TypeJSON) || r.sent.CountsAll && r.Status < 300
	if counts && r.body != nil { // the reader also shows whether it is JSON
		r.body.tokens = r.body.tokenReader.Begin(res.Header)
		if r.sent.CountsContent {
			r.body.tokens.CountContent()
		}
		if r.sent.FindsID {
			r.body.tokens.FindID()
		}
	}
	switch {
	case r.Status == http.StatusSwitchingProtocols && r.sent.Socket != nil:
		s.openSocket(r)
	case r.isNoAnswer():
		r.breakOff(ErrNoAnswer)
	case kind == openaiapi.TypeEventStream && inferred && !openaiapi.IsCompressed(res.Header):
		s.judgeOpening(r, r.openStream)
	case kind == openaiapi.TypeJSON && (inferred || once) && res.ContentLength <= openingLimit:
		s.judgeOpening(r, r.openJSON)
	case kind != openaiapi.TypeJSON && kind != openaiapi.TypeEventStream && r.isUntyped():
		s.judgeOpening(r, r.openUntyped)
	}
	if r.body != nil {
		r.Response = r.body.forClient(r.Response)
	}
}

func (r *Reply) openStream() (*sse.Error, error) {
	if r.body == nil {
		return nil, ErrEmpty
	}
	return r.body.openStream()
}

func (r *Reply) openJSON() (*sse.Error, error) {
	traits := &r.sent.Traits
	mustBeJSON := traits.Kind.Infers() && !traits.Stream
	if r.body == nil {
		if mustBeJSON {
			return nil, ErrNotJSON
		}
		return nil, nil
	}
	if err := r.body.readJSON(); err != nil || !traits.Kind.Infers() {
		return nil, err
	}
	return r.judgeJSON()
}

// judgeOpening classifies the beginning of a reply.
func (s *Sender) judgeOpening(r *Reply, open func() (*sse.Error, error)) {
	switch failure, err := open(); {
	case failure != nil:
		r.becomeError(failure)
	case errors.Is(err, ErrNoReply):
		r.breakOff(err)
		r.Class = verdict.Timeout
	case errors.Is(err, ErrSilent):
		r.breakOff(err)
		r.Class = verdict.Silent
	case err != nil:
		r.breakOff(err)
	}
}

// breakOff makes the reply a failure that no client may see.
func (r *Reply) breakOff(reason error) {
	r.Class, r.Err, r.cut = verdict.Failed, reason, true
}

// openStream reads ahead until the stream's first content or error. It waits
// for the first byte as long as for the headers, and after that for
// openingTimeout. It cannot wait longer for content, because a model that
// reasons may send none for minutes. It returns the error event that came
// instead of content, or why there is no content. Both are nil if the stream
// may be passed on.
func (b *body) openStream() (*sse.Error, error) {
	b.watch = new(sse.Watcher)
	b.tokens.Watch(b.watch)
	if b.ids != nil {
		b.ids.Join(b.watch)
		b.ids = nil
	}
	b.buffer = replay.GetBuffer(firstRead)
	buf := b.buffer.Bytes[:firstRead]
	n, err := b.read(buf)
	inTime := b.deadline.stop()
	b.take(readAhead{buf[:n], err})
	if !inTime {
		return nil, b.deadline.err()
	}
	b.heard(n, err)
	var timeout *time.Timer
	for {
		if b.watch.OpensLong && b.longFailure() != nil {
			return b.watch.Failure, nil
		}
		switch opening := b.watch.Opening; {
		case opening == sse.Content && (b.bufferedErr != nil || !b.failing()):
			return nil, nil
		case opening == sse.Failure:
			return b.watch.Failure, nil
		case opening == sse.End, b.bufferedErr != nil:
			return nil, ErrEmpty
		case len(b.buffered) >= openingLimit && !b.mayHoldMore():
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

// longFailure returns the error that the stream begins with, if the error is
// too long for the stream's watcher to keep.
func (b *body) longFailure() *sse.Error {
	b.watch.OpensLong = false // it is read once
	if failure := sse.LongFailure(b.buffered); failure != nil {
		b.watch.Opening, b.watch.Failure = sse.Failure, failure
	}
	return b.watch.Failure
}

// readJSON reads ahead a reply that is not a stream. It returns an error if the
// reply is cut. A reply without a Content-Length is read only up to
// openingLimit, and only for openingTimeout after its first byte.
func (b *body) readJSON() error {
	if b.response.ContentLength >= 0 {
		b.readWhole(int(b.response.ContentLength))
	} else if !b.readUntil(openingTimeout) {
		return nil
	}
	if b.whole() {
		return nil
	}
	return b.bufferedErr
}

// whole reports whether all of the body was read ahead.
func (b *body) whole() bool { return errors.Is(b.bufferedErr, io.EOF) }

// errorIn returns the error that the reply contains, if all of it was read
// ahead. creates reports whether a response object in it was created by this
// request.
func (b *body) errorIn(creates bool) *sse.Error {
	if !b.whole() {
		return nil
	}
	text, all := b.text()
	if !all {
		return nil
	}
	return sse.Whole(text, creates)
}

// text returns the held data, decompressed. all reports whether the text is
// complete.
func (b *body) text() (text []byte, all bool) {
	return openaiapi.Decompress(b.buffered, openaiapi.ContentCoding(b.response.Header), openingLimit)
}

// notJSON reports whether all of a reply was read ahead and is not valid JSON.
// It need not parse a reply whose tokens were read from beginning to end, which
// is the usual case. It reports false for a reply that cannot be decompressed.
func (b *body) notJSON() bool {
	if !b.whole() {
		return false
	}
	if b.tokens.Close(); b.tokens.IsObject() {
		return false
	}
	text, all := b.text()
	return all && !json.Valid(bytes.TrimPrefix(text, []byte("\xef\xbb\xbf")))
}

// heard records that the first byte has arrived, or the end of an empty body.
func (b *body) heard(n int, err error) {
	if n > 0 || errors.Is(err, io.EOF) {
		b.deadline.heard()
	}
}

// forgive stops the watch for errors in the stream, because they are not the
// backend's fault.
func (b *body) forgive() { b.watch = nil }

// forClient returns the response for the client. While a read is pending, it is
// a copy, because the read may still change the original.
func (b *body) forClient(res *http.Response) *http.Response {
	if b.pending == nil {
		return res
	}
	b.late = b.copied
	return b.late
}

// readWhole reads ahead all of a body with this length.
func (b *body) readWhole(length int) {
	b.buffer = replay.GetBuffer(length + 1) // one more, to meet the end
	buf := b.buffer.Bytes[:length+1]
	n := 0
	var err error
	for err == nil && n < len(buf) {
		var more int
		b.deadline.start(b.idle, ErrIdle)
		more, err = b.read(buf[n:])
		n += more
		b.heard(more, err)
	}
	if !b.deadline.stop() && !errors.Is(err, io.EOF) {
		err = b.deadline.err()
	}
	b.take(readAhead{buf[:n:n], err})
}

// readFirst reads ahead once, and waits for the first byte.
func (b *body) readFirst() {
	b.deadline.start(b.idle, ErrIdle)
	buf := b.nextRead()
	n, err := b.read(buf)
	b.heard(n, err)
	if !b.deadline.stop() && !errors.Is(err, io.EOF) {
		err = b.deadline.err()
	}
	b.take(readAhead{buf[:n], err})
}

// readUntil reads ahead until the end of the body or openingLimit. It reports
// false if the time after the first byte was up before.
func (b *body) readUntil(limit time.Duration) bool {
	b.readFirst()
	timeout := time.NewTimer(limit)
	defer timeout.Stop()
	for b.bufferedErr == nil && len(b.buffered) < openingLimit {
		if !b.readMore(timeout.C) {
			return false
		}
	}
	return true
}
