package openailb

import (
	"errors"
	"io"
	"maps"
	"net/http"
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/bufpool"
	"github.com/openai-lb/caddy-openai-lb/internal/cause"
	"github.com/openai-lb/caddy-openai-lb/internal/contentcoding"
	"github.com/openai-lb/caddy-openai-lb/internal/deadline"
	"github.com/openai-lb/caddy-openai-lb/internal/redact"
	"github.com/openai-lb/caddy-openai-lb/internal/roundtrip"
	"github.com/openai-lb/caddy-openai-lb/internal/sse"
	"github.com/openai-lb/caddy-openai-lb/internal/usage"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

const (
	// openingLimit is how much of a reply is held back to see whether it
	// brings an error, and openingTimeout for how long after its first byte.
	openingLimit   = 64 << 10
	openingTimeout = 2 * time.Second
	// openingRead is how much of it is read at first. Each read is for as much
	// as was read before.
	openingRead = 4 << 10
)

var (
	errIdleStream       = &cause.Error{Word: "stalled", Text: "nothing came from the backend in time"}
	errEmptyStream      = &cause.Error{Word: "empty", Text: "the stream ended before any content"}
	errUnfinishedStream = &cause.Error{Word: "unfinished", Text: "the stream ended without saying that it is over"}
	errStreamError      = &cause.Error{Word: "stream_error", Text: "the stream told of an error"}
)

// replyBody is the body of a reply that may become the client's. Its beginning
// may have been read ahead, to see whether it brings an error: then it gives the
// client that first, and the rest after it. It also ends a reply that stalls, and
// tells how the reply ended.
type replyBody struct {
	body io.ReadCloser
	// backend is the response that the body belongs to. secrets must not be in
	// the trailers that come with the end of the body.
	backend *http.Response
	secrets redact.Secrets
	// held is what was read ahead, and heldErr how that ended.
	held    []byte
	heldErr error
	// buffer has what is held, unless it is empty or more than was expected.
	buffer *bufpool.Buffer
	// pending brings what is being read ahead.
	pending chan readAhead
	// late is set if the client gets its reply while a read is pending, which
	// may still add trailers to the backend's reply.
	late *lateReply

	// deadline ends a read that takes longer than idle.
	deadline *deadline.Deadline
	idle     time.Duration

	// watch looks at a stream of events. It is nil for other replies.
	watch *sse.Watcher
	// usage reads how many tokens the reply cost. It is nil if nobody asks.
	usage *usage.Reader
	lesson *affinity.Lesson // learns which objects the backend has
	// mustEnd makes a stream that ends without saying so a broken one.
	mustEnd bool
	// begun is called when the first byte comes, if it was not there when the reply
	// became the client's.
	begun func()
	// broken is called, once at most, if the reply broke off or told of an
	// error. Until the reply is the client's, it is nil.
	broken func(reason error)
}

type lateReply struct{ client, backend *http.Response }

type readAhead struct {
	data []byte
	err  error
}

// nextRead is a buffer for the next read ahead.
func (b *replyBody) nextRead() []byte {
	return make([]byte, min(max(openingRead, len(b.held)), openingLimit-len(b.held)))
}

// readMore reads ahead until some of the body is there. It reports false if
// the time was up before.
func (b *replyBody) readMore(timeout <-chan time.Time) bool {
	b.pending = make(chan readAhead, 1)
	go func(pending chan<- readAhead, buf []byte) {
		n, err := b.body.Read(buf)
		pending <- readAhead{buf[:n], err}
	}(b.pending, b.nextRead())
	select {
	case more := <-b.pending:
		b.take(more)
		return true
	case <-timeout:
		return false
	}
}

func (b *replyBody) take(more readAhead) {
	b.pending = nil
	if b.late != nil && more.err != nil {
		// the trailers came with the end, and nobody reads or writes them now
		b.late.client.Trailer = b.late.backend.Trailer
		b.late = nil
	}
	if b.held == nil {
		b.held = more.data
	} else {
		b.held = append(b.held, more.data...)
	}
	b.heldErr = more.err
	b.see(more.data, more.err)
}

// see looks at the next bytes of the body. err is how the reading ended.
func (b *replyBody) see(data []byte, err error) {
	end := errors.Is(err, io.EOF)
	if b.watch == nil {
		b.usage.Write(data)
	} else if b.watch.Watch(data); end {
		b.watch.Finish()
	}
	b.lesson.Watch(data, end)
}

// Read implements io.Reader.
func (b *replyBody) Read(p []byte) (n int, err error) {
	switch {
	case len(b.held) > 0:
		n = copy(p, b.held)
		if b.held = b.held[n:]; len(b.held) > 0 {
			return n, nil
		}
		b.buffer.Put() // nobody but Read reads it by now
		b.held, b.buffer = nil, nil
		if err = b.heldErr; err == nil {
			return n, nil
		}
	case b.heldErr != nil:
		err = b.heldErr
	default:
		b.deadline.Start(b.idle, errIdleStream)
		if b.pending != nil {
			b.take(<-b.pending)
		} else {
			n, err = b.body.Read(p)
			if b.begun != nil && n > 0 {
				b.begun()
				b.begun = nil
			}
			b.see(p[:n], err)
		}
		if !b.deadline.Stop() && err != nil && !errors.Is(err, io.EOF) {
			err = errIdleStream
		}
		if b.held != nil || b.heldErr != nil {
			return b.Read(p)
		}
	}
	if err != nil {
		b.deadline.End()
		b.secrets.DropFrom(b.backend.Trailer)
		err = b.finish(err)
	}
	return n, err
}

// finish tells how the reply ended. For the client, a broken reply must not end
// as if it were whole.
func (b *replyBody) finish(err error) error {
	if b.broken == nil {
		return err
	}
	reason := err
	if errors.Is(err, io.EOF) {
		reason = nil
		if b.watch != nil {
			b.watch.Finish()
			if b.mustEnd && !b.watch.Ended {
				reason, err = errUnfinishedStream, errUnfinishedStream
			} else if e := b.watch.Failure; e != nil && verdict.Judge(verdict.Reply{Status: e.Status, Body: e.Body}).Blames() {
				reason = errStreamError
			}
		}
	}
	if reason != nil {
		b.broken(reason)
	}
	b.broken = nil
	return err
}

// Close implements io.Closer. A reply that is closed before its end is not
// broken: its client left.
func (b *replyBody) Close() error {
	b.held, b.broken = nil, nil
	b.deadline.End()
	return b.body.Close()
}

// watchOver puts a limit on the time of each read of a reply's body. It returns
// nil for a reply without a body, and for one whose body is a connection.
func (t *Transport) watchOver(r *reply, rt *roundTrip) *replyBody {
	if r.res.Body == http.NoBody || r.res.StatusCode == http.StatusSwitchingProtocols {
		return nil
	}
	rt.body = replyBody{body: r.res.Body, backend: r.res, secrets: r.secrets,
		deadline: &rt.Timeout, idle: time.Duration(t.StreamIdleTimeout), mustEnd: t.StreamRequireEnd}
	r.res.Body = &rt.body
	return &rt.body
}

// open holds a reply of status 200 back until it is certain that the request
// was served. A stream that brings an error in place of content, or nothing at
// all, becomes the error that it stands for. The reply to a request that must
// not be sent again is passed on at once. So is the reply to a GET: a stored
// response that failed long ago is not a failure.
func (t *Transport) open(ex *exchange, r *reply, rt *roundTrip) {
	if r.status == http.StatusOK && r.body != nil && ex.asked.infers && !ex.balancer.plain {
		r.body.usage = usage.NewReader(r.res.Header)
	}
	if r.status != http.StatusOK || ex.request.Method != http.MethodPost || !ex.asked.repeatable || contentcoding.Compressed(r.res.Header) {
		return
	}
	switch mediaType, _ := parseMediaType(r.res.Header.Get("Content-Type")); {
	case mediaType == "text/event-stream" && r.body == nil:
		r.breakOff(errEmptyStream)
	case mediaType == "text/event-stream":
		r.body.watch = new(sse.Watcher)
		r.body.usage.Watch(r.body.watch)
		r.body.lesson = r.body.lesson.Join(r.body.watch)
		t.openStream(r, rt)
	case mediaType == "application/json" && r.body != nil && r.res.ContentLength <= openingLimit:
		t.openJSON(r, rt, strings.HasSuffix(ex.request.URL.Path, "/responses"))
	}
	if r.body != nil && r.body.pending != nil {
		client := *r.res
		client.Trailer = maps.Clone(client.Trailer)
		r.body.late = &lateReply{&client, r.res}
		r.res = &client
	}
}

// breakOff makes the reply a failure that no client may see.
func (r *reply) breakOff(reason error) {
	r.class, r.err, r.cut = verdict.Failed, reason, true
}

// openStream waits for the first byte as long as for the headers, and after it
// for a short time for content. It cannot wait for content longer: a model that
// thinks may send none for minutes.
func (t *Transport) openStream(r *reply, rt *roundTrip) {
	r.body.buffer = bufpool.Get(openingRead)
	buf := r.body.buffer.Bytes[:openingRead]
	n, err := r.body.body.Read(buf)
	inTime := rt.Timeout.Stop()
	r.body.take(readAhead{buf[:n], err})
	if err != nil && !inTime {
		r.breakOff(roundtrip.ErrNoReply)
		r.class = verdict.Timeout
		return
	}
	var timeout *time.Timer
	for {
		switch opening := r.body.watch.Opening; {
		case opening == sse.Content:
			return
		case opening == sse.Failure:
			t.fail(r, r.body.watch.Failure)
			return
		case opening == sse.End, r.body.heldErr != nil:
			r.breakOff(errEmptyStream)
			return
		case len(r.body.held) >= openingLimit:
			return
		}
		if timeout == nil {
			timeout = time.NewTimer(openingTimeout)
			defer timeout.Stop()
		}
		if !r.body.readMore(timeout.C) {
			return
		}
	}
}

// openJSON looks for an error in a reply that is not streamed. creates tells
// that a response object in it was created by this request.
func (t *Transport) openJSON(r *reply, rt *roundTrip, creates bool) {
	if r.res.ContentLength >= 0 {
		r.body.readWhole(rt, int(r.res.ContentLength))
	} else if !r.body.readUntil(openingTimeout) {
		return
	}
	switch {
	case errors.Is(r.body.heldErr, io.EOF):
		if failure := sse.Whole(r.body.held, creates); failure != nil {
			t.fail(r, failure)
		}
	case r.body.heldErr != nil:
		r.breakOff(r.body.heldErr)
	}
}

// readWhole reads ahead all of a body that is of this length.
func (b *replyBody) readWhole(rt *roundTrip, length int) {
	b.buffer = bufpool.Get(length + 1) // one more, to meet the end
	buf := b.buffer.Bytes[:length+1]
	n := 0
	var err error
	for err == nil && n < len(buf) {
		var more int
		rt.Timeout.Start(b.idle, errIdleStream)
		more, err = b.body.Read(buf[n:])
		n += more
	}
	if !rt.Timeout.Stop() && !errors.Is(err, io.EOF) {
		err = errIdleStream
	}
	b.take(readAhead{buf[:n:n], err})
}

// readUntil reads ahead until the end of the body or openingLimit. It reports
// false if the time was up before.
func (b *replyBody) readUntil(limit time.Duration) bool {
	timeout := time.NewTimer(limit)
	defer timeout.Stop()
	for b.heldErr == nil && len(b.held) < openingLimit {
		if !b.readMore(timeout.C) {
			return false
		}
	}
	return true
}
