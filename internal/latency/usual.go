package latency

import (
	"slices"
	"sync/atomic"
	"time"
)

// Kind is a kind of request: those that usually wait for about as long. The
// first byte of a streamed reply comes when the model begins to answer, and
// that of a whole one when it is done. Both take longer after a long prompt,
// and a whole one if much output is asked for.
type Kind uint8

// Unfollowed is the kind of requests that no tracker follows.
const Unfollowed Kind = 0

// The bytes of a prompt, and the tokens of output, up to which a request is of
// a size. All others are of one more.
var (
	promptSizes = [...]int64{8 << 10, 64 << 10}
	outputSizes = [...]int64{0, 256, 2048}
)

const (
	sizes = (len(promptSizes) + 1) * (len(outputSizes) + 1)
	kinds = 2 * sizes
)

// KindOf returns the kind of a request with a prompt of that many bytes that
// asks for that many tokens of output.
func KindOf(streamed bool, prompt, output int64) Kind {
	kind := 1 + sizeOf(prompt, promptSizes[:])*(len(outputSizes)+1) + sizeOf(output, outputSizes[:])
	if streamed {
		kind += sizes
	}
	return Kind(kind)
}

func sizeOf(n int64, sizes []int64) int {
	i, _ := slices.BinarySearch(sizes, n)
	return i
}

// Usual is what is usual for requests of a kind. The zero Usual knows nothing.
type Usual struct {
	// Wait is the moving average of the waits for the first byte.
	Wait time.Duration
	// Longest falls slowly from the second longest wait: one wait alone is an
	// outlier.
	Longest time.Duration
	// Replies is how many replies show it, up to enough.
	Replies int64
}

const (
	// enough is how many replies show what is usual.
	enough = 10
	// shortest is the shortest threshold.
	shortest = 500 * time.Millisecond
	// factor is how many times the usual wait is too long.
	factor = 4
	// shortestLone and loneFactor are the same for a request that moves by
	// itself.
	shortestLone = time.Minute
	loneFactor   = 10
)

// Known reports whether enough replies show what is usual.
func (u Usual) Known() bool { return u.Replies >= enough }

// With returns what the replies of both show.
func (u Usual) With(v Usual) Usual {
	n := u.Replies + v.Replies
	if v.Replies == 0 {
		return u
	}
	wait := (u.Wait*time.Duration(u.Replies) + v.Wait*time.Duration(v.Replies)) / time.Duration(n)
	return Usual{wait, max(u.Longest, v.Longest), min(n, enough)}
}

// Threshold returns how long a wait must be to be longer than usual: the
// longer, the fewer replies show what is usual. It is 0 if none does.
func (u Usual) Threshold() time.Duration {
	if u.Replies == 0 {
		return 0
	}
	return max(max(shortest, factor*u.Wait)*enough/time.Duration(u.Replies), u.Longest)
}

// LoneThreshold returns how long a wait must be so that a request moves to
// another backend by itself, although nothing else shows that its backend is
// silent: it may be the only request there. It is 0 if it is not known what is
// usual.
func (u Usual) LoneThreshold() time.Duration {
	if u.Replies == 0 {
		return 0
	}
	return max(shortestLone, loneFactor*u.Wait, u.Longest)
}

// norm is what is usual for requests of a kind at one backend.
type norm struct {
	// longest falls slowly from the longest wait, and second from the second
	// longest.
	usual, longest, second, replies atomic.Int64
}

func (n *norm) get() Usual {
	return Usual{time.Duration(n.usual.Load()), time.Duration(n.second.Load()), n.replies.Load()}
}

// served records the wait for the first byte of a reply. Replies that come at
// the same moment may overwrite each other's wait, which changes little. A wait
// that is much longer than usual moves the average only as one does that is
// just too long. One that was unusual, because the backend was silent
// meanwhile, is no long wait of those to come.
func (n *norm) served(wait time.Duration, unusual bool) {
	before := n.get()
	usual, sample := int64(before.Wait), wait
	switch before.Replies {
	case 0:
	case 1:
		usual = min(usual, factor*int64(wait)) // the first one may be the outlier
		fallthrough
	default:
		sample = min(wait, max(shortest, factor*time.Duration(usual), before.Longest))
	}
	replies := min(before.Replies+1, enough)
	n.usual.Store(usual + (int64(sample)-usual)/replies)
	n.replies.Store(replies)
	longest, second := n.longest.Load(), n.second.Load()
	longest, second = longest-longest/128, second-second/128
	switch at := int64(wait); {
	case unusual:
	case at > longest:
		longest, second = at, longest
	case at > second:
		second = at
	}
	n.longest.Store(longest)
	n.second.Store(second)
}
