package pools

import (
	"cmp"
	"sync"
	"time"

	"github.com/caddyserver/certmagic"
)

// Record is something that a pool keeps on disk, such as its bill: when it was
// last written, and since when a change has waited for that. A change normally
// waits for some seconds. While a disk is full, or hangs, it waits for longer,
// so a long wait shows both. A pool without requests has no changes, and shows
// neither.
type Record struct {
	Name string

	mu sync.Mutex
	// written is when all changes until then were on disk for the last time. Of
	// the changes since, changed is the oldest one that no write has begun to
	// take, and taken the oldest one that a write has begun to take. Each is
	// zero if there is none.
	written, changed, taken time.Time
	folder                  string
}

// State is the state of a Record.
type State struct {
	Name string
	// Written is when it was last written. It is zero if it never was.
	Written time.Time
	// Waits is since when the oldest change waits to be written. It is zero if
	// there is none.
	Waits time.Time
	// Folder is the folder that it is written to, for operators. It is empty
	// for a storage that is not a folder.
	Folder string
}

// UnwrittenAfter is how long a change may wait before operators get to know. A
// Saver has tried several times by then.
const UnwrittenAfter = time.Minute

// Unwritten reports whether a change has waited for too long.
func (s State) Unwritten(now time.Time) bool {
	return !s.Waits.IsZero() && now.Sub(s.Waits) >= UnwrittenAfter
}

// KeepIn sets the folder that it is written to.
func (r *Record) KeepIn(folder string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.folder = folder
}

// FolderOf returns the folder of a storage. It is empty for one that is not a
// folder.
func FolderOf(storage certmagic.Storage) string {
	if files, ok := storage.(*certmagic.FileStorage); ok {
		return files.Path
	}
	return ""
}

// Change records a change.
func (r *Record) Change() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.changed.IsZero() {
		r.changed = time.Now()
	}
}

// Begin records that the changes until now are being written.
func (r *Record) Begin() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.taken, r.changed = cmp.Or(r.taken, r.changed), time.Time{}
}

// End records that this has succeeded. After a failure, it is not called, and
// the changes still wait.
func (r *Record) End() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.taken, r.written = time.Time{}, time.Now()
}

// Drop records that no change has to be written any more.
func (r *Record) Drop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.taken, r.changed = time.Time{}, time.Time{}
}

// State returns the state of the record.
func (r *Record) State() State {
	r.mu.Lock()
	defer r.mu.Unlock()
	return State{r.Name, r.written, cmp.Or(r.taken, r.changed), r.folder}
}
