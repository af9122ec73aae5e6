//go:build !unix || aix || solaris

package ledger

import (
	"errors"
	"os"
)

const canLock = false

func lock(*os.File) error { return errors.ErrUnsupported }
