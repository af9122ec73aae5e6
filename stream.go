package openailb

import (
	"bytes"
	"context"
	"errors"
	"io"
	"maps"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/hint"
	"github.com/openai-lb/caddy-openai-lb/internal/sse"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

const (
	// openingLimit and openingTimeout are how much of a reply, and how long
	// after its headers, is held back to see whether it brings an error.
	openingLimit   = 64 << 10
	openingTimeout = 2 * time.Second
	// openingRead is how much of it is read at first. Each read is for as much
	// as was read before.
	openingRead = 4 << 10
)

var (
	errIdleStream       = errors.New("nothing came from the backend in time")
	errEmptyStream      = errors.New("the stream ended before any content")
	errUnfinishedStream = errors.New("the stream ended without saying that it is over")
	errStreamError      = errors.New("the stream told of an error")
)

// replyBody is the body of a reply that may become the client's: what was held
// back of it, and then the rest. It ends an attempt that stalls, and tells how
// the reply ended.
type replyBody struct {
	body io.ReadCloser
	// backend is the response that it is of, and secrets what must not be in
	// the trailers that come with its end.
	backend *http.Response
	secrets secrets
	// held is what was read ahead, and heldErr how that ended.
	held    []byte
	heldErr error
	// pending brings what is being read ahead.
	pending chan readAhead
	// late are the reply that the client gets while a read is pending, and the
	// one that this read may still add trailers to.
	late *lateReply

	// idle is how long one read may take, and cancel what ends it.
	idle   time.Duration
	timer  *time.Timer
	cancel context.CancelCauseFunc

	// watch looks at a stream of events. It is nil for other replies.
	watch *sse.Watcher
	// mustEnd makes a stream that ends without saying so a broken one.
	mustEnd bool
	// broken is called, once at most, if the reply broke off or told of an
	// error. Until the reply is the client's, it is nil.
	broken func(reason error)
}

type lateReply struct{ client, backend *http.Response }

type readAhead struct {
	data []byte
	err  error
}

// readMore reads ahead until some of the body is there. It reports false if
// the time was up before.
func (b *replyBody) readMore(timeout <-chan time.Time) bool {
	b.pending = make(chan readAhead, 1)
	go func(pending chan<- readAhead, held int) {
		buf := make([]byte, min(max(openingRead, held), openingLimit-held))
		n, err := b.body.Read(buf)
		pending <- readAhead{buf[:n], err}
	}(b.pending, len(b.held))
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
		// the trailers came with the end; nobody else reads or writes them now
		b.late.client.Trailer = b.late.backend.Trailer
		b.late = nil
	}
	b.held = append(b.held, more.data...)
	b.heldErr = more.err
}

// Read implements io.Reader.
func (b *replyBody) Read(p []byte) (int, error) {
	n, err := b.read(p)
	if b.watch != nil {
		b.watch.Watch(p[:n])
	}
	if err != nil {
		b.secrets.dropFrom(b.backend.Trailer)
		err = b.finish(err)
	}
	return n, err
}

func (b *replyBody) read(p []byte) (n int, err error) {
	if len(b.held) == 0 && b.heldErr == nil && b.idle > 0 {
		b.startTimer()
		defer b.stopTimer(&err)
	}
	if b.pending != nil && len(b.held) == 0 {
		b.take(<-b.pending)
	}
	if len(b.held) > 0 {
		n = copy(p, b.held)
		if b.held = b.held[n:]; len(b.held) == 0 {
			b.held = nil
		}
		return n, nil
	}
	if b.heldErr != nil {
		return 0, b.heldErr
	}
	return b.body.Read(p)
}

func (b *replyBody) startTimer() {
	if b.timer == nil {
		b.timer = time.AfterFunc(b.idle, func() { b.cancel(errIdleStream) })
	} else {
		b.timer.Reset(b.idle)
	}
}

func (b *replyBody) stopTimer(err *error) {
	if !b.timer.Stop() && *err != nil && !errors.Is(*err, io.EOF) {
		*err = errIdleStream
	}
}

// finish tells how the reply ended, and makes sure that a broken one does not
// end cleanly for the client.
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
				reason = errStreamError // but for the client's own error
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
	return b.body.Close()
}

// watchOver puts a response under the timeouts of a reply. It returns nil for
// one without a body, or with a connection for it.
func (t *Transport) watchOver(res *http.Response, sent secrets, cancel context.CancelCauseFunc) *replyBody {
	if res.Body == http.NoBody || res.StatusCode == http.StatusSwitchingProtocols {
		return nil
	}
	body := &replyBody{body: res.Body, backend: res, secrets: sent, idle: time.Duration(t.StreamIdleTimeout), cancel: cancel, mustEnd: t.StreamRequireEnd}
	res.Body = body
	return body
}

// open holds a reply of status 200 back until it is certain that it is one. A
// stream that brings an error in place of content, or nothing at all, becomes
// the error that it stands for.
func (t *Transport) open(ex *exchange, r *reply) {
	// what is only looked up, like a stored response that failed, is no failure
	if r.status != http.StatusOK || ex.request.Method != http.MethodPost || encoded(r.res.Header) {
		return
	}
	switch mediaType, _, _ := mime.ParseMediaType(r.res.Header.Get("Content-Type")); {
	case mediaType == "text/event-stream" && r.body == nil:
		r.breakOff(errEmptyStream)
	case mediaType == "text/event-stream":
		r.body.watch = new(sse.Watcher)
		t.openStream(r)
	case mediaType == "application/json" && r.body != nil && r.res.ContentLength <= openingLimit:
		t.openJSON(r, strings.HasSuffix(ex.request.URL.Path, "/responses"))
	}
	if r.body != nil && r.body.pending != nil {
		client := *r.res
		client.Trailer = maps.Clone(client.Trailer)
		r.body.late = &lateReply{&client, r.res}
		r.res = &client
	}
}

// encoded reports whether a body is compressed.
func encoded(header http.Header) bool {
	encoding := header.Get("Content-Encoding")
	return encoding != "" && !strings.EqualFold(encoding, "identity")
}

// breakOff makes the reply one that is no use to anybody.
func (r *reply) breakOff(reason error) {
	r.class, r.err, r.cut = verdict.Failed, reason, true
}

func (t *Transport) openStream(r *reply) {
	timeout := time.NewTimer(openingTimeout)
	defer timeout.Stop()
	for len(r.body.held) < openingLimit {
		if !r.body.readMore(timeout.C) {
			return
		}
		opening, failure := sse.Open(r.body.held, errors.Is(r.body.heldErr, io.EOF))
		switch {
		case opening == sse.Content:
			return
		case opening == sse.Failure:
			t.fail(r, failure)
			return
		case opening == sse.End, r.body.heldErr != nil:
			r.breakOff(errEmptyStream)
			return
		}
	}
}

// openJSON looks for an error in a reply that is not streamed. creates tells
// that a failed response in it was made just now.
func (t *Transport) openJSON(r *reply, creates bool) {
	timeout := time.NewTimer(openingTimeout)
	defer timeout.Stop()
	for r.body.heldErr == nil && len(r.body.held) < openingLimit {
		if !r.body.readMore(timeout.C) {
			return
		}
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

// fail makes the reply the error that it brought, unless that is the client's
// own: then it stays what it is.
func (t *Transport) fail(r *reply, failure *sse.Error) {
	class := judged(verdict.Reply{Status: failure.Status, Body: failure.Body})
	if !class.Failover() || len(t.UnhealthyStatus) > 0 && !t.listed(failure.Status) {
		r.body.watch = nil // nor is it the backend's fault when it comes by again
		return
	}
	original := r.res
	header := original.Header.Clone()
	for _, name := range []string{"Content-Length", "Cache-Control", "Transfer-Encoding"} {
		header.Del(name)
	}
	header.Set("Content-Type", "application/json")
	original.Body.Close()
	r.res = &http.Response{
		Status:        strconv.Itoa(failure.Status) + " " + http.StatusText(failure.Status),
		StatusCode:    failure.Status,
		Proto:         original.Proto,
		ProtoMajor:    original.ProtoMajor,
		ProtoMinor:    original.ProtoMinor,
		Header:        header,
		Body:          io.NopCloser(bytes.NewReader(failure.Body)),
		ContentLength: int64(len(failure.Body)),
		Request:       original.Request,
	}
	r.secrets.guard(r.res, nil, true)
	r.body, r.class, r.status, r.whole = nil, class, failure.Status, true
	r.wait, r.source, r.hinted = hint.Read(r.status, header, failure.Body, time.Now())
}
