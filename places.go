package openailb

import (
	"encoding/json"
	"sync"

	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"

	"github.com/openai-lb/caddy-openai-lb/internal/directive"
)

// placesInFiles are the lines of handlers whose Caddyfile this process has read
// and not yet loaded, by their JSON, which is all that Caddy hands from the one
// step to the other. A reload by the command has only the JSON, and names no
// line.
var placesInFiles = struct {
	sync.Mutex
	of map[string]directive.Places
}{of: make(map[string]directive.Places)}

// maxPlaces limits the files that are read and never loaded.
const maxPlaces = 100

// rememberPlaces keeps the lines of a handler until it is provisioned.
func (h *Handler) rememberPlaces(helper httpcaddyfile.Helper) {
	text, err := json.Marshal(h)
	if err != nil {
		return // Caddy meets the same error, and reports it
	}
	places := directive.PlacesOf(helper.Dispenser)
	placesInFiles.Lock()
	defer placesInFiles.Unlock()
	if len(placesInFiles.of) >= maxPlaces {
		clear(placesInFiles.of)
	}
	placesInFiles.of[string(text)] = places
}

// takePlaces returns the lines of a handler that was not provisioned yet. They
// are nil if it was not in a Caddyfile.
func (h *Handler) takePlaces() directive.Places {
	text, err := json.Marshal(h)
	if err != nil {
		return nil
	}
	placesInFiles.Lock()
	defer placesInFiles.Unlock()
	places := placesInFiles.of[string(text)]
	delete(placesInFiles.of, string(text))
	return places
}
