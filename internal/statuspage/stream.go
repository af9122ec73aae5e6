package statuspage

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

const (
	// interval is how often a watcher checks whether something has changed.
	interval = time.Second
	// beatInterval is the longest time without an event, so that the page knows that
	// it is up to date, and proxies do not cut the stream.
	beatInterval = 10 * time.Second
	// writeTimeout is how long a write to a browser may take.
	writeTimeout = 30 * time.Second
)

// stream sends changes, as server-sent events, until the browser
// leaves, the config is unloaded or Caddy exits.
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
	return h.watch(w, r)
}

func (h *Handler) watch(w http.ResponseWriter, r *http.Request) error {
	conn := http.NewResponseController(w)
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
			_ = conn.SetWriteDeadline(now.Add(writeTimeout)) // not every connection has one
			if _, err := w.Write(event(fragment, changed, now)); err != nil {
				return nil // the browser has left
			}
			if err := conn.Flush(); err != nil {
				return nil
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

// event returns an event with the server's time, and the new state if it has changed.
func event(fragment []byte, changed bool, now time.Time) []byte {
	if !changed {
		return fmt.Appendf(nil, "id: %d\nevent: beat\ndata: 0\n\n", now.UnixMilli())
	}
	var message bytes.Buffer
	fmt.Fprintf(&message, "id: %d\nevent: state\ndata: ", now.UnixMilli())
	data := json.NewEncoder(&message) // HTML may have lines, and JSON has none
	data.SetEscapeHTML(false)
	_ = data.Encode(string(fragment)) // which ends the line
	message.WriteByte('\n')
	return message.Bytes()
}
