package latency

import (
	"slices"
	"sync/atomic"
	"time"
)

// Kind is a kind of request: the requests in it usually wait about equally
// long. The first byte of a streamed reply comes when the model starts to
// answer, and that of a whole reply when the model has finished. Both take
// longer after a long prompt. A whole reply also takes longer if much output is
// allowed. So a kind consists of the size of the prompt, the size of the
// output, and whether the reply is streamed.
type Kind uint8

// Unfollowed is the kind of requests that are not tracked.
const Unfollowed Kind = 0

// promptSizes and outputSizes are the upper limits of the sizes of prompts, in
// bytes, and of outputs, in tokens. Above the last one is one more size.
var (
	promptSizes = [...]int64{8 << 10, 64 << 10}
	outputSizes = [...]int64{0, 256, 2048}
)

const (
	sizes = (len(promptSizes) + 1) * (len(outputSizes) + 1)
	kinds = 2 * sizes
)

// KindOf returns the kind of a request with a prompt of this many bytes and an
// output of up to this many tokens.
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

// Usual is the usual wait of a kind of request. The zero Usual knows nothing.
type Usual struct {
	// Wait is the moving average of the waits for the first byte.
	Wait time.Duration
	// Longest is the second longest wait, decreasing slowly with each reply.
	// The longest one alone may be an outlier.
	Longest time.Duration
	// Replies is the number of replies in Wait, up to enough.
	Replies int64
}

const (
	// enough is the number of replies after which the usual wait is known.
	enough = 10
	// shortest is the shortest threshold.
	shortest = 500 * time.Millisecond
	// factor is the multiple of the usual wait that is too long.
	factor = 4
	// shortestLone and loneFactor are the shortest threshold and the factor for
	// a request that moves without other evidence.
	shortestLone = time.Minute
	loneFactor   = 10
)

// Known reports whether enough replies have been seen.
func (u Usual) Known() bool { return u.Replies >= enough }

// With returns the usual wait by the replies in u and v together.
func (u Usual) With(v Usual) Usual {
	n := u.Replies + v.Replies
	if v.Replies == 0 {
		return u
	}
	wait := (u.Wait*time.Duration(u.Replies) + v.Wait*time.Duration(v.Replies)) / time.Duration(n)
	return Usual{wait, max(u.Longest, v.Longest), min(n, enough)}
}

// Threshold returns the wait from which on a request has waited too long. It is
// longer while only a few replies are known, and 0 if there is none.
func (u Usual) Threshold() time.Duration {
	if u.Replies == 0 {
		return 0
	}
	return max(max(shortest, factor*u.Wait)*enough/time.Duration(u.Replies), u.Longest)
}

// LoneThreshold returns the wait after which a request moves to another backend
// even if nothing else shows that its backend is silent, because it may be the
// only request there. It returns 0 if no reply is known.
func (u Usual) LoneThreshold() time.Duration {
	if u.Replies == 0 {
		return 0
	}
	return max(shortestLone, loneFactor*u.Wait, u.Longest)
}

// norm tracks the usual wait of a kind of request at one backend.
type norm struct {
	// usual is the moving average. longest and second are the longest and the
	// second longest wait, decreasing slowly with each reply.
	usual, longest, second, replies atomic.Int64
}

func (n *norm) get() Usual {
	return Usual{time.Duration(n.usual.Load()), time.Duration(n.second.Load()), n.replies.Load()}
}

// served records the wait for the first byte of a reply. If replies come at the
// same moment, the wait of one may be lost, which changes little. A wait that
// is much too long moves the average only as far as one that is just too long.
// unusual reports whether there was a silence when the byte came: then the wait
// does not count towards the longest waits.
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
