package affinity

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ownership"
)

// TestGuessedIDsOfACallerAreBounded has a caller push out only its own.
func TestGuessedIDsOfACallerAreBounded(t *testing.T) {
	g := bounded{limit: maxGuessed}
	m, now := ownership.NewMemory(maxIDs), time.Now()
	key := func(n uint64) ownership.Key { return ownership.KeyOf(binary.LittleEndian.AppendUint64(nil, n)) }
	alice, bob := ownership.CallerNamed("alice"), ownership.CallerNamed("bob")
	add := func(c ownership.CallerDigest, n uint64) {
		m.Put(key(n), ownership.Owner{Account: "a", Caller: c}, now, time.Hour)
		g.add(m, c, key(n))
	}
	add(alice, 1)
	const more = 5
	for n := range uint64(maxGuessed + more) {
		add(bob, 2+n)
	}
	if m.Len() != 1+maxGuessed {
		t.Errorf("%d ids are remembered, want %d", m.Len(), 1+maxGuessed)
	}
	for n, want := range map[uint64]bool{1: true, 2: false, 2 + more - 1: false, 2 + more: true, 2 + maxGuessed + more - 1: true} {
		if _, known := m.Get(key(n), now); known != want {
			t.Errorf("id %d is known: %v", n, known)
		}
	}
	for c := range ownership.CallerDigest(2 * maxBounded) {
		add(alice+1+c, uint64(100_000+c))
	}
	if len(g.callers) > maxBounded {
		t.Errorf("the ids of %d callers are counted", len(g.callers))
	}
}
