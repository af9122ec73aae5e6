package backend

import (
	"encoding/json"
	"fmt"
	"slices"
)

// Mistakes returns warnings about options of provisioned backends that have no
// effect, or probably an unintended one.
func Mistakes(backends []*Backend) (warnings []string) {
	if !slices.ContainsFunc(backends, func(b *Backend) bool { return *b.Weight > 0 }) {
		warnings = append(warnings, "every backend has weight 0, so that each one counts as drained: give one a weight of 1 or more")
	}
	first := make(map[string]*Backend)
	for _, b := range backends {
		key := b.HealthKey + " " + b.options()
		if other := first[key]; other != nil {
			warnings = append(warnings,
				fmt.Sprintf("backend '%s' is '%s' once more: the same URL and credential, so both throttle together",
					b.Name, other.Name))
			continue
		}
		first[key] = b
	}
	return warnings
}

// options returns the options in which two blocks for one server may differ on
// purpose, as text. These are all but those that find the server (the URL and
// the credential, which may have several spellings), that name and rank the
// backend, and that check whether it is back.
func (b *Backend) options() string {
	text, _ := json.Marshal(b) // its options were read from JSON
	var sent map[string]json.RawMessage
	_ = json.Unmarshal(text, &sent)
	for _, name := range []string{
		"url", "api_key", "auth", "auth_options", "name", "priority", "weight",
		"health_uri", "health_interval", "health_status",
	} {
		delete(sent, name)
	}
	text, _ = json.Marshal(sent)
	return string(text)
}
