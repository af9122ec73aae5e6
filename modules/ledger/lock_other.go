//go:build !unix || aix || solaris

package ledger

import (
	"errors"
	"os"
)

const (
	canLock    = false
	openSafely = 0
)

func lock(*os.File) error { return errors.ErrUnsupported }
