package keys

import "time"

// AuditedKey describes a caller's key without containing any part of it.
type AuditedKey struct {
	Caller string
	// ID distinguishes the keys of a caller. It is not logged.
	ID [32]byte
	// By is the source of the key: config or file.
	By string
	// Expires is when the key expires, or zero if it does not expire. Expired
	// reports whether it has expired.
	Expires time.Time
	Expired bool
}

// Audited returns the keys for the audit log.
func (c *Clients) Audited() []AuditedKey {
	if c == nil {
		return nil
	}
	known := *c.known.Load()
	all := make([]AuditedKey, 0, len(known))
	for key, client := range known {
		all = append(all, AuditedKey{Caller: client.Name, ID: key, By: client.source, Expires: client.expiry.at,
			Expired: client.expiry.isOver()})
	}
	return all
}
