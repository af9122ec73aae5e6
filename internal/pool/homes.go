package pool

import (
	"hash/fnv"
	"math"
	"sync/atomic"
	"time"
)

// digest is a hash of a name: tag consists of the highest bits of seed. It is
// the same in each process, so that replicas agree where a key lives.
type digest struct{ seed, tag uint64 }

func digestOf(name string) digest {
	h := fnv.New64a()
	_, _ = h.Write([]byte(name)) // it never fails
	seed := mix(h.Sum64())
	return digest{seed, max(1, seed>>(64-tagBits))}
}

// score returns a member's position in the key's order: the lowest score comes
// first. The score is a random number from an exponential distribution whose
// rate is the weight. So each member is first for its share of the keys, and
// adding or removing a member moves no key between other members.
func (d digest) score(key uint64, weight float64) float64 {
	random := (float64(mix(key^d.seed)>>11) + 0.5) / (1 << 53)
	return -math.Log(random) / weight
}

// mix returns a number in which each bit depends on all bits of x (the
// finalizer of SplitMix64).
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// Relocations remembers the keys that do not live at home, with the member at
// which each lives. Its size is fixed: half a megabyte for 65,536 keys. A key
// can be in any of the eight entries of its set. A new key replaces the least
// recently used entry. There is no lock, so one of two simultaneous writes may
// be lost. Then a key moves once more.
type Relocations struct {
	// sets is allocated when the first key moves.
	sets atomic.Pointer[[1 << 13]relocationSet]
}

type relocationSet [8]atomic.Uint64

// An entry consists of, from the highest bit: bits of its key, whether the key
// fled, the tag of its member, and the tick of four seconds in which it was
// last used. An entry of 0 is empty.
const (
	tagBits  = 16
	tickBits = 22 // they begin anew after half a year
	keyShift = tagBits + tickBits + 1
	fledBit  = 1 << (tagBits + tickBits)
	tick     = 4 * time.Second
	// relocationTicks is how many ticks a key without requests stays away from
	// home.
	relocationTicks = uint64(10 * time.Minute / tick)

	tagMask  = 1<<tagBits - 1
	tickMask = 1<<tickBits - 1
)

// Destruct implements caddy.Destructor, so that a usage pool can hold
// Relocations.
func (*Relocations) Destruct() error { return nil }

func ticks(now time.Time) uint64 {
	return uint64(now.Sub(began)/tick) & tickMask //nolint:gosec // only the lowest bits count
}

// relocation says where a key lives that is away from home.
type relocation struct {
	// tag is the tag of the member. It is 0 if the key lives at home.
	tag uint64
	// fled reports whether the key left its home because of a throttle or of
	// used-up limits.
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

// idle returns how many ticks ago the entry was last used.
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

// lately counts the requests of about the last minute in a ring of 16 ticks.
// Each part holds the number of its tick and the requests in that tick.
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
