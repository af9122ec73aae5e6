// Package replybody reads the body of a reply that may become the client's: ahead of the client, to
// see whether it brings an error, and then as the client reads it, to see how it ends.
package replybody

import (
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/bufpool"
	"github.com/openai-lb/caddy-openai-lb/internal/cause"
	"github.com/openai-lb/caddy-openai-lb/internal/deadline"
	"github.com/openai-lb/caddy-openai-lb/internal/redact"
	"github.com/openai-lb/caddy-openai-lb/internal/replyheader"
	"github.com/openai-lb/caddy-openai-lb/internal/sse"
	"github.com/openai-lb/caddy-openai-lb/internal/usage"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

const (
	// OpeningLimit is how much of a reply is held back to see whether it
	// brings an error, and openingTimeout for how long after its first byte.
	OpeningLimit   = 64 << 10
	openingTimeout = 2 * time.Second
	// openingRead is how much of it is read at first. Each read is for as much
	// as was read before.
	openingRead = 4 << 10
)

// What can be wrong with a reply besides the errors of its connection.
var (
	ErrIdle       = &cause.Error{Word: "stalled", Text: "the backend sent nothing in time"}
	ErrEmpty      = &cause.Error{Word: "empty", Text: "the stream ended before any content"}
	ErrNotJSON    = &cause.Error{Word: "not_json", Text: "the reply is not JSON, although its Content-Type is"}
	ErrUnfinished = &cause.Error{Word: "unfinished", Text: "the stream ended without its end marker"}
	ErrInStream   = &cause.Error{Word: "stream_error", Text: "the stream contained an error"}
)

// Body is the body of a reply that may become the client's. Its beginning
// may have been read ahead, to see whether it brings an error: then it gives the
// client that first, and the rest after it. It also ends a reply that stalls, and
// tells how the reply ended.
type Body struct {
	Source io.ReadCloser
	// Response is the one that the body belongs to. Secrets must not be in the
	// trailers that come with the end of the body.
	Response *http.Response
	Secrets  redact.Secrets
	// KeepTrailers leaves the other trailers as they are. Without it, those that are
	// between a provider and its own clients are removed.
	KeepTrailers bool
	// Deadline ends a read that takes longer than Idle.
	Deadline *deadline.Deadline
	Idle     time.Duration
	// MustEnd makes a stream that ends without saying so a broken one.
	MustEnd bool

	// Usage reads how many tokens the reply cost. It is nil if nobody asks, and
	// else what ReadUsage has made it.
	Usage *usage.Reader
	// Lesson learns which objects the backend has. It is nil if it has none.
	Lesson *affinity.Lesson

	// Begun is called when the first byte comes, if it was not there when the reply
	// became the client's.
	Begun func()
	// Broken is called, once at most, if the reply broke off or told of an
	// error. Until the reply is the client's, it is nil.
	Broken func(reason error)

	// watch looks at a stream of events. It is nil for other replies.
	watch *sse.Watcher
	usage usage.Reader
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
}

type lateReply struct{ client, backend *http.Response }

type readAhead struct {
	data []byte
	err  error
}

// patience is for how much longer than its backend a client must keep a reply waiting to be the
// slower of the two. Backends wait for a second or more before they give up.
const patience = 500 * time.Millisecond

// GoesOut records that the reply is the client's from now on.
func (b *Body) GoesOut() {
	if b.heldErr == nil {
		b.Deadline.Measure()
	}
}

// GivenUp reports whether a reply that broke for this reason may have been given up by its backend,
// because the client did not read it. The client's pauses count, and not only the last one: what
// the buffers on the way hold is read before the cut is found. While they hold something, a read
// takes no time. A read that waits for the backend shows that the client has all there is.
func (b *Body) GivenUp(reason error) bool {
	return !errors.Is(reason, ErrInStream) && b.Deadline.Lag() >= patience
}

// ReadUsage has the tokens read that the reply cost.
func (b *Body) ReadUsage() { b.Usage = b.usage.Begin(b.Response.Header) }

// nextRead is a buffer for the next read ahead.
func (b *Body) nextRead() []byte {
	return make([]byte, min(max(openingRead, len(b.held)), OpeningLimit-len(b.held)))
}

// readMore reads ahead until some of the body is there. It reports false if
// the time was up before.
func (b *Body) readMore(timeout <-chan time.Time) bool {
	b.pending = make(chan readAhead, 1)
	go func(pending chan<- readAhead, buf []byte) {
		n, err := b.Source.Read(buf)
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

func (b *Body) take(more readAhead) {
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
	b.star(b.held)
}

// failing reports whether a stream has begun an event that may be an error, and
// could bring a secret.
func (b *Body) failing() bool { return len(b.Secrets) > 0 && b.watch != nil && b.watch.Failing() }

// star replaces the secrets in what a stream brought if it tells of an error.
func (b *Body) star(data []byte) {
	if b.watch != nil && b.watch.Failure != nil || b.failing() {
		b.Secrets.Star(data)
	}
}

// see looks at the next bytes of the body. err is how the reading ended.
func (b *Body) see(data []byte, err error) {
	end := errors.Is(err, io.EOF)
	switch {
	case b.watch != nil:
		if b.watch.Watch(data); end {
			b.watch.Finish()
		}
	case end && len(data) == len(b.held):
		b.Usage.Whole(data)
	default:
		b.Usage.Write(data)
	}
	b.Lesson.Watch(data, end)
}

// Read implements io.Reader.
func (b *Body) Read(p []byte) (n int, err error) {
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
		b.Deadline.Start(b.Idle, ErrIdle)
		if b.pending != nil {
			b.take(<-b.pending)
		} else {
			n, err = b.Source.Read(p)
			if b.Begun != nil && n > 0 {
				b.Begun()
				b.Begun = nil
			}
			b.see(p[:n], err)
			for err == nil && n < len(p) && b.failing() && b.Deadline.Stop() { // the client gets an error at once
				var more int
				b.Deadline.Start(b.Idle, ErrIdle)
				more, err = b.Source.Read(p[n:])
				b.see(p[n:n+more], err)
				n += more
			}
			b.star(p[:n])
		}
		if !b.Deadline.Stop() && err != nil && !errors.Is(err, io.EOF) {
			err = ErrIdle
		}
		if b.held != nil || b.heldErr != nil {
			return b.Read(p)
		}
	}
	if err != nil {
		b.Deadline.End()
		b.Secrets.DropFrom(b.Response.Trailer)
		if !b.KeepTrailers {
			replyheader.RemoveProviders(b.Response.Trailer)
		}
		err = b.finish(err)
	}
	return n, err
}

// finish tells how the reply ended. For the client, a broken reply must not end
// as if it were whole.
func (b *Body) finish(err error) error {
	if b.Broken == nil {
		return err
	}
	reason := err
	if errors.Is(err, io.EOF) {
		reason = nil
		if b.watch != nil {
			b.watch.Finish()
			if b.MustEnd && !b.watch.Ended {
				reason, err = ErrUnfinished, ErrUnfinished
			} else if e := b.watch.Failure; e != nil && verdict.Judge(verdict.Reply{Status: e.Status, Body: e.Body}).Blames() {
				reason = ErrInStream
			}
		}
	}
	if reason != nil {
		b.Broken(reason)
	}
	b.Broken = nil
	return err
}

// Close implements io.Closer. A reply that is closed before its end is not
// broken: its client left.
func (b *Body) Close() error {
	b.held, b.Broken = nil, nil
	b.Deadline.End()
	b.Usage.Close()
	return b.Source.Close()
}
