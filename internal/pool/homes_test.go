package pool

import (
	"testing"
	"time"
	"unsafe"
)

func sinceBegan(seconds float64) time.Time {
	return began.Add(time.Duration(seconds * float64(time.Second)))
}

func TestMovesAreBoundedAndTheOldestGoFirst(t *testing.T) {
	v := new(Relocations)
	if size := unsafe.Sizeof(*v.sets.Load()); size > 1<<19 {
		t.Errorf("moves take %d bytes", size)
	}
	if v.forget(7); v.get(7, began) != (relocation{}) || v.sets.Load() != nil {
		t.Error("what has not moved takes memory")
	}
	sameSet := func(i uint64) uint64 { return i<<40 | 5 }
	for i := range uint64(9) {
		v.put(sameSet(i+1), relocation{tag: i + 1}, sinceBegan(float64(60*i)))
	}
	now := sinceBegan(60 * 9)
	if tag := v.get(sameSet(1), now).tag; tag != 0 {
		t.Errorf("the oldest is at %d, want it forgotten", tag)
	}
	for i := range uint64(8) {
		if tag := v.get(sameSet(i+2), now).tag; tag != i+2 {
			t.Errorf("key %d is at %d, want %d", i+2, tag, i+2)
		}
	}
	v.forget(sameSet(4))
	v.put(sameSet(20), relocation{tag: 20}, now)
	for key, want := range map[uint64]uint64{4: 0, 20: 20, 2: 2, 9: 9} {
		if tag := v.get(sameSet(key), now).tag; tag != want {
			t.Errorf("key %d is at %d, want %d", key, tag, want)
		}
	}
	if tag := v.get(sameSet(20), now.Add(10*time.Minute)).tag; tag != 20 {
		t.Error("a key was forgotten before its ten minutes")
	}
	if tag := v.get(sameSet(20), now.Add(10*time.Minute+2*tick)).tag; tag != 0 {
		t.Error("a key is remembered for too long")
	}
}
