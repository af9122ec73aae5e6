package affinity

import (
	"bytes"
	"net/http"

	"github.com/openai-lb/caddy-openai-lb/internal/contentcoding"
	"github.com/openai-lb/caddy-openai-lb/internal/mediatype"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/sse"
)

// maxReply is how much of a JSON reply is read. A reply names the object that
// was created at its beginning.
const maxReply = 1 << 20

// Lesson learns the ids that a reply names while the reply passes, before its
// end reaches the client: the next request may come immediately.
type Lesson struct {
	home    *Home
	account string
	// events takes apart a stream that nobody else watches.
	events *sse.Watcher
	// text is what came of a reply of this length and coding.
	text   []byte
	length int64
	coding string
	// read is how many ids were read so far.
	read int
	// unstored reports whether a streamed response is not stored, and chats whether the
	// beginning of a streamed chat was there.
	unstored, chats bool
}

// Teaches reports whether a reply may teach something.
func (h *Home) Teaches() bool { return h.teaches }

// Lesson returns the lesson of a reply, or nil if the reply teaches nothing.
func (h *Home) Lesson(account string, res *http.Response) *Lesson {
	if !h.teaches || res.StatusCode < 200 || res.StatusCode >= 300 {
		return nil
	}
	l := &Lesson{home: h, account: account, length: res.ContentLength}
	switch mediatype.Of(res.Header) {
	case mediatype.JSON:
		l.coding = contentcoding.Of(res.Header)
		return l
	case mediatype.EventStream:
		l.events = new(sse.Watcher)
		l.Join(l.events)
		return l
	}
	return nil
}

// Join makes the watcher of a stream pass its events to the lesson too, which then
// needs no bytes.
func (l *Lesson) Join(w *sse.Watcher) {
	each, long := w.Each, w.Long
	w.Each = func(e sse.Event) {
		if each != nil {
			each(e)
		}
		l.event(e)
	}
	w.Long = func(data []byte) {
		if long != nil {
			long(data)
		}
		l.keep(data) // the event itself comes after all parts of it
	}
}

// Watch reads the next bytes of the reply. end reports whether they are the
// last.
func (l *Lesson) Watch(p []byte, end bool) {
	if l.events != nil {
		if l.events.Watch(p); end {
			l.events.Finish()
		}
		return
	}
	if l.home == nil {
		return // it is over
	}
	l.keep(p)
	if end || len(l.text) == maxReply || int64(len(l.text)) == l.length {
		text := l.text
		if l.coding != "" {
			text, _ = contentcoding.Decode(text, l.coding, maxReply)
		}
		l.learn(text)
		l.home, l.text = nil, nil
	}
}

func (l *Lesson) keep(p []byte) {
	l.text = append(l.text, p[:min(len(p), maxReply-len(l.text))]...)
}

// event reads an event of a stream. Those that bring a part of a text are
// passed over.
func (l *Lesson) event(e sse.Event) {
	data := e.Data
	if e.TooLong {
		data, l.text = l.text, nil
	}
	switch kind := e.Kind(); {
	case bytes.HasPrefix(kind, []byte("thread.")) && bytes.HasSuffix(kind, []byte(".created")):
	case len(kind) == 0: // a chat, of which each event has the id, and one that of what is said
		if l.chats && !bytes.Contains(data, []byte(`"audio":{"id":`)) {
			return
		}
		l.chats = true
	default:
		switch string(kind) {
		case "response.created", "response.output_item.done", "response.completed", "response.incomplete", "response.failed":
		default:
			return
		}
	}
	l.learn(data)
}

func (l *Lesson) learn(text []byte) {
	unstored := openaiapi.EachIDInReply(text, func(kind openaiapi.Kind, stored bool, text []byte) {
		switch l.read++; {
		case l.read > openaiapi.MaxIDs:
		case kind == openaiapi.Encrypted || stored && !l.unstored:
			l.home.learn(l.account, kind, text)
		case kind == openaiapi.Part:
			l.home.learnUnstored(text)
		}
	})
	l.unstored = l.unstored || unstored
}
