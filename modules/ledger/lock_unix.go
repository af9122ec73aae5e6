//go:build unix && !aix && !solaris

package ledger

import (
	"os"
	"syscall"
)

// canLock reports whether this system has locks that end with their process.
const canLock = true

// openSafely are the flags with which opening a file neither hangs on a special
// file nor follows a link.
const openSafely = syscall.O_NONBLOCK | syscall.O_NOFOLLOW

// lock locks a file until it is closed. It returns an error if the file is
// locked already.
func lock(file *os.File) error {
	return syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
}
