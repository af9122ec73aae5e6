// Package bubble runs tests in virtual time: in bubbles of testing/synctest,
// which the race detector survives.
//
// All timers of a bubble share what the race detector knows of them, and Go
// 1.26 lets two processors run such timers at once. That damages the race
// detector's own data, so it crashes: with SIGSEGV, or a failed CHECK of
// ThreadSanitizer (https://go.dev/issue/78156). The more timers end at the same
// moment, the more often: in a test of four replicas, in five of twelve runs.
// So a bubble has one processor while the race detector is at work. It finds
// as much: what it looks for is the order of accesses, not whether they happen
// at the same moment.
package bubble

import (
	"runtime"
	"testing"
	"testing/synctest"
)

// Test is synctest.Test. Tests that use it cannot be parallel.
func Test(t *testing.T, test func(t *testing.T)) {
	t.Helper()
	if Race {
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	}
	synctest.Test(t, test)
}
