package pool

import (
	"hash/fnv"
	"math"
	"sync/atomic"
	"time"
)

// digest is a name as numbers: seed is random, and tag is part of it. They are
// the same in each process, so that replicas agree where a key lives.
type digest struct{ seed, tag uint64 }

func digestOf(name string) digest {
	h := fnv.New64a()
	_, _ = h.Write([]byte(name)) // it never fails
	seed := mix(h.Sum64())
	return digest{seed, max(1, seed>>(64-tagBits))}
}

// score returns a member's place in the order of a key: the lowest comes first.
// It is a random number of an exponential distribution whose rate is the
// weight, so each member is first for its share of the keys, and a member that
// comes or goes changes nothing for the keys of others.
func (d digest) score(key uint64, weight float64) float64 {
	random := (float64(mix(key^d.seed)>>11) + 0.5) / (1 << 53)
	return -math.Log(random) / weight
}

// mix makes a number of which each bit depends on all bits of x (the finalizer
// of SplitMix64).
func mix(x uint64) uint64 {
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
	// sets are made for the first key that moves.
	sets atomic.Pointer[[1 << 13]relocationSet]
}

type relocationSet [8]atomic.Uint64

// An entry has, from the top: bits of its key, whether it fled, the tag of its
// member, and when it was last used, in ticks of four seconds. 0 is no entry.
const (
	tagBits  = 16
	tickBits = 22 // they begin anew after half a year
	keyShift = tagBits + tickBits + 1
	fledBit  = 1 << (tagBits + tickBits)
	tick     = 4 * time.Second
	// relocationTicks is for how many ticks a key stays at a member without a
	// request.
	relocationTicks = uint64(10 * time.Minute / tick)

	tagMask  = 1<<tagBits - 1
	tickMask = 1<<tickBits - 1
)

// Destruct implements caddy.Destructor, so that a usage pool can hold
// Relocations.
func (*Relocations) Destruct() error { return nil }

func ticks(now time.Time) uint64 { return uint64(now.Sub(began)/tick) & tickMask } //nolint:gosec // only the lowest bits count

// relocation is where a key lives that is not at home.
type relocation struct {
	// tag is that of the member. 0: the key is at home.
	tag uint64
	// fled reports whether the key left its home because of a throttle.
	fled bool
}

func entryOf(key uint64, to relocation, now time.Time) uint64 {
	entry := key>>keyShift<<keyShift | to.tag<<tickBits | ticks(now)
	if to.fled {
		entry |= fledBit
	}
	return entry
}

func isOf(entry, key uint64) bool { return entry != 0 && (entry^key)>>keyShift == 0 }

// idle returns for how many ticks the entry was not used.
func idle(entry uint64, now time.Time) uint64 { return (ticks(now) - entry) & tickMask }

// set returns the set of a key, or nil if no key has moved.
func (v *Relocations) set(key uint64) *relocationSet {
	sets := v.sets.Load()
	if sets == nil {
		return nil
	}
	return &sets[key%uint64(len(sets))]
}

func (v *Relocations) get(key uint64, now time.Time) relocation {
	set := v.set(key)
	if set == nil {
		return relocation{}
	}
	for i := range set {
		if e := set[i].Load(); isOf(e, key) && idle(e, now) <= relocationTicks {
			return relocation{tag: e >> tickBits & tagMask, fled: e&fledBit != 0}
		}
	}
	return relocation{}
}

func (v *Relocations) put(key uint64, to relocation, now time.Time) {
	if v.sets.Load() == nil {
		v.sets.CompareAndSwap(nil, new([1 << 13]relocationSet))
	}
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

// forget records that the key lives at home.
func (v *Relocations) forget(key uint64) {
	set := v.set(key)
	if set == nil {
		return
	}
	for i := range set {
		if e := set[i].Load(); isOf(e, key) {
			set[i].CompareAndSwap(e, 0)
		}
	}
}

// lately counts the requests of about the last minute. Each part has the tick
// that it is of, and how many requests came then.
type lately struct{ parts [16]atomic.Uint64 }

const countBits = 32

func (l *lately) add(now time.Time) {
	t := ticks(now)
	part := &l.parts[t%uint64(len(l.parts))]
	if old := part.Load(); old>>countBits != t && part.CompareAndSwap(old, t<<countBits|1) {
		return
	}
	part.Add(1)
}

func (l *lately) count(now time.Time) (n uint64) {
	for i := range l.parts {
		if part := l.parts[i].Load(); (ticks(now)-part>>countBits)&tickMask < uint64(len(l.parts)) {
			n += part & (1<<countBits - 1)
		}
	}
	return n
}
