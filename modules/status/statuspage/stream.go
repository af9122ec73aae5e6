package statuspage

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/encode"
)

const (
	// interval is how often a watcher checks whether something has changed.
	interval = time.Second
	// beatInterval is the longest time without an event, so that the page knows
	// that it is up to date, and proxies do not cut the stream.
	beatInterval = 10 * time.Second
	// writeTimeout is how long a write to a browser may take.
	writeTimeout = 30 * time.Second
)

// stream sends changes, as server-sent events, until the browser leaves, the
// config is unloaded or Caddy exits. The first event has all of the part of the
// page that changes, and later ones only the lines of it that did. They are
// compressed if the browser understands gzip, which all do.
func (h *Handler) stream(w http.ResponseWriter, r *http.Request) error {
	if watchers := h.watchers.Add(1); watchers > int64(h.MaxWatchers) || caddy.Exiting() {
		h.watchers.Add(-1)
		w.Header().Set("Retry-After", "10")
		return caddyhttp.Error(http.StatusServiceUnavailable, errors.New("max_watchers: too many browsers watch the page"))
	}
	defer h.watchers.Add(-1)
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no") // proxies like nginx would hold events back
	if r.Method == http.MethodHead {
		return nil
	}
	events := events{to: w, conn: http.NewResponseController(w)}
	w.Header().Add("Vary", "Accept-Encoding")
	if len(encode.AcceptedEncodings(r, []string{"gzip"})) > 0 {
		w.Header().Set("Content-Encoding", "gzip") // so that the directive encode leaves it alone
		events.compressed, _ = gzip.NewWriterLevel(w, gzip.BestSpeed)
	}
	return h.watch(&events, r)
}

// events writes events to a browser.
type events struct {
	to         http.ResponseWriter
	conn       *http.ResponseController
	compressed *gzip.Writer // nil: they are not compressed
}

// send writes an event, so that the browser gets it at once.
func (e *events) send(event []byte, now time.Time) error {
	_ = e.conn.SetWriteDeadline(now.Add(writeTimeout)) // not every connection has one
	if e.compressed == nil {
		if _, err := e.to.Write(event); err != nil {
			return err
		}
		return e.conn.Flush()
	}
	if _, err := e.compressed.Write(event); err != nil {
		return err
	}
	return errors.Join(e.compressed.Flush(), e.conn.Flush())
}

func (h *Handler) watch(to *events, r *http.Request) error {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	var sent []byte
	var beat time.Time
	view := viewOf(r)
	for !caddy.Exiting() {
		now := time.Now()
		_, fragment, err := h.render(now, view)
		if err != nil {
			return err
		}
		changed := !bytes.Equal(fragment, sent)
		if changed || now.Sub(beat) >= beatInterval {
			if err := to.send(event(sent, fragment, now), now); err != nil {
				return nil // the browser has left
			}
			sent, beat = fragment, now
		}
		select {
		case <-ticker.C:
		case <-r.Context().Done():
			return nil
		case <-h.unloaded:
			return nil
		}
	}
	return nil
}

// event returns an event with the server's time: all of the new state if
// nothing was sent yet, or else what has changed.
func event(sent, fragment []byte, now time.Time) []byte {
	switch {
	case sent == nil:
		return eventOf("state", string(fragment), now)
	case bytes.Equal(sent, fragment):
		return eventOf("beat", 0, now)
	}
	return eventOf("change", changes(lines(sent), lines(fragment)), now)
}

func eventOf(kind string, value any, now time.Time) []byte {
	var message bytes.Buffer
	fmt.Fprintf(&message, "id: %d\nevent: %s\ndata: ", now.UnixMilli(), kind)
	data := json.NewEncoder(&message) // HTML may have lines, and JSON has none
	data.SetEscapeHTML(false)
	_ = data.Encode(value) // which ends the line
	message.WriteByte('\n')
	return message.Bytes()
}

func lines(fragment []byte) []string { return strings.Split(string(fragment), "\n") }

// change replaces lines: the number of the first one, how many they are, and
// what is there instead. The page takes the changes in their order.
type change struct {
	First, Number int
	Instead       []string
}

// MarshalJSON implements json.Marshaler. A change is a list, which is short.
func (c change) MarshalJSON() ([]byte, error) {
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false)
	err := encoder.Encode([]any{c.First, c.Number, c.Instead})
	return text.Bytes(), err
}

// changes returns what makes the lines those of another list. Where lines
// differ, it looks for the nearest one that both have.
func changes(was, is []string) (all []change) {
	for w, i := 0, 0; w < len(was) || i < len(is); {
		if w < len(was) && i < len(is) && was[w] == is[i] {
			w, i = w+1, i+1
			continue
		}
		old, added := apart(was[w:], is[i:])
		all = append(all, change{i, old, is[i : i+added]}) // the lines before it are the new ones by then
		w, i = w+old, i+added
	}
	return all
}

// farthest is how far it looks for a line that both have: some rows of a table.
const farthest = 64

// apart returns how many lines come before the nearest one that both lists
// have. An empty line says nothing.
func apart(was, is []string) (old, added int) {
	for distance := 1; distance <= farthest; distance++ {
		for old = max(0, distance-len(is)+1); old <= min(distance, len(was)-1); old++ {
			if added = distance - old; was[old] != "" && was[old] == is[added] {
				return old, added
			}
		}
	}
	return len(was), len(is)
}
