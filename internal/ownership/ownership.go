// Package ownership remembers which account stores which object, and which
// caller made it. Only the owner of a stored response, a file or a batch can
// serve requests for it.
//
// These terms have the same meaning in the rest of the project:
//
//   - An id is the name of a stored object, such as resp_… or file-…. Memory
//     and storage contain only its digest, which is a [Key].
//   - An account is a group of backends that share stored objects: those with
//     the same host and credential, or with the same name in the option
//     account.
//   - The owner of an id is the account that stores the object.
//   - A caller is a client with a name. The ids of the objects that it made
//     belong to it.
//   - An id without a caller may belong to none, because a client without a
//     name made the object. Or its caller is not known here, because the object
//     was made at another replica, or before ids were remembered. Only the
//     other replicas can say which is true. [NoCaller] records that they were
//     asked and know of no caller.
//
// A [Memory] is bounded: NewMemory says how many ids it remembers, and the
// least recently put ids are forgotten first. It gets the time only from its
// arguments. [Lookups] uses the real time, because it limits how long requests
// wait. Both are safe for concurrent use.
package ownership

import (
	"crypto/sha256"
	"encoding/binary"
)

// Owner is the account and the caller of an id.
type Owner struct {
	// Account is the account that stores the object.
	Account string
	// Caller is the caller that made the object. It is 0 if that is not known:
	// the object was made without a name, or was first seen later.
	Caller CallerDigest
}

// MayUse reports whether c may use the id, as far as the id's caller is known.
// Callers without names may use all ids.
func (o Owner) MayUse(c CallerDigest) bool { return !o.Caller.Named() || c == 0 || o.Caller == c }

// CallerDigest is a digest of a caller's name. It is 0 for callers without a
// name.
type CallerDigest uint64

// NoCaller is the caller of an id if the other replicas were asked and none of
// them knows the id's caller. A Memory stores the time until which that counts
// instead, in seconds.
const NoCaller CallerDigest = 1

// firstNamed is greater than all times in seconds that a Memory stores.
const firstNamed CallerDigest = 1 << 32

// Named reports whether the caller has a name.
func (c CallerDigest) Named() bool { return c >= firstNamed }

// CallerNamed returns the digest of this name.
func CallerNamed(name string) CallerDigest {
	if name == "" {
		return 0
	}
	sum := sha256.Sum256([]byte("caller " + name))
	return max(firstNamed, CallerDigest(binary.LittleEndian.Uint64(sum[:])))
}

// Key is the digest of an id, or of encrypted content that only its owner can
// read.
type Key [16]byte

// sample is the number of bytes of a long text that are hashed: half at its
// beginning and half at its end.
const sample = 96

// KeyOf returns the key of an id or of encrypted content. Of a long text, only
// the beginning, the end and the length count: encrypted texts begin with a
// random number and end with a digest, so no two of them share both.
func KeyOf[T string | []byte](text T) (k Key) {
	var buf [sample + 8]byte
	n := len(text)
	if n <= sample {
		copy(buf[:], text)
	} else {
		copy(buf[:], text[:sample/2])
		copy(buf[sample/2:], text[n-sample/2:])
		binary.LittleEndian.PutUint64(buf[sample:], uint64(n))
		n = len(buf) // longer than that of any short text
	}
	sum := sha256.Sum256(buf[:n])
	copy(k[:], sum[:])
	return k
}
