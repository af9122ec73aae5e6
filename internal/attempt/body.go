package attempt

import (
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/replay"
	"github.com/openai-lb/caddy-openai-lb/internal/sse"
	"github.com/openai-lb/caddy-openai-lb/internal/usage"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

const (
	// openingLimit is how much of a reply is held back to see whether it is an
	// error. openingTimeout is for how long, counted from the first byte.
	openingLimit   = 64 << 10
	openingTimeout = 2 * time.Second
	// echoLimit is how much of a stream is held back while it has only
	// preambles, which may repeat the request, as a long error may. echoesLimit
	// is how much of all streams together is held back beyond openingLimit.
	echoLimit   = 8 << 20
	echoesLimit = 256 << 20
	// openingRead is the smallest size of a read ahead. Each further read is as
	// long as the data buffered so far.
	openingRead = 4 << 10
	// firstRead is the size of the first read of a stream. Caddy's proxy reads
	// as much at a time: events that arrive together are passed on with one
	// write.
	firstRead = 32 << 10
)

// Errors of a reply other than those of its connection.
var (
	ErrIdle       = &verdict.CauseError{Word: "stalled", Text: "the backend sent nothing in time"}
	ErrEmpty      = &verdict.CauseError{Word: "empty", Text: "the stream ended before any content"}
	ErrNotJSON    = &verdict.CauseError{Word: "not_json", Text: "the reply is not JSON, although its Content-Type is"}
	ErrSurplus    = &verdict.CauseError{Word: "malformed", Text: "the reply is longer than its Content-Length"}
	ErrUnfinished = &verdict.CauseError{Word: "unfinished", Text: "the stream ended without its end mark"}
	ErrCutJSON    = &verdict.CauseError{Word: "unfinished", Text: "the reply ended before its JSON"}
	ErrInStream   = &verdict.CauseError{Word: "stream_error", Text: "the stream contained an error"}
)

// body is the body of a response that may go to the client. Its beginning may
// have been read ahead, to see whether it contains an error. Read returns that
// beginning first, and the rest after it. body also ends a reply that stalls,
// and reports how the reply ended.
type body struct {
	source io.ReadCloser
	// response is the response with this body. secrets must not be in the
	// trailers that come with the end of the body.
	response *http.Response
	secrets  keys.Secrets
	// random are the secrets that are replaced in content, too.
	random keys.Secrets
	fields Fields
	// deadline ends a read that takes longer than idle.
	deadline *deadline
	idle     time.Duration

	// tokens reads the tokens that the reply cost. It is nil if they are not
	// wanted, else it points to tokenReader.
	tokens      *usage.Reader
	tokenReader usage.Reader
	// ids learns which objects the backend has. It is nil if no ids are wanted
	// from the reply.
	ids IDReader
	// watch reads a stream of events. It is nil for other replies.
	watch *sse.Watcher
	ahead

	// reply is the reply while the client reads it. It is nil before and after.
	reply *Reply
	// waits reports whether the client waits for the first byte.
	waits bool
}

// ahead is the part of a body that was read ahead of the client.
type ahead struct {
	// buffered is the beginning of the body. bufferedErr is the error or the
	// end that followed it.
	buffered    []byte
	bufferedErr error
	// buffer is the storage of buffered. It is nil if that is allocated
	// separately.
	buffer *replay.Buffer
	// echoed is how much of buffered counts toward echoesLimit.
	echoed int64
	// pending delivers the result of a read ahead that is in progress.
	pending chan readAhead
	// rest is the data after buffered that is kept back because a secret may
	// begin there.
	rest []byte
	// copied is a copy of the response from before the first pending read,
	// which may add trailers to the original. late is the same copy, if the
	// client gets it while a read is pending.
	copied, late *http.Response
}

type readAhead struct {
	data []byte
	err  error
}

// patience is how much longer than its backend a client must keep a reply
// waiting to count as the slower of the two. Backends wait for a second or more
// before they give up.
const patience = 500 * time.Millisecond

// goOut begins to pass the body to the client. It returns the reader of its
// tokens.
func (b *body) goOut(reply *Reply) *usage.Reader {
	b.reply = reply
	b.waits = len(b.buffered) == 0 && b.bufferedErr == nil
	b.keepBack()
	if b.bufferedErr == nil {
		b.deadline.measure()
	}
	return b.tokens
}

// givenUp reports whether the backend may have cut the reply because the client
// did not read it. All pauses of the client count, and not only the last one,
// because data in the buffers on the way is read before the cut is found. Reads
// of buffered data take no time. A read that waits for the backend shows that
// the client has read everything so far.
func (b *body) givenUp(reason error) bool {
	return !errors.Is(reason, ErrInStream) && b.deadline.lagging() >= patience
}

// echoes is how much of all streams is held back beyond openingLimit.
var echoes atomic.Int64

// mayHoldMore reports whether more of a stream than openingLimit may be held
// back. If so, it counts the next read in echoes.
func (b *body) mayHoldMore() bool {
	if len(b.buffered) >= echoLimit || !b.watch.Undecided(openingLimit) {
		return false
	}
	more := int64(len(b.buffered)-openingLimit+b.nextReadLength()) - b.echoed // less if the last read was short
	if echoes.Add(more) > echoesLimit {
		echoes.Add(-more)
		return false
	}
	b.echoed += more
	return true
}

// dropBuffered drops the buffered data.
func (b *body) dropBuffered() {
	b.buffered = nil
	if b.echoed > 0 {
		echoes.Add(-b.echoed)
		b.echoed = 0
	}
}

// nextReadLength returns the length of the next read ahead.
func (b *body) nextReadLength() int {
	if len(b.buffered) >= openingLimit {
		return min(openingLimit, echoLimit-len(b.buffered))
	}
	return min(max(openingRead, len(b.buffered)), openingLimit-len(b.buffered))
}

// nextRead returns a buffer for the next read ahead.
func (b *body) nextRead() []byte { return make([]byte, b.nextReadLength()) }

// readMore reads ahead once. It reports false if nothing arrived before the
// timeout; the read is then pending.
func (b *body) readMore(timeout <-chan time.Time) bool {
	if b.copied == nil {
		b.copied = new(*b.response)
	}
	b.pending = make(chan readAhead, 1)
	go func(pending chan<- readAhead, buf []byte) {
		n, err := b.read(buf)
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

func (b *body) take(more readAhead) {
	b.pending = nil
	if b.buffered == nil {
		b.buffered = more.data
	} else {
		b.buffered = append(b.buffered, more.data...)
	}
	b.bufferedErr = more.err
	b.see(more.data, more.err)
	b.star(b.buffered, true)
}

// failing reports whether a stream has begun an event that may be an error and
// so may contain a secret.
func (b *body) failing() bool { return len(b.secrets) > 0 && b.watch != nil && b.watch.Failing() }

// star replaces secrets in data by stars. It replaces random keys anywhere,
// because they are never content and an error need not look like one. It
// replaces short secrets only where the data looks like an error. It returns
// how much of the data may be passed on: unless the data is complete, a secret
// may begin in the rest.
func (b *body) star(data []byte, complete bool) (ready int) {
	if b.watch != nil && b.watch.Failure != nil || b.failing() {
		return b.secrets.Star(data, complete)
	}
	return b.random.Star(data, complete)
}

// keepBack moves the end of the buffered data to rest if a secret may begin
// there.
func (b *body) keepBack() {
	ready := b.star(b.buffered, b.bufferedErr != nil)
	if ready == len(b.buffered) {
		return
	}
	b.rest = slices.Clone(b.buffered[ready:])
	if b.buffered = b.buffered[:ready]; ready == 0 {
		b.buffered = nil
	}
}

// see passes the next bytes of the body to its readers. err is the error or the
// end that followed them.
func (b *body) see(data []byte, err error) {
	end := errors.Is(err, io.EOF)
	switch {
	case b.watch != nil:
		if b.watch.Watch(data); end {
			b.watch.Finish()
		}
	case end && len(data) == len(b.buffered):
		b.tokens.Whole(data)
	default:
		b.tokens.Write(data)
	}
	if b.ids != nil {
		b.ids.Watch(data, end)
	}
}

// read reads from the backend. It removes quotes of the data from net/http's
// errors.
func (b *body) read(p []byte) (int, error) {
	n, err := b.source.Read(p)
	return n, verdict.OwnWords(err)
}

// Read implements io.Reader.
func (b *body) Read(p []byte) (n int, err error) {
	switch {
	case len(b.buffered) > 0:
		n = copy(p, b.buffered)
		if b.buffered = b.buffered[n:]; len(b.buffered) > 0 {
			return n, nil
		}
		b.buffer.Put() // only Read reads it by now
		b.buffer = nil
		b.dropBuffered()
		if err = b.bufferedErr; err == nil {
			return n, nil
		}
	case b.bufferedErr != nil:
		err = b.bufferedErr
	default:
		b.deadline.start(b.idle, ErrIdle)
		if b.pending != nil {
			b.take(<-b.pending)
			if len(b.rest) > 0 {
				b.buffered, b.rest = append(b.rest, b.buffered...), nil
			}
			b.keepBack()
		} else {
			n, err = b.readOn(p)
		}
		if !b.deadline.stop() && err != nil && !errors.Is(err, io.EOF) {
			err = ErrIdle
		}
		if b.buffered != nil || b.bufferedErr != nil || n == 0 && len(b.rest) > 0 && len(p) > 0 {
			return b.Read(p)
		}
	}
	if err != nil {
		b.deadline.end()
		b.secrets.DropFrom(b.response.Trailer)
		b.fields.Trailer(b.response.Trailer)
		if b.late != nil {
			b.late.Trailer = b.response.Trailer
		}
		err = b.finish(err)
	}
	return n, err
}

// readOn reads the part of the body that was not read ahead.
func (b *body) readOn(p []byte) (n int, err error) {
	n = copy(p, b.rest)
	if b.rest = b.rest[n:]; n == len(p) {
		return n, nil // there is no space to find the end of a secret in
	}
	more, err := b.read(p[n:])
	if b.waits && more > 0 && b.reply != nil {
		b.waits = false
		b.reply.firstByte = time.Now()
	}
	b.see(p[n:n+more], err)
	n += more
	for err == nil && n < len(p) && b.failing() && b.deadline.stop() { // the client gets an error at once
		b.deadline.start(b.idle, ErrIdle)
		more, err = b.read(p[n:])
		b.see(p[n:n+more], err)
		n += more
	}
	if ready := b.star(p[:n], err != nil); n-ready < len(p) {
		b.rest, n = append(b.rest, p[ready:n]...), ready
	}
	return n, err
}

// finish reports how the reply ended, and returns the error for the client: a
// broken reply must not look complete.
func (b *body) finish(err error) error {
	if b.reply == nil {
		return err
	}
	reason := err
	if errors.Is(err, io.EOF) {
		reason = nil
		if b.watch != nil {
			b.watch.Finish()
			reason = b.reply.sent.judgeEnd(b.watch)
		} else if b.tokens.Close(); b.tokens.IsCut() {
			reason = ErrCutJSON
		}
		if errors.Is(reason, ErrUnfinished) || errors.Is(reason, ErrCutJSON) {
			err = reason
		}
	}
	if reason != nil {
		b.reply.breaks(End{Broken: reason, Paused: b.givenUp(reason)})
	}
	b.reply = nil
	return err
}

// endsByProtocol reports whether each stream of the operation ends with an end
// event, as in OpenAI's Responses and Anthropic's Messages. For other streams,
// EndMarks learns whether a backend sends one.
func endsByProtocol(operation string) bool {
	return strings.HasSuffix(operation, "/responses") || strings.HasSuffix(operation, "/messages")
}

// judgeEnd returns an error if a stream that has ended is not complete or
// contained an error of the backend. An error event completes a stream as an
// end mark does, but it does not show that the backend sends end marks.
func (t *Outgoing) judgeEnd(stream *sse.Watcher) error {
	switch e := stream.Failure; {
	case e != nil && verdict.Judge(verdict.Reply{Status: e.Status, Body: e.Body, OfResponse: e.OfResponse}).Blames():
		return ErrInStream
	case e != nil:
	case stream.Ended:
		t.Marks.Ended(t.Traits.Model, t.Traits.Operation)
	case endsByProtocol(t.Traits.Operation), t.Marks.Ends(t.Traits.Model, t.Traits.Operation):
		return ErrUnfinished
	}
	return nil
}

// Close implements io.Closer. A reply that is closed before its end is not
// broken, because its client left.
func (b *body) Close() error {
	b.dropBuffered()
	b.reply = nil
	b.deadline.end()
	b.tokens.Close()
	return b.source.Close()
}
