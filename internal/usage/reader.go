package usage

import (
	"bytes"
	"net/http"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/sse"
)

// Reader reads the tokens of one reply, after a call of Begin. All methods may
// be called on nil, which is the reader of a reply without a usage.
type Reader struct {
	scanner  scanner
	fresh    bool         // the latest event that matters had a usage
	long     bool         // an event that is too long to be kept is being read
	trailing bool         // something comes after the object that a JSON reply is
	watcher  *sse.Watcher // splits a stream into its events. nil until it begins
	watches  bool         // the watcher is the reader's own
	decoder  *openaiapi.Decoder

	counts  bool // the content is counted
	content content
	spender Spender // is told of the output of a stream, from next tokens on
	next    int64
	finds   bool // the id is searched for in what comes first
	id      string
}

// Begin prepares the reader for the reply with this header. It returns nil if
// the reply is neither JSON nor a stream of events, or cannot be decompressed.
func (r *Reader) Begin(header http.Header) *Reader {
	switch openaiapi.ContentType(header) {
	case openaiapi.TypeJSON:
	case openaiapi.TypeEventStream:
		r.scanner.inEvent = true
	default:
		return nil
	}
	if name := openaiapi.ContentCoding(header); name != "" {
		r.decoder = openaiapi.NewDecoder(name, r.read)
		if r.decoder == nil {
			return nil
		}
	}
	return r
}

// Write reads the next bytes of the reply.
func (r *Reader) Write(p []byte) {
	switch {
	case r == nil:
	case r.decoder != nil:
		r.decoder.Write(p)
	default:
		r.read(p)
	}
}

// Whole reads a reply that is passed as a whole.
func (r *Reader) Whole(p []byte) {
	if r == nil || r.decoder != nil || r.scanner.inEvent || !r.scanner.scanFrom(p) {
		r.Write(p)
	} else {
		r.seen(p)
	}
}

func (r *Reader) read(p []byte) {
	if !r.scanner.inEvent {
		r.trailing = len(bytes.TrimLeft(r.scanner.scan(p), whiteSpace)) > 0 || r.trailing
		r.seen(p)
		return
	}
	if r.watcher == nil {
		r.watches = true
		r.Watch(new(sse.Watcher))
	}
	r.watcher.Watch(p)
}

// seen reads the next bytes of a JSON reply for its id and its content.
func (r *Reader) seen(p []byte) {
	if r.finds {
		r.findID(p)
	}
	if r.counts && !r.Tokens().Known() {
		r.content.count(p)
	}
}

func (r *Reader) event(e sse.Event) {
	if r.finds {
		r.findID(e.Data)
	}
	if e.TooLong {
		r.long = false // more was called with all of it
		return
	}
	if mayHoldUsage(e.Tail) {
		r.scanner.begin()
		r.scanner.scan(e.Data)
		r.fresh = true
		if r.spender != nil {
			r.spend(r.Tokens().Output)
		}
	} else if r.fresh {
		r.fresh = bytes.HasPrefix(e.Data, []byte("[DONE]")) || string(e.Kind()) == "message_stop"
	}
}

// readMore reads the next part of an event that is too long to be kept.
func (r *Reader) readMore(data []byte) {
	if !r.long {
		r.long = true
		r.scanner.begin()
	}
	r.scanner.scan(data)
}

// Watch makes the watcher of a stream pass its events to the reader. Write is
// not called then.
func (r *Reader) Watch(w *sse.Watcher) {
	if r == nil {
		return
	}
	r.watcher = w
	w.Each, w.Long = r.event, r.readMore
	if r.counts {
		w.Piece = r.piece
	}
}

// nameEnd is searched for instead of the whole name, because a search for the
// letter u stops less often than one for a quote. tierEnd is searched for
// instead of tierName, because hardly any text has an underscore.
var (
	nameEnd = []byte(`usage"`)
	tierEnd = []byte(`_tier"`)
	idName  = []byte(`"id"`)
)

const tierName = `service_tier"`

// mayHoldUsage reports whether the data may have a member "usage" that is an
// object. It is a quick check, because hardly any event has one, though many
// have a null.
func mayHoldUsage(data []byte) bool {
	value, found := sse.NextMember(data, nameEnd)
	for found && !bytes.HasPrefix(value, []byte("{")) {
		value, found = sse.NextMember(value, nameEnd)
	}
	return found
}

const whiteSpace = " \t\r\n"

// Close records the end of the reply, which may be cut. It must be called, and
// may be called again.
func (r *Reader) Close() {
	if r == nil {
		return
	}
	if r.decoder != nil {
		r.decoder.Close()
	}
	if r.watches {
		r.watcher.Finish()
	}
}

// IsObject reports whether the reply so far is exactly one JSON object. The
// reader skips most bytes, so it may report true for an object with a syntax
// error.
func (r *Reader) IsObject() bool { return r != nil && !r.trailing && r.scanner.leftRoot() }

// IsCut reports whether a JSON reply has ended before its object did. It is
// known after Close. A reply that cannot be read counts as complete.
func (r *Reader) IsCut() bool {
	return r != nil && !r.scanner.inEvent && r.scanner.isOpen() && (r.decoder == nil || r.decoder.IsCut)
}

// Tokens returns the tokens that the reply has reported so far.
func (r *Reader) Tokens() Tokens {
	if r == nil {
		return Tokens{}
	}
	return r.scanner.found.tokens()
}

// ServiceTier returns the service tier that the reply has named with its
// tokens, as a name of [openaiapi.TierName]. It is empty if the reply named
// none.
func (r *Reader) ServiceTier() string {
	if r == nil {
		return ""
	}
	return r.scanner.tier
}

// Estimate returns the tokens of a reply that was aborted or did not report
// them. estimated reports whether one of the counts is an estimate. Most
// streams report their tokens only at the end.
//
// Without a report, the input is prompt, and the output is the larger of two
// lower bounds: one token for each event with content, and one for each four
// bytes of content, if they are counted. The same output is returned if content
// came after the latest report.
func (r *Reader) Estimate(prompt int64) (t Tokens, estimated bool) {
	t = r.Tokens()
	if r == nil || r.watcher == nil && !r.counts {
		return t, false
	}
	if !t.known {
		t.Input, t.known, estimated = prompt, true, true
	}
	if written := r.written(); written > t.Output && !r.fresh && (estimated || r.watcher != nil) {
		t.Output, estimated = written, true
	}
	return t, estimated
}
