package ownership

import "time"

// Others are the owners of a pool's ids that other replicas of the balancer
// know. Its methods are called during requests, by many goroutines at a time.
type Others interface {
	// Send tells the other replicas the owner of an id, in the background. They
	// remember it for ttl.
	Send(id Key, owner Owner, ttl time.Duration)
	// Lookup returns the owners of the ids that a caller's request names, in
	// the order of the ids. It waits for the caller's turn, and then for a
	// short time. It returns ErrNoAnswer if no answer comes in time, and for a
	// while after that without asking, or ErrCrowded if too many lookups wait.
	Lookup(c CallerDigest, ids []Key) ([]Found, error)
}

// Found is the owner of an id. TTL is how long that is valid. It is 0 if no
// replica knows the owner.
type Found struct {
	Owner
	TTL time.Duration
	// Unsure reports whether a replica in another region may know the owner,
	// although none that could be asked does.
	Unsure bool
}
