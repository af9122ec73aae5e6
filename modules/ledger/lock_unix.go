//go:build unix && !aix && !solaris

package ledger

import (
	"os"
	"syscall"
)

// canLock reports whether this system has locks that end with their process.
const canLock = true

// openSafely has what is not a regular file neither hang nor be followed.
const openSafely = syscall.O_NONBLOCK | syscall.O_NOFOLLOW

// lock locks a file until it is closed. It fails if it is locked.
func lock(file *os.File) error {
	return syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
}
