package pool

import (
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"
	"unsafe"
)

// withKeys makes a pool that keeps keys together.
func withKeys(t testing.TB, members ...string) (testPool, map[string]*Member) {
	p, byName := poolThatTells(t, members)
	p.Relocations = new(Relocations)
	return p, byName
}

// pickKey tells whom a request of this key gets at a time, and the result. The
// request is over at once.
func pickKey(p testPool, key uint64, now time.Time) (string, Result) {
	r := &asks{model: "m", cost: 1, affinity: Affinity{Key: key}}
	m := p.Pick(r, now)
	if m == nil {
		return "nobody", ""
	}
	m.Release()
	return m.Name, r.affinity.Result
}

func wantKeyAt(t *testing.T, p testPool, key uint64, now time.Time, want string, result Result) {
	t.Helper()
	if got, came := pickKey(p, key, now); got != want || came != result {
		t.Errorf("after %v the key got %s (%s), want %s (%s)", now.Sub(start), got, came, want, result)
	}
}

// keysOf returns keys that live at this member, in the state that the pool has.
func keysOf(p testPool, name string, n int) (keys []uint64) {
	for key := uint64(1); len(keys) < n; key++ {
		if got, _ := pickKey(p, mix(key), start); got == name {
			keys = append(keys, mix(key))
		}
	}
	return keys
}

func TestKeysAreSharedByWeightAndStayWhenMembersComeAndGo(t *testing.T) {
	const keys = 20_000
	three, _ := withKeys(t, "a:1:1", "b:1:2", "c:1:3")
	two, _ := withKeys(t, "c:1:3", "a:1:1") // in another order
	counts := make(map[string]int)
	for i := range uint64(keys) {
		got, _ := pickKey(three, mix(i+1), start)
		counts[got]++
		if after, _ := pickKey(two, mix(i+1), start); got != "b" && after != got {
			t.Fatalf("a key of %s went to %s because b is gone", got, after)
		}
		if again, result := pickKey(three, mix(i+1), at(60)); again != got || result != Hit {
			t.Fatalf("a key of %s went to %s (%s)", got, again, result)
		}
	}
	for name, share := range map[string]float64{"a": 1. / 6, "b": 2. / 6, "c": 3. / 6} {
		if part := float64(counts[name]) / keys; math.Abs(part-share) > 0.01 {
			t.Errorf("%s has %.3f of the keys, want %.3f", name, part, share)
		}
	}
}

func TestAKeyStaysWhereItMovedForTenIdleMinutes(t *testing.T) {
	p, members := withKeys(t, "a", "b", "c")
	key := keysOf(p, "a", 1)[0]
	members["a"].CoolDown(failure(5), start)
	second, result := pickKey(p, key, at(1))
	if second == "a" || result != Move {
		t.Fatalf("the key got %s (%s)", second, result)
	}
	minutes := func(n float64) time.Time { return at(60 * n) }
	for _, now := range []time.Time{at(2), at(10), minutes(10), minutes(19.9), minutes(29.8)} {
		wantKeyAt(t, p, key, now, second, Hit)
	}
	wantKeyAt(t, p, key, minutes(40), "a", Hit) // it was idle
	// home is not forgotten if the second one is out, too
	members["a"].CoolDown(failure(5), minutes(40))
	wantKeyAt(t, p, key, minutes(40), second, Move)
	members[second].CoolDown(throttle(60, 1), minutes(41))
	wantKeyAt(t, p, key, minutes(41), "a", Move)
	wantKeyAt(t, p, key, minutes(43), "a", Hit)
}

func TestKeysThatAThrottleDroveAwayReturnWhileTheirPlaceHasMoreThanItsShare(t *testing.T) {
	p, members := withKeys(t, "a:1:9", "b:1:1")
	keys := keysOf(p, "a", 31)
	key, keys := keys[30], keys[:30]
	members["a"].CoolDown(throttle(1, 1), start)
	for _, key := range keys {
		wantKeyAt(t, p, key, at(0.5), "b", Move)
	}
	wantKeyAt(t, p, keys[0], at(1), "a", Move) // b had more than its share, and this is the probe
	wantKeyAt(t, p, keys[1], at(1.05), "b", Hit)
	wantKeyAt(t, p, key, at(1.05), "b", Move) // because of the probe
	for _, key := range append(keys[1:], key) {
		wantKeyAt(t, p, key, at(2), "a", Move)
		wantKeyAt(t, p, key, at(2), "a", Hit)
	}
	// a key does not return if its place has no more than its share
	members["a"].CoolDown(throttle(1, 1), at(300))
	wantKeyAt(t, p, keys[0], at(300.5), "b", Move)
	for i, key := range keys[1:] {
		wantKeyAt(t, p, key, at(302+float64(i)), "a", Hit)
	}
	for _, seconds := range []float64{335, 340, 345} {
		wantKeyAt(t, p, keys[0], at(seconds), "b", Hit)
	}
	wantKeyAt(t, p, keys[0], at(380), "a", Move) // a had few of the last minute's
}

func TestAKeyGoesBackToABetterPriority(t *testing.T) {
	p, members := withKeys(t, "a:1:1", "b:1:1", "c:2:1", "d:2:1")
	keys := keysOf(p, "a", 20)
	for _, name := range []string{"a", "b"} {
		members[name].CoolDown(throttle(5, 1), start)
	}
	there := make(map[uint64]string)
	for _, key := range keys {
		name, result := pickKey(p, key, at(1))
		if there[key] = name; result != Move || name != "c" && name != "d" {
			t.Fatalf("the key got %s (%s)", name, result)
		}
		wantKeyAt(t, p, key, at(2), name, Hit)
	}
	if names := slices.Compact(slices.Sorted(maps.Values(there))); len(names) != 2 {
		t.Errorf("all keys went to %v, want them at both", names)
	}
	for _, key := range keys {
		name, result := pickKey(p, key, at(6))
		if result != Move || name != "a" {
			t.Errorf("with the better priority back the key got %s (%s), want its home a", name, result)
		}
		wantKeyAt(t, p, key, at(7), "a", Hit)
	}
}

func TestARequestThatFailedOverTakesItsKeyWithIt(t *testing.T) {
	p, members := withKeys(t, "a", "b", "c")
	key := keysOf(p, "a", 1)[0]
	r := &asks{model: "m", affinity: Affinity{Key: key}, tried: []*Member{members["a"]}}
	second := p.Pick(r, start) // a failed, and has no cooldown yet
	if second == nil || r.affinity.Result != Move {
		t.Fatalf("got %v (%s)", second, r.affinity.Result)
	}
	second.Release()
	wantKeyAt(t, p, key, at(1), second.Name, Hit)
}

func TestAHotKeyPutsNobodyOverItsBound(t *testing.T) {
	for _, weights := range [][]int{{1, 1, 1}, {1, 2, 5}, {100, 1, 1}, {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}} {
		names := make([]string, len(weights))
		for i := range names {
			names[i] = string(rune('a' + i))
		}
		p, _ := withKeys(t, names...)
		Random = rand.Float64
		sum := 0
		for i, m := range p.Members {
			m.Weight = weights[i]
			sum += m.Weight
		}
		var wait sync.WaitGroup
		const requests = 600
		for range 30 {
			wait.Go(func() {
				for range requests / 30 {
					p.Pick(&asks{model: "m", affinity: Affinity{Key: 7}}, start)
				}
			})
		}
		wait.Wait()
		var total int64
		for _, m := range p.Members {
			share := requests * float64(m.Weight) / float64(sum)
			bound := int64(math.Ceil(max(1.25*share, share+2))) + 1
			if m.InFlight() > bound {
				t.Errorf("weights %v: weight %d has %d in flight, over its bound of %d", weights, m.Weight, m.InFlight(), bound)
			}
			total += m.InFlight()
		}
		if total != requests {
			t.Errorf("weights %v: %d in flight, want %d", weights, total, requests)
		}
	}
}

// TestAKeyThatOverflowedStaysWhereItWent because its prompt is cached there
// now.
func TestAKeyThatOverflowedStaysWhereItWent(t *testing.T) {
	p, members := withKeys(t, "a", "b", "c")
	keys := keysOf(p, "a", 6)
	second := ""
	for i, key := range keys {
		r := &asks{model: "m", affinity: Affinity{Key: key}}
		m := p.Pick(r, start)
		// of 6 in flight, each of three may have a share of 2, and 3 more
		if home := i < 5; home != (m.Name == "a") || home != (r.affinity.Result == Hit) {
			t.Fatalf("key %d got %s (%s)", i+1, m.Name, r.affinity.Result)
		}
		second = m.Name
	}
	for _, m := range members {
		for m.InFlight() > 0 {
			m.Release()
		}
	}
	wantKeyAt(t, p, keys[4], at(1), "a", Hit)
	wantKeyAt(t, p, keys[5], at(1), second, Hit)
	wantKeyAt(t, p, keys[5], at(601), second, Hit)
	wantKeyAt(t, p, keys[5], at(1300), "a", Hit) // it was idle
	members["a"].MaxRequests = 1
	if m := p.Pick(&asks{model: "m", affinity: Affinity{Key: keys[0]}}, at(1301)); m.Name != "a" {
		t.Fatal("it is not at home")
	}
	name, result := pickKey(p, keys[0], at(1302))
	if name == "a" || result != Miss {
		t.Errorf("got %s (%s), want a miss elsewhere: a is full", name, result)
	}
	members["a"].Release()
	wantKeyAt(t, p, keys[0], at(1303), name, Hit)
}

func TestAKeyIsTheChoiceBeforeAnyPolicy(t *testing.T) {
	p, members := withKeys(t, "a", "b")
	asked := 0
	*p.policy = func([]*Member) *Member {
		asked++
		return members["b"]
	}
	key := keysOf(p, "a", 1)[0]
	asked = 0
	wantKeyAt(t, p, key, start, "a", Hit)
	if asked > 0 {
		t.Error("the policy chose for a request with a key")
	}
	wantPick(t, p, 1, start, "b")
	p.Relocations = nil
	if name, result := pickKey(p, key, start); name != "b" || result != "" {
		t.Errorf("without the option the key got %s (%s)", name, result)
	}
}

// TestAKeyReordersAndNeverFilters compares, in random states of a pool, a
// request with a key to the same request without.
func TestAKeyReordersAndNeverFilters(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	served := 0
	for range 500 {
		p, members := withKeys(t, "a:1:1", "b:1:2", "c:2:1", "d:2:3", "e:3:1", "f:3:0")
		var tried []*Member
		for _, m := range members {
			switch random.IntN(7) {
			case 0:
				m.CoolDown(throttle(10, 1), start)
			case 1:
				m.CoolDown(failure(10), start)
			case 2:
				m.CoolDown(throttle(0.5, 1), start) // due
			case 3:
				tried = append(tried, m)
			case 4:
				m.MaxRequests = 1
				place{m, 0}.reserve()
			case 5:
				m.Drain(Order{})
			}
		}
		now := at(1)
		for range 3 {
			plain := &asks{model: "m", cost: 1, tried: tried}
			_, best, _ := p.choose(plain.of(p.Pool), now)
			keyed := &asks{model: "m", cost: 1, tried: tried, affinity: Affinity{Key: random.Uint64()}}
			to, rank, _ := p.choose(keyed.of(p.Pool), now)
			other, _, _ := p.choose(plain.of(p.Pool), now)
			if rank.rank != best.rank || (to.Member == nil) != (other.Member == nil) {
				t.Fatalf("with a key the rank is %v, without %v", rank, best)
			}
			if to.Member == nil {
				break
			}
			served++
			if to.Priority != other.Priority || !p.isOf(best, to.Member, keyed.of(p.Pool), now) {
				t.Fatalf("with a key the priority is %d, without %d", to.Priority, other.Priority)
			}
			if m := p.Pick(keyed, now); m == nil {
				t.Fatal("nobody takes a request that somebody could serve")
			}
		}
		p.Close()
	}
	if served < 500 {
		t.Errorf("%d requests were served: the test shows little", served)
	}
}

func TestAPickByKeyAllocatesNothing(t *testing.T) {
	p := sixteen(t)
	p.Relocations = new(Relocations)
	r := (&asks{model: "m", cost: 1}).of(p.Pool)
	if n := testing.AllocsPerRun(1000, func() {
		r.Affinity.Key = mix(r.Affinity.Key + 1)
		p.Pool.Pick(r, start).Release()
	}); n != 0 {
		t.Errorf("a pick by key allocates %v times", n)
	}
}

func BenchmarkPickByKey(b *testing.B) {
	p := sixteen(b)
	p.Relocations = new(Relocations)
	b.ReportAllocs()
	r := (&asks{model: "m", cost: 1}).of(p.Pool)
	for b.Loop() {
		r.Affinity.Key = mix(r.Affinity.Key + 1)
		p.Pool.Pick(r, start).Release()
	}
}

// stepped is the time after somebody set the wall clock, forward or back. The
// monotonic clock, which is the other part of a time.Time, goes on as before.
func stepped(now time.Time, by time.Duration) time.Time {
	parts := (*struct {
		wall uint64 // the seconds begin at bit 30
		ext  int64
		loc  *time.Location
	})(unsafe.Pointer(&now))
	parts.wall += uint64(by/time.Second) << 30
	return now
}

func TestAStepOfTheWallClockChangesNothingThatIsRemembered(t *testing.T) {
	p, members := withKeys(t, "a", "b", "c")
	key, now := keysOf(p, "a", 1)[0], time.Now()
	members["a"].CoolDown(throttle(300, 1), now)
	second, _ := pickKey(p, key, now)
	third := map[string]string{"b": "c", "c": "b"}[second]
	members[third].CoolDown(Refusal{Reason: Reason{Class: "unreachable"}, Whole: true, Unreachable: true}, now)
	now = now.Add(2 * time.Second)
	for _, by := range []time.Duration{-time.Hour, time.Hour} {
		after := stepped(now, by)
		if after.Round(0).Sub(now.Round(0)) != by || after.Sub(now) != 0 {
			t.Fatal("a time.Time has other parts now")
		}
		if got, result := pickKey(p, key, after); got != second || result != Hit {
			t.Errorf("after a step of %v the key got %s (%s), want %s, to which it moved", by, got, result, second)
		}
		if due := p.Rechecks(after); len(due) != 1 {
			t.Errorf("after a step of %v, %d rechecks are due, want %s", by, len(due), third)
		} else {
			due[0].EndRecheck()
		}
	}
}
