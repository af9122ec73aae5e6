package ownership

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"strings"
	"testing"
	"time"
)

func TestWhatWasSavedIsThereAfterARestart(t *testing.T) {
	alice := CallerNamed("alice")
	m := NewMemory(64 * 50)
	for i := range 1000 {
		m.Put(id(i), Owner{[]string{"a", "b", strings.Repeat("c", 900)}[i%3], CallerDigest(uint64(alice) * uint64(i%2))}, start, month)
	}
	m.Put(id(5000), Owner{Account: "a"}, start, time.Hour)
	saved := m.Save(start.Add(2 * time.Hour))

	again := NewMemory(64 * 50)
	again.Put(id(6), Owner{Account: "learned since"}, start.Add(3*time.Hour), month)
	again.Put(id(7), Owner{Account: "learned since"}, start.Add(3*time.Hour), month)
	again.Put(id(9), Owner{"learned since", alice + 1}, start.Add(3*time.Hour), month)
	n, err := again.Load(saved, start.Add(3*time.Hour))
	if err != nil || n != 998 {
		t.Fatalf("%d ids were loaded: %v", n, err)
	}
	for i := range 1000 {
		want, _ := m.Get(id(i), start)
		switch i {
		case 6, 7: // it stays its caller's, whichever caller has asked for it meanwhile
			want.Account = "learned since"
		case 9:
			want = Owner{"learned since", alice + 1}
		}
		again.wantOwner(t, id(i), start.Add(3*time.Hour), want)
	}
	again.wantNone(t, id(5000), start.Add(3*time.Hour))
	again.wantNone(t, id(1), start.Add(month))

	smaller := NewMemory(64)
	if _, err := smaller.Load(saved, start); err != nil || smaller.Len() > 64 {
		t.Errorf("%d ids, %v", smaller.Len(), err)
	}
	if n, err := NewMemory(64).Load(NewMemory(64).Save(start), start); n != 0 || err != nil {
		t.Errorf("nothing is saved as %d ids, %v", n, err)
	}
}

func TestNothingSecretIsSaved(t *testing.T) {
	m := NewMemory(100)
	m.Put(KeyOf("resp_secret"), Owner{"api.openai.com 0123", CallerNamed("alice-the-caller")}, start, month)
	saved := m.Save(start)
	for _, text := range []string{"resp_secret", "alice-the-caller"} {
		if bytes.Contains(saved, []byte(text)) {
			t.Errorf("%q is in what is saved", text)
		}
	}
}

func TestDamagedDataIsRefused(t *testing.T) {
	m := NewMemory(1000)
	for i := range 10 {
		m.Put(id(i), Owner{Account: "a"}, start, month)
	}
	saved := m.Save(start)
	for i := range saved {
		flipped := bytes.Clone(saved)
		flipped[i] ^= 4
		for name, data := range map[string][]byte{"flipped": flipped, "cut": saved[:i]} {
			again := NewMemory(1000)
			if _, err := again.Load(data, start); err == nil || again.Len() > 0 {
				t.Fatalf("%s at %d: %d ids, %v", name, i, again.Len(), err)
			}
		}
	}
	if _, err := NewMemory(64).Load([]byte(strings.Replace(string(saved), "ids 2", "ids 3", 1)), start); err == nil {
		t.Error("another version is accepted")
	}
}

// FuzzLoad loads what has the right checksum, and nothing else right.
func FuzzLoad(f *testing.F) {
	m := NewMemory(100)
	for i := range 5 {
		m.Put(id(i), Owner{"a", CallerDigest(i)}, start, month)
	}
	saved := m.Save(start)
	f.Add(saved[len(magic) : len(saved)-4])
	f.Add([]byte{255, 255, 255, 255})
	f.Add([]byte{0, 0, 0, 0, 255, 255, 255, 255})
	f.Fuzz(func(t *testing.T, body []byte) {
		data := append([]byte(magic), body...)
		data = binary.LittleEndian.AppendUint32(data, crc32.ChecksumIEEE(data))
		m := NewMemory(100)
		n, err := m.Load(data, start)
		if err != nil && (n != 0 || m.Len() != 0) {
			t.Fatalf("%d ids were added in spite of %v", m.Len(), err)
		}
		if err != nil {
			return
		}
		saved := m.Save(start)
		again := NewMemory(100)
		if k, err := again.Load(saved, start); err != nil || k != m.Len() || again.Len() != m.Len() {
			t.Fatalf("%d ids were saved and %d loaded: %v", m.Len(), k, err)
		}
	})
}
