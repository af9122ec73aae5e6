package openailb

import (
	"testing"
	"unsafe"
)

// TestATransactionFitsItsSize holds the size of what each request allocates. Go adds 8 bytes and rounds up to a class of sizes:
// 2,304, then 2,688 (runtime/sizeclasses.go).
func TestATransactionFitsItsSize(t *testing.T) {
	if size := unsafe.Sizeof(transaction{}); unsafe.Sizeof(uintptr(0)) == 8 && size > 2304-8 {
		t.Errorf("a transaction has %d bytes, want %d at most: group flags, and keep apart what few requests need", size, 2304-8)
	}
}
