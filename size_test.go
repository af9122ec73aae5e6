package openailb

import (
	"strings"
	"testing"
	"unsafe"

	"github.com/openai-lb/caddy-openai-lb/internal/backend"
)

// TestATransactionFitsItsSize holds the size of what each request allocates. Go
// adds 8 bytes and rounds up to a class of sizes: 2,304, then 2,688
// (runtime/sizeclasses.go).
func TestATransactionFitsItsSize(t *testing.T) {
	if size := unsafe.Sizeof(transaction{}); unsafe.Sizeof(uintptr(0)) == 8 && size > 2304-8 {
		t.Errorf("a transaction has %d bytes, want %d at most: group flags, and keep apart what few requests need", size, 2304-8)
	}
}

// TestAUseHasShortNames holds the size of what is remembered of a use, since
// clients make up names.
func TestAUseHasShortNames(t *testing.T) {
	q, to := new(request), &target{backend: new(backend.Backend)}
	q.Model, q.Route.Operation = strings.Repeat("m", 1<<20), "/"+strings.Repeat("o", 1<<20)
	if use := q.use(to); len(use.Model) > 1024 || len(use.Operation) > 1024 {
		t.Errorf("the names have %d and %d bytes", len(use.Model), len(use.Operation))
	}
}
