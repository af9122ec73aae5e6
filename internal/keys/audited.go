package keys

import "time"

// AuditedKey is a key of a caller, which has no part in it.
type AuditedKey struct {
	Caller string
	// ID tells the keys of a caller apart. It is not logged.
	ID [32]byte
	// By is where the key is from: config or file.
	By string
	// Expires is when it expires, and Expired reports whether it has. Zero: it
	// does not.
	Expires time.Time
	Expired bool
}

// Audited returns the keys as the audit log has them.
func (c *Clients) Audited() []AuditedKey {
	if c == nil {
		return nil
	}
	known := *c.known.Load()
	all := make([]AuditedKey, 0, len(known))
	for key, client := range known {
		all = append(all, AuditedKey{Caller: client.Name, ID: key, By: client.by, Expires: client.expiry.at, Expired: client.expiry.isOver()})
	}
	return all
}
