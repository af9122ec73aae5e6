package replay

import "testing"

func TestEverySizeHasRoomAndLittleToSpare(t *testing.T) {
	last := -1
	for n := 1; n <= 64<<20; n += 1 + n/10_000 {
		i, size := class(n)
		if size < n || n > 1<<10 && size > n+n/16+1 {
			t.Fatalf("%d bytes get a buffer of %d", n, size)
		}
		if again, same := class(size); again != i || same != size {
			t.Fatalf("a buffer of %d bytes is of class %d, and goes back to %d", size, i, again)
		}
		if i != last && i != last+1 {
			t.Fatalf("after class %d comes %d", last, i)
		}
		last = i
	}
	if last, _ = class(64 << 20); last != classes-1 {
		t.Errorf("the last class is %d, want %d", last, classes-1)
	}
}

func TestABufferComesBackEmptyAndWhole(t *testing.T) {
	b := GetBuffer(5000)
	size := cap(b.Bytes)
	b.Bytes = append(b.Bytes, "text"...)[2:]
	b.Put()
	for range 100 { // the race detector drops some
		if b = GetBuffer(size); len(b.Bytes) != 0 || cap(b.Bytes) != size {
			t.Fatalf("it has %d bytes, and room for %d, want 0 and %d", len(b.Bytes), cap(b.Bytes), size)
		}
		b.Put()
	}
}

func TestALargeBufferIsNotKept(t *testing.T) {
	b := GetBuffer(65 << 20)
	if cap(b.Bytes) != 65<<20 {
		t.Errorf("it has room for %d bytes", cap(b.Bytes))
	}
	b.Bytes = append(b.Bytes, 'x')
	if b.Put(); len(b.Bytes) != 1 {
		t.Error("it was taken back")
	}
	(*Buffer)(nil).Put()
}
