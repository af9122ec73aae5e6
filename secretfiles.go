package openailb

import (
	"sync/atomic"
	"time"

	"go.uber.org/zap"
)

// secretFilesInterval is how often files with secrets are looked at.
const secretFilesInterval = time.Second

// secretFiles are files that hold secrets. They are read again as requests
// come: where there are none, it does not matter what the secrets are.
type secretFiles struct {
	logger *zap.Logger
	files  []*secretFile
	due    atomic.Int64 // Unix time in nanoseconds
}

type secretFile struct {
	holds string
	read  func() error
	// problem is what went wrong when it was last read, if anything did.
	problem atomic.Pointer[string]
}

// add has read called now and then. Its errors must not hold a secret.
func (s *secretFiles) add(holds string, read func() error) {
	s.files = append(s.files, &secretFile{holds: holds, read: read})
}

// refresh reads the files if it is time to. What cannot be read stays as it was.
func (s *secretFiles) refresh(now time.Time) {
	due := s.due.Load()
	if len(s.files) == 0 || now.UnixNano() < due || !s.due.CompareAndSwap(due, now.Add(secretFilesInterval).UnixNano()) {
		return
	}
	for _, file := range s.files {
		var problem string
		if err := file.read(); err != nil {
			problem = err.Error()
		}
		before := file.problem.Swap(&problem)
		switch {
		case problem != "" && (before == nil || *before != problem):
			s.logger.Error("secret not read again, the one before stays", zap.String("secret", file.holds), zap.String("error", problem))
		case problem == "" && before != nil && *before != "":
			s.logger.Info("secret read again", zap.String("secret", file.holds))
		}
	}
}
