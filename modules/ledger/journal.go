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
	// journalDelay is how long after a change the journal is written.
	journalDelay = 10 * time.Millisecond
	// maxJournal is the size of all files at which they are full. The storage
	// has failed for long then.
	maxJournal = 64 << 20
	// maxFile is the size at which a file is replaced by one with what is not
	// saved.
	maxFile = 8 << 20
	// diskPatience is how long a save waits for files to be removed.
	diskPatience  = time.Second
	journalSuffix = ".journal"
)

var (
	errJournalFull = errors.New("it is full: the ledger could not be saved for a long time")
	errJournalGone = errors.New("another process has removed it")
)

// journal keeps the changes that are not in the storage yet in local files.
// They survive a kill of the process, but not a power cut, because they are not
// synced. The next process to start adds them to the pages in the storage.
//
// A line of a file is a page with only the changed rows, their complete counts,
// and the page's number of changes. Reading a line twice, or after a later
// version of the page was saved, changes nothing. A process keeps its files
// locked until it ends.
type journal struct {
	to atomic.Pointer[journalPlace] // nil: there is no journal
	// record is when it was written. After a failure, changes wait in it until
	// a write succeeds, and not only until the ledger is saved: a journal that
	// cannot be written protects nothing that comes.
	record pools.Record

	mu sync.Mutex // guards what follows. A disk may hang, so neither a request nor the storage waits for it
	// id and count are in the names of files, which are in their order.
	id    string
	count int
	// files are those with changes that may not be saved. open reports whether
	// the last one is written, and size is that of all.
	files []*os.File
	open  bool
	size  int
	// written is the size of the last one, and limit that at which it is
	// replaced.
	written, limit int
	// failed reports whether nothing is written until the ledger is saved
	// again, and warned whether the log says so. Then hole reports that the
	// files miss changes, until one has all that is not saved.
	failed, warned, hole bool
}

// journalPlace is where a config has the journal.
type journalPlace struct {
	folder string
	logger *zap.Logger
}

// journalFolder returns where the journals of a storage are: in its folder, or
// else in Caddy's, apart from those of other storages, which have other pages.
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

// noted has the journal written soon.
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

// note writes what has changed into the journal. While it does, further changes
// are only marked.
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
			to.logger.Warn("could not write the ledger's journal: a kill takes what is not saved", zap.String("folder", to.folder), zap.Error(err))
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

// proves reports whether the journal can be written, as far as that is known.
// After a failure, it tries again, with an empty line. It is called when the
// ledger is saved.
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

// changed returns the changed rows of each page, or all of those that are not
// saved. They are not marked any more.
func (l *Ledger) changed(whole bool) (pages []Page) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.due.Store(false) // before the shards are collected: what comes later is noted anew
	l.collect()
	for _, d := range l.days {
		rows := maps.Keys(d.changed)
		p := Page{ID: d.id, Pool: l.pool, Day: nameOf(d.number), Changes: d.changes, Whole: d.whole || whole && d.changes != d.saved}
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

// unmark records that the journal needs no row.
func (d *day) unmark() {
	clear(d.changed)
	d.whole = false
}

// write appends pages. The caller holds the lock.
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

// rewrite replaces the files by one with all that is not saved.
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

// create begins a file. Another process may adopt it before it is locked.
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

// isThere reports whether a file has its name still.
func isThere(file *os.File) bool {
	named, err := os.Stat(file.Name())
	its, statErr := file.Stat()
	return err == nil && statErr == nil && os.SameFile(named, its)
}

// turn returns the files that are not needed when all that has changed until
// now is saved. The next change begins another one, unless that has happened
// before, and the storage has failed. While a file is written, it returns none.
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

// removeSoon removes the files that turn has returned. The storage does not
// wait for a disk that hangs.
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

// drop removes files, unless that has happened. The caller holds the lock.
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
