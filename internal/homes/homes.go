// Package homes knows at which member of a pool the requests of a key live, whose cache has the
// beginning of their prompts. The home of a key is the first member in the order of its
// [Digest.Score]. [Relocations] remember the keys that live elsewhere. It gets the time only from
// its arguments.
package homes

import (
	"hash/fnv"
	"math"
	"sync/atomic"
	"time"
)

// Digest is a name as numbers: seed is random, and Tag is part of it. They are the
// same in each process, so that replicas agree where a key lives.
type Digest struct{ seed, Tag uint64 }

// DigestOf returns the digest of a member's name.
func DigestOf(name string) Digest {
	h := fnv.New64a()
	_, _ = h.Write([]byte(name)) // it never fails
	seed := Mix(h.Sum64())
	return Digest{seed, max(1, seed>>(64-tagBits))}
}

// Score returns a member's place in the order of a key: the lowest comes first. It
// is a random number of an exponential distribution whose rate is the weight, so
// each member is first for its share of the keys, and a member that comes or
// goes changes nothing for the keys of others.
func (d Digest) Score(key uint64, weight float64) float64 {
	random := (float64(Mix(key^d.seed)>>11) + 0.5) / (1 << 53)
	return -math.Log(random) / weight
}

// Mix makes a number of which each bit depends on all bits of x (the finalizer
// of SplitMix64).
func Mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// Relocations remembers which keys do not live at home: relocated, they live at
// another member. Its size is fixed, at half a
// megabyte for 65,536 keys, and it has no lock: a key has one set of eight
// entries, of which the least recently used one is replaced first. If two
// requests write at the same moment, one write may be lost. Then a key moves
// once more.
type Relocations struct {
	sets [1 << 13][8]atomic.Uint64
}

// An entry has, from the top: bits of its key, whether it fled, the tag of its member,
// and when it was last used, in ticks of four seconds. 0 is no entry.
const (
	tagBits  = 16
	tickBits = 22 // they begin anew after half a year
	keyShift = tagBits + tickBits + 1
	fledBit  = 1 << (tagBits + tickBits)
	tick     = 4 * time.Second
	// stays is for how many ticks a key stays at a member without a request.
	stays = uint64(10 * time.Minute / tick)

	tagMask  = 1<<tagBits - 1
	tickMask = 1<<tickBits - 1
)

// Destruct implements caddy.Destructor, so that a usage pool can hold Relocations.
func (*Relocations) Destruct() error { return nil }

// began is when the process started. Long times are measured from there: if a wall
// clock is set, all times measured with it seem older, or newer.
var began = time.Now()

func ticks(now time.Time) uint64 { return uint64(now.Sub(began)/tick) & tickMask } //nolint:gosec // only the lowest bits count

// Relocation is where a key lives that is not at home.
type Relocation struct {
	// Tag is that of the member. 0: the key is at home.
	Tag uint64
	// Fled reports whether the key left its home because of a throttle.
	Fled bool
}

// entryOf returns what is remembered of a key's relocation.
func entryOf(key uint64, to Relocation, now time.Time) uint64 {
	entry := key>>keyShift<<keyShift | to.Tag<<tickBits | ticks(now)
	if to.Fled {
		entry |= fledBit
	}
	return entry
}

// isOf reports whether the entry is that of the key.
func isOf(entry, key uint64) bool { return entry != 0 && (entry^key)>>keyShift == 0 }

// idle returns for how many ticks the entry was not used.
func idle(entry uint64, now time.Time) uint64 { return (ticks(now) - entry) & tickMask }

func (v *Relocations) set(key uint64) *[8]atomic.Uint64 { return &v.sets[key%uint64(len(v.sets))] }

// Get returns where the key moved.
func (v *Relocations) Get(key uint64, now time.Time) Relocation {
	set := v.set(key)
	for i := range set {
		if e := set[i].Load(); isOf(e, key) && idle(e, now) <= stays {
			return Relocation{Tag: e >> tickBits & tagMask, Fled: e&fledBit != 0}
		}
	}
	return Relocation{}
}

// Put records that the key moved.
func (v *Relocations) Put(key uint64, to Relocation, now time.Time) {
	set, entry := v.set(key), entryOf(key, to, now)
	place := &set[0]
	for i := range set {
		e := set[i].Load()
		if e == entry {
			return
		}
		if isOf(e, key) {
			place = &set[i]
			break
		}
		if oldest := place.Load(); oldest != 0 && (e == 0 || idle(e, now) > idle(oldest, now)) {
			place = &set[i]
		}
	}
	place.Store(entry)
}

// Forget records that the key lives at home.
func (v *Relocations) Forget(key uint64) {
	set := v.set(key)
	for i := range set {
		if e := set[i].Load(); isOf(e, key) {
			set[i].CompareAndSwap(e, 0)
		}
	}
}

// Lately counts the requests of about the last minute. Each part has the tick that it
// is of, and how many requests came then.
type Lately struct{ parts [16]atomic.Uint64 }

const countBits = 32

// Add counts a request.
func (l *Lately) Add(now time.Time) {
	t := ticks(now)
	part := &l.parts[t%uint64(len(l.parts))]
	if old := part.Load(); old>>countBits != t && part.CompareAndSwap(old, t<<countBits|1) {
		return
	}
	part.Add(1)
}

// Count returns how many requests there were.
func (l *Lately) Count(now time.Time) (n uint64) {
	for i := range l.parts {
		if part := l.parts[i].Load(); (ticks(now)-part>>countBits)&tickMask < uint64(len(l.parts)) {
			n += part & (1<<countBits - 1)
		}
	}
	return n
}
