package openailb

import (
	"encoding/json"
	"sync"

	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"

	"github.com/openai-lb/caddy-openai-lb/internal/directive"
)

// placesInFiles maps the JSON of a handler to its lines in the Caddyfile, for
// handlers that this process has read and not loaded yet. The key is the JSON
// because Caddy passes nothing else from reading to loading. A reload by the
// command sends only JSON, so its errors name no line.
var placesInFiles = struct {
	sync.Mutex
	byJSON map[string]directive.Places
}{byJSON: make(map[string]directive.Places)}

// maxPlaces limits the entries for files that are read and never loaded.
const maxPlaces = 100

// rememberPlaces stores the lines of a handler until it is provisioned.
func (h *Handler) rememberPlaces(helper httpcaddyfile.Helper) {
	text, err := json.Marshal(h)
	if err != nil {
		return // Caddy meets the same error, and reports it
	}
	places := directive.PlacesOf(helper.Dispenser)
	placesInFiles.Lock()
	defer placesInFiles.Unlock()
	if len(placesInFiles.byJSON) >= maxPlaces {
		clear(placesInFiles.byJSON)
	}
	placesInFiles.byJSON[string(text)] = places
}

// takePlaces removes and returns the lines of a handler that is about to be
// provisioned. It returns nil if the handler is not from a Caddyfile that this
// process read.
func (h *Handler) takePlaces() directive.Places {
	text, err := json.Marshal(h)
	if err != nil {
		return nil
	}
	placesInFiles.Lock()
	defer placesInFiles.Unlock()
	places := placesInFiles.byJSON[string(text)]
	delete(placesInFiles.byJSON, string(text))
	return places
}
