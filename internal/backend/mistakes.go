package backend

import (
	"encoding/json"
	"fmt"
	"slices"
)

// Mistakes returns warnings about options of provisioned backends that have no effect, or probably not the one that was meant.
func Mistakes(backends []*Backend) (warnings []string) {
	if !slices.ContainsFunc(backends, func(b *Backend) bool { return *b.Weight > 0 }) {
		warnings = append(warnings, "every backend has weight 0, so that each one counts as drained: give one a weight of 1 or more")
	}
	first := make(map[string]*Backend)
	for _, b := range backends {
		key := b.HealthKey + " " + b.options()
		if same := first[key]; same != nil {
			warnings = append(warnings, fmt.Sprintf("backend '%s' is '%s' once more: the same URL and credential, so both throttle together", b.Name, same.Name))
			continue
		}
		first[key] = b
	}
	return warnings
}

// options returns what a backend is asked for, as text. Its name and its place among the others are left out, and so are
// its URL and its credential, of which there may be several spellings.
func (b *Backend) options() string {
	its := *b
	its.URL, its.Name, its.Priority, its.Weight = "", "", 0, nil
	its.Auth, its.APIKey, its.AuthOptions, its.Header = "", "", nil, nil
	text, _ := json.Marshal(its) // it was read from JSON
	return string(text)
}
