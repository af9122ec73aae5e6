package homes

import (
	"testing"
	"time"
	"unsafe"
)

func at(seconds float64) time.Time { return began.Add(time.Duration(seconds * float64(time.Second))) }

func TestMovesAreBoundedAndTheOldestGoFirst(t *testing.T) {
	v := new(Relocations)
	if size := unsafe.Sizeof(*v); size > 1<<19 {
		t.Errorf("moves take %d bytes", size)
	}
	sameSet := func(i uint64) uint64 { return i<<40 | 5 }
	for i := range uint64(9) {
		v.Put(sameSet(i+1), Relocation{Tag: i + 1}, at(float64(60*i)))
	}
	now := at(60 * 9)
	if tag := v.Get(sameSet(1), now).Tag; tag != 0 {
		t.Errorf("the oldest is at %d, want it forgotten", tag)
	}
	for i := range uint64(8) {
		if tag := v.Get(sameSet(i+2), now).Tag; tag != i+2 {
			t.Errorf("key %d is at %d, want %d", i+2, tag, i+2)
		}
	}
	v.Forget(sameSet(4))
	v.Put(sameSet(20), Relocation{Tag: 20}, now)
	for key, want := range map[uint64]uint64{4: 0, 20: 20, 2: 2, 9: 9} {
		if tag := v.Get(sameSet(key), now).Tag; tag != want {
			t.Errorf("key %d is at %d, want %d", key, tag, want)
		}
	}
	if tag := v.Get(sameSet(20), now.Add(10*time.Minute)).Tag; tag != 20 {
		t.Error("a key was forgotten before its ten minutes")
	}
	if tag := v.Get(sameSet(20), now.Add(10*time.Minute+2*tick)).Tag; tag != 0 {
		t.Error("a key is remembered for too long")
	}
}
