package waiting

import (
	"testing"
	"time"
)

// TestARequestThatComesBackAndTakesAPlaceIsCalled has a request of a better
// tier refused by backend 0. It then waits for backend 1, whose only place it
// takes from a request of a worse tier. It is the first one there, and tries at
// once.
func TestARequestThatComesBackAndTakesAPlaceIsCalled(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Queues) {
		one := func(backend int, d time.Duration) Return {
			return Return{Key: Key{Backend: backend, Model: key.Model}, Places: 1, At: time.Now().Add(d)}
		}
		until := time.Now().Add(9 * time.Second)
		p, _ := l.Join(time.Now(), Waiter{Tier: 1}, until, 10, one(0, 0))
		want(t, p, Called, 0)
		p.Go(time.Now(), Key{Backend: 0, Model: key.Model})

		worse, _ := l.Join(time.Now(), Waiter{Tier: 2}, until, 10, one(1, time.Second))
		want(t, worse, Called, 0)
		worse.Stay(time.Now(), one(1, time.Second))

		p.Stay(time.Now(), one(1, time.Second))
		want(t, p, Called, 0) // it is the first one
		p.Stay(time.Now(), one(1, time.Second))
		want(t, p, Called, time.Second)
		p.Go(time.Now(), Key{Backend: 1, Model: key.Model})
		want(t, worse, Full, 0)
	})
}
