package affinity

import (
	"bytes"
	"net/http"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/sse"
)

// maxReply is how many bytes of a JSON reply are read. A reply names the object
// that was created at its beginning.
const maxReply = 1 << 20

// IDReader learns the ids in a reply while the reply passes, and before its end
// reaches the client, because the next request may come immediately.
type IDReader struct {
	placement *Placement
	account   string
	// events splits a stream into events, if no other watcher does. It is nil
	// for other replies.
	events *sse.Watcher
	// text is the part of the reply that has come. length and coding are the
	// reply's Content-Length and Content-Encoding.
	text   []byte
	length int64
	coding string
	// read is the number of ids read so far.
	read int
	// unstored reports whether a streamed response is not stored. chats reports
	// whether the first event of a streamed chat, or of a stream of a new API,
	// has come.
	unstored, chats bool
}

// Teaches reports whether the reply may contain ids to learn.
func (p *Placement) Teaches() bool { return p.ids != noIDs }

// IDReader returns the reader of the ids in a reply. It returns nil if the
// reply contains none to learn.
func (p *Placement) IDReader(account string, res *http.Response) *IDReader {
	if p.ids == noIDs || res.StatusCode < 200 || res.StatusCode >= 300 {
		return nil
	}
	r := &IDReader{placement: p, account: account, length: res.ContentLength}
	switch openaiapi.ContentType(res.Header) {
	case openaiapi.TypeJSON:
		r.coding = openaiapi.ContentCoding(res.Header)
		return r
	case openaiapi.TypeEventStream:
		r.events = new(sse.Watcher)
		r.Join(r.events)
		return r
	}
	return nil
}

// Join makes the watcher of a stream also pass its events to the reader. Watch
// need not be called then.
func (r *IDReader) Join(w *sse.Watcher) {
	each, long := w.Each, w.Long
	w.Each = func(e sse.Event) {
		if each != nil {
			each(e)
		}
		r.event(e)
	}
	w.Long = func(data []byte) {
		if long != nil {
			long(data)
		}
		r.keep(data) // the event itself comes after all parts of it
	}
}

// Watch reads the next bytes of the reply. end reports whether they are the
// last ones.
func (r *IDReader) Watch(p []byte, end bool) {
	if r.events != nil {
		if r.events.Watch(p); end {
			r.events.Finish()
		}
		return
	}
	if r.placement == nil {
		return // it is over
	}
	r.keep(p)
	if end || len(r.text) == maxReply || int64(len(r.text)) == r.length {
		text := r.text
		if r.coding != "" {
			text, _ = openaiapi.Decompress(text, r.coding, maxReply)
		}
		r.learn(text)
		r.placement, r.text = nil, nil
	}
}

func (r *IDReader) keep(p []byte) {
	r.text = append(r.text, p[:min(len(p), maxReply-len(r.text))]...)
}

// event reads an event of a stream. It skips events that contain only a part of
// a text.
func (r *IDReader) event(e sse.Event) {
	data := e.Data
	if e.TooLong {
		data, r.text = r.text, nil
	}
	switch kind := e.Kind(); {
	case r.placement.parent != "":
		if r.chats && !bytes.HasSuffix(kind, []byte(".created")) {
			return
		}
		r.chats = true // the first event may begin with anything
	case bytes.HasPrefix(kind, []byte("thread.")) && bytes.HasSuffix(kind, []byte(".created")):
	case len(kind) == 0: // a chat, of which each event has the id, and one that of what is said
		if r.chats && !bytes.Contains(data, []byte(`"audio":{"id":`)) {
			return
		}
		r.chats = true
	default:
		switch string(kind) {
		case "response.created", "response.output_item.done", "response.completed", "response.incomplete", "response.failed":
		default:
			return
		}
	}
	r.learn(data)
}

func (r *IDReader) learn(text []byte) {
	if r.placement.minter != nil {
		r.placement.learnSecret(r.account, text)
	}
	if p := r.placement; p.parent != "" {
		openaiapi.EachMade(text, p.parent, func(name openaiapi.MadeName) {
			if r.read++; r.read <= openaiapi.MaxIDs {
				p.learnMade(r.account, name)
			}
		})
		return
	}
	unstored := openaiapi.EachIDInReply(text, func(kind openaiapi.IDKind, stored bool, text []byte) {
		switch r.read++; {
		case r.read > openaiapi.MaxIDs:
		case kind == openaiapi.EncryptedContent || stored && !r.unstored:
			r.placement.learn(r.account, kind, text)
		case kind == openaiapi.PartID:
			r.placement.learnUnstored(text)
		}
	})
	r.unstored = r.unstored || unstored
}
