package openailb

import (
	"testing"
	"unsafe"
)

// TestAnExchangeFitsItsSize holds the size of what each request allocates. Go adds 8 bytes and rounds up to a class of sizes:
// 2,304, then 2,688 (runtime/sizeclasses.go).
func TestAnExchangeFitsItsSize(t *testing.T) {
	if size := unsafe.Sizeof(exchange{}); unsafe.Sizeof(uintptr(0)) == 8 && size > 2304-8 {
		t.Errorf("an exchange has %d bytes, want %d at most: group flags, and keep apart what few requests need", size, 2304-8)
	}
}
