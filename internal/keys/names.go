package keys

import (
	"maps"
	"slices"
)

// Names returns the names of the callers that have a key, in order.
func (c *Clients) Names() []string {
	if c == nil {
		return nil
	}
	return namesOf(*c.known.Load())
}

func namesOf(known map[blinded]client) []string {
	names := make(map[string]bool)
	for _, caller := range known {
		names[caller.Name] = true
	}
	return slices.Sorted(maps.Keys(names))
}

// Tiers returns the tiers that the file gives to callers.
func (c *Clients) Tiers() map[string]string {
	if c == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.tiers
}

// Watch calls a function with the names of the callers that have a key, and
// with the tiers that the file gives to callers: now, and each time before
// changed keys apply.
func (c *Clients) Watch(changed func(names []string, tiers map[string]string)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.changed = changed
	changed(c.Names(), c.tiers)
}
