package ledger

import (
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/pools"
)

const (
	// journalDelay is the time from a change to the next write of the journal.
	journalDelay = 10 * time.Millisecond
	// maxJournal limits the size of all files together. It is reached only
	// after the storage has failed for long.
	maxJournal = 64 << 20
	// maxFile is the size at which a file is replaced by a new one with only
	// unsaved changes.
	maxFile = 8 << 20
	// diskPatience is how long a save waits until files are removed.
	diskPatience  = time.Second
	journalSuffix = ".journal"
)

var (
	errJournalFull = errors.New("it is full: the ledger could not be saved for a long time")
	errJournalGone = errors.New("another process has removed it")
)

// journal keeps changes that are not in the storage yet in local files. They
// survive a kill of the process, but not a power cut, because they are not
// synced. The next process to start adds them to the pages in the storage.
//
// A line of a file is a page with only the changed rows, their complete counts,
// and the page's number of changes. So reading a line twice, or after a later
// version of the page was saved, changes nothing. A process keeps its files
// locked until it ends.
type journal struct {
	to atomic.Pointer[journalPlace] // nil: there is no journal
	// record has the time of the last write. After a failure, changes stay
	// waiting in it until a write succeeds, and not only until the ledger is
	// saved: a journal that cannot be written protects no later changes.
	record pools.Record

	mu sync.Mutex // guards what follows. A disk may hang, so neither a request nor the storage waits for it
	// id and count are parts of the names of files, which sort by their age.
	id    string
	count int
	// files are the files with changes that may not be saved. open reports
	// whether the last one is being written. size is the size of all files.
	files []*os.File
	open  bool
	size  int
	// written is the size of the last file, and limit the size at which it is
	// replaced.
	written, limit int
	// failed reports whether writing has failed, so that nothing is written
	// until the ledger is saved again. warned reports whether this was logged.
	// hole reports whether the files lack changes; it stays true until a file
	// has all unsaved changes.
	failed, warned, hole bool
}

// journalPlace is the place of a config's journal.
type journalPlace struct {
	folder string
	logger *zap.Logger
}

// journalFolder returns the folder for the journals of a storage. It is in the
// storage's folder, or else in Caddy's. There, each storage has a separate
// folder, because storages have different pages.
func journalFolder(storage certmagic.Storage) string {
	if files, ok := storage.(*certmagic.FileStorage); ok {
		return filepath.Join(files.Path, "openai_lb", "journal")
	}
	name := fmt.Sprintf("%T", storage)
	if named, ok := storage.(fmt.Stringer); ok {
		name += named.String()
	} else if options, err := json.Marshal(storage); err == nil {
		name += string(options)
	}
	return filepath.Join(caddy.AppDataDir(), "openai_lb", "journal", fmt.Sprintf("%x", sha256.Sum256([]byte(name))))
}

func checksum(text []byte) string { return fmt.Sprintf("%08x", crc32.ChecksumIEEE(text)) }

// noted schedules a write of the journal.
func (l *Ledger) noted() {
	if l.journal.to.Load() == nil || l.due.Load() || l.due.Swap(true) {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.timer == nil {
		l.timer = time.AfterFunc(journalDelay, l.note)
	} else {
		l.timer.Reset(journalDelay)
	}
}

// note writes the changes to the journal. While it writes, further changes are
// only marked.
func (l *Ledger) note() {
	j := &l.journal
	j.mu.Lock()
	defer j.mu.Unlock()
	to, whole := j.to.Load(), j.hole || j.written > j.limit
	pages := l.changed(whole)
	if len(pages) == 0 {
		return
	}
	if to == nil {
		j.hole = true
		return
	}
	j.record.Change()
	j.record.Begin()
	if j.failed {
		j.hole = true
		return
	}
	write := j.write
	if whole {
		write = j.rewrite
	}
	if err := write(to.folder, pages); err != nil {
		if !j.warned {
			to.logger.Error("could not write the ledger's journal: a kill takes what is not saved",
				zap.String("folder", to.folder), zap.Error(err))
		}
		j.failed, j.warned, j.hole = true, true, true
		return
	}
	if j.warned {
		to.logger.Info("the ledger's journal is written again", zap.String("folder", to.folder))
	}
	j.warned = false
	j.record.End()
}

// proves reports whether the journal can be written, as far as known. After a
// failure, it tries to write an empty line. It is called when the ledger is
// saved.
func (j *journal) proves() bool {
	to := j.to.Load()
	if to == nil || !j.mu.TryLock() {
		return true
	}
	defer j.mu.Unlock()
	if !j.warned || j.record.State().Waits.IsZero() {
		return true
	}
	if j.write(to.folder, nil) != nil {
		return false
	}
	j.record.End()
	return true
}

// changed returns the pages with their changed rows, or if whole is true, with
// all rows of the pages that are not saved. It clears the marks of these rows.
func (l *Ledger) changed(whole bool) (pages []Page) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.due.Store(false) // before the shards are collected: what comes later is noted anew
	l.collect()
	for _, d := range l.days {
		rows := maps.Keys(d.changed)
		p := Page{ID: d.id, Pool: l.pool, Day: nameOf(d.number), Changes: d.changes,
			Whole: d.whole || whole && d.changes != d.saved}
		if p.Whole {
			rows = d.rows.all()
		} else if len(d.changed) == 0 {
			continue
		}
		for row := range rows {
			p.Rows = append(p.Rows, *row)
		}
		d.unmark()
		pages = append(pages, p)
	}
	return pages
}

// unmark records that no row needs to be written to the journal.
func (d *day) unmark() {
	clear(d.changed)
	d.whole = false
}

// write appends pages to the last file. The caller holds the lock.
func (j *journal) write(folder string, pages []Page) error {
	text := []byte("\n") // the last write may have failed after a part of its text
	for _, p := range pages {
		line, err := json.Marshal(p)
		if err != nil {
			return err
		}
		text = fmt.Appendf(text, "%s %s\n", checksum(line), line)
	}
	if j.size+len(text) > maxJournal {
		return errJournalFull
	}
	if !j.open || filepath.Dir(j.files[len(j.files)-1].Name()) != folder {
		if err := j.create(folder); err != nil {
			return err
		}
	}
	n, err := j.files[len(j.files)-1].Write(text)
	j.size, j.written = j.size+n, j.written+n
	return err
}

// rewrite replaces the files by one with all unsaved changes.
func (j *journal) rewrite(folder string, pages []Page) error {
	older := slices.Clone(j.files)
	j.open = false
	if err := j.write(folder, pages); err != nil {
		j.open = false
		j.drop(slices.Clone(j.files[len(older):]))
		return err
	}
	j.drop(older)
	j.hole, j.limit = false, max(maxFile, 2*j.written)
	return nil
}

// create starts a new file. It tries twice, because another process may adopt
// and remove the file before it is locked.
func (j *journal) create(folder string) error {
	if j.tryCreate(folder) == nil {
		return nil
	}
	return j.tryCreate(folder)
}

func (j *journal) tryCreate(folder string) error {
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return err
	}
	j.id = cmp.Or(j.id, newID())
	j.count++
	name := fmt.Sprintf("%s-%09d%s", j.id, j.count, journalSuffix)
	file, err := os.OpenFile(filepath.Join(folder, name), os.O_WRONLY|os.O_APPEND|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if err = lock(file); err == nil && !isThere(file) {
		err = errJournalGone // between these lines
	}
	if err != nil {
		return errors.Join(err, os.Remove(file.Name()), file.Close())
	}
	j.files, j.open, j.written, j.limit = append(j.files, file), true, 0, maxFile
	return nil
}

// isThere reports whether a file still has its name.
func isThere(file *os.File) bool {
	named, err := os.Stat(file.Name())
	opened, statErr := file.Stat()
	return err == nil && statErr == nil && os.SameFile(named, opened)
}

// turn returns the files that are not needed once all changes until now are
// saved. The next change starts a new file. If an earlier turn has started one
// already, because the storage has failed, that file stays in use. While a file
// is being written, turn returns none.
func (j *journal) turn() []*os.File {
	if !j.mu.TryLock() {
		return nil
	}
	defer j.mu.Unlock()
	j.failed = false
	if j.open && len(j.files) > 1 {
		return slices.Clone(j.files[:len(j.files)-1])
	}
	j.open = false
	return slices.Clone(j.files)
}

// removeSoon removes files that turn has returned. It waits at most
// diskPatience, so that a disk that hangs does not block the storage.
func (j *journal) removeSoon(files []*os.File) {
	if len(files) == 0 {
		return
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if j.mu.TryLock() {
			defer j.mu.Unlock()
			j.drop(files)
		}
	}()
	pools.WaitFor(done, diskPatience)
}

// drop removes those of the files that are still there. The caller holds the
// lock.
func (j *journal) drop(files []*os.File) {
	for _, file := range files {
		i := slices.Index(j.files, file)
		if i < 0 {
			continue
		}
		j.files = slices.Delete(j.files, i, i+1)
		if info, err := file.Stat(); err == nil {
			j.size -= int(info.Size())
		}
		_ = os.Remove(file.Name()) // the next process would, and change nothing
		_ = file.Close()
	}
}
