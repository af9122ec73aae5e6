// Package ownership remembers which account stores which object, and which
// caller made it. Only the owner of a stored response, a file or a batch can
// serve requests for it.
//
// It defines these words for the whole project:
//
//   - An id is the name of a stored object, such as resp_… or file-…. A Key
//     stands for it here, so that neither memory nor storage holds any id.
//   - An account is what shares stored objects: a host and a credential, or a
//     name that several backends were given.
//   - The owner of an id is the account that stores the object.
//   - A caller is a client with a name. The ids of the objects that it made are its
//     own. Any other id belongs to no caller, or its caller is not known here. Only
//     the other replicas can say which of the two applies.
//
// The table knows time only from its arguments. [Lookups], for those that ask
// other replicas, wait.
package ownership

import (
	"crypto/sha256"
	"encoding/binary"
)

// Owner is the account and the caller of an id.
type Owner struct {
	// Account stores the object.
	Account string
	// Caller made it. It is 0 if the caller is not known: the object was made
	// without a name, or only seen later.
	Caller Caller
}

// MayUse reports whether a caller may use the id, as far as the id's caller is
// known. Callers without names may use each other's ids.
func (o Owner) MayUse(c Caller) bool { return !o.Caller.Named() || c == 0 || o.Caller == c }

// Caller is a digest of a caller's name. It is 0 for callers without a name.
type Caller uint64

// NoCaller replaces an id's caller if the other replicas were asked, and none
// of them knows a caller. Instead, a Memory stores until when that counts, in
// seconds.
const NoCaller Caller = 1

// firstNamed is above all of these times.
const firstNamed Caller = 1 << 32

// Named reports whether the caller has a name.
func (c Caller) Named() bool { return c >= firstNamed }

// CallerNamed returns the Caller with this name.
func CallerNamed(name string) Caller {
	if name == "" {
		return 0
	}
	sum := sha256.Sum256([]byte("caller " + name))
	return max(firstNamed, Caller(binary.LittleEndian.Uint64(sum[:])))
}

// Key is the digest of an id, or of a content that only its owner can read.
type Key [16]byte

// sample is how many bytes of a long text are hashed, half of them at its
// beginning and half at its end.
const sample = 96

// KeyOf returns the key of an id or of an encrypted content. For a long
// content, only the beginning, the end and the length count: encrypted texts
// begin with a random number and end with a digest, so no two of them share
// both.
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
