package ledger

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
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
	journalDelay = 2 * time.Millisecond
	// maxJournal is the size of all files at which they are full. The storage has failed for long then.
	maxJournal    = 64 << 20
	journalSuffix = ".journal"
)

var (
	errJournalFull = errors.New("it is full: the ledger could not be saved for a long time")
	errJournalGone = errors.New("another process has removed it")
)

// journal has what a ledger has not saved, in files that outlive a kill of the process, but not a power cut: they are not
// synced. The next process that starts adds them to the pages in the storage.
//
// A line of a file is a page with only the rows that have changed, each with all that it has, and with the number of changes.
// So it may be read twice, or after a later version of the page was saved: it changes nothing then. A process has its files
// locked, until it ends in whatever way.
type journal struct {
	to atomic.Pointer[journalPlace] // nil: there is no journal

	mu sync.Mutex // guards what follows. A disk may hang, so neither a request nor the storage waits for it
	// id and count are in the names of files, which are in their order.
	id    string
	count int
	// files are those with changes that may not be saved. open reports whether the last one is written, and size is that of all.
	files []*os.File
	open  bool
	size  int
	// failed reports whether nothing is written until the ledger is saved again, and warned whether the log says so.
	failed, warned bool
}

// journalPlace is where a config has the journal.
type journalPlace struct {
	folder string
	logger *zap.Logger
}

// journalFolder returns where the journals of a storage are: in its folder, or else in Caddy's, apart from those of other
// storages, which have other pages.
func journalFolder(storage certmagic.Storage) string {
	if files, ok := storage.(*certmagic.FileStorage); ok {
		return filepath.Join(files.Path, "openai_lb", "journal")
	}
	name := fmt.Sprintf("%T", storage)
	if named, ok := storage.(fmt.Stringer); ok {
		name += named.String()
	}
	return filepath.Join(caddy.AppDataDir(), "openai_lb", "journal", checksum([]byte(name)))
}

func checksum(text []byte) string { return fmt.Sprintf("%08x", crc32.ChecksumIEEE(text)) }

// noted has the journal written soon. The caller holds the lock of the days.
func (l *Ledger) noted() {
	switch {
	case l.due || l.journal.to.Load() == nil:
		return
	case l.timer == nil:
		l.timer = time.AfterFunc(journalDelay, l.note)
	default:
		l.timer.Reset(journalDelay)
	}
	l.due = true
}

// note writes what has changed into the journal. While it does, further changes are only marked.
func (l *Ledger) note() {
	j := &l.journal
	j.mu.Lock()
	defer j.mu.Unlock()
	to, pages := j.to.Load(), l.changed()
	if to == nil || j.failed || len(pages) == 0 {
		return
	}
	if err := j.write(to.folder, pages); err != nil {
		if !j.warned {
			to.logger.Warn("could not write the ledger's journal: a kill takes what is not saved", zap.String("folder", to.folder), zap.Error(err))
		}
		j.failed, j.warned = true, true
		return
	}
	j.warned = false
}

// changed returns the changed rows of each page, which are not marked any more.
func (l *Ledger) changed() (pages []Page) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.due = false
	for _, d := range l.days {
		if len(d.changed) == 0 {
			continue
		}
		p := Page{ID: d.id, Pool: l.pool, Day: nameOf(d.number), Changes: d.changes, Rows: make([]Row, 0, len(d.changed))}
		for _, row := range d.changed {
			p.Rows = append(p.Rows, row.Row)
			row.changed = false
		}
		clear(d.changed)
		d.changed = d.changed[:0]
		pages = append(pages, p)
	}
	return pages
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
	j.size += n
	return err
}

// create begins a file.
func (j *journal) create(folder string) error {
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
	err = lock(file)
	if at, statErr := os.Stat(file.Name()); err == nil && (statErr != nil || !isOf(at, file)) {
		err = errJournalGone // between these lines
	}
	if err != nil {
		return errors.Join(err, os.Remove(file.Name()), file.Close())
	}
	j.files, j.open = append(j.files, file), true
	return nil
}

func isOf(at fs.FileInfo, file *os.File) bool {
	info, err := file.Stat()
	return err == nil && os.SameFile(at, info)
}

// turn returns the files that are not needed when all that has changed until now is saved. The next change begins another one,
// unless that has happened before, and the storage has failed. While a file is written, it returns none.
func (j *journal) turn() []*os.File {
	if !j.mu.TryLock() {
		return nil
	}
	defer j.mu.Unlock()
	j.failed = false
	if j.open && len(j.files) > 1 {
		return j.files[:len(j.files)-1]
	}
	j.open = false
	return j.files
}

// remove removes the files that turn has returned.
func (j *journal) remove(files []*os.File) {
	if len(files) == 0 || !j.mu.TryLock() {
		return
	}
	defer j.mu.Unlock()
	for _, file := range files {
		if info, err := file.Stat(); err == nil {
			j.size -= int(info.Size())
		}
		_ = os.Remove(file.Name()) // the next process would, and change nothing
		_ = file.Close()
	}
	j.files = slices.Clone(j.files[len(files):])
}

// adopt adds the journals of processes that have ended to their pages in the storage, of any pool, and removes them.
func (l *Ledger) adopt(ctx context.Context, storage certmagic.Storage) error {
	to := l.journal.to.Load()
	if to == nil || l.adopted == to.folder {
		return nil
	}
	entries, _ := os.ReadDir(to.folder) // without it, there are none
	var text []byte
	var names []string
	running := ""
	for _, e := range entries { // in the order of their names
		id, _, isNumbered := strings.Cut(e.Name(), "-")
		if !isNumbered || !strings.HasSuffix(e.Name(), journalSuffix) || id == running {
			continue
		}
		file, err := os.OpenFile(filepath.Join(to.folder, e.Name()), os.O_RDWR, 0)
		if err != nil {
			continue // another process was faster, or may read it
		}
		defer file.Close()
		if lock(file) != nil {
			running = id // or another process adopts it
			continue
		}
		more, err := io.ReadAll(file)
		if err != nil {
			return &pools.StorageError{What: "could not read a journal of the ledger", Key: file.Name(), Err: err}
		}
		text, names = append(text, more...), append(names, file.Name())
	}
	for key, changes := range readJournal(text) {
		if err := amend(ctx, storage, key, changes); err != nil {
			return &pools.StorageError{What: "could not save what a journal of the ledger has", Key: key, Err: err}
		}
	}
	for _, name := range names {
		_ = os.Remove(name) // another process would, and change nothing
	}
	l.adopted = to.folder
	return nil
}

// readJournal returns the pages in the text of journals, by their keys in the storage. It ignores lines that were not written
// completely.
func readJournal(text []byte) map[string][]Page {
	pages := make(map[string][]Page)
	for line := range bytes.Lines(text) {
		sum, line, _ := bytes.Cut(bytes.TrimSuffix(line, []byte("\n")), []byte(" "))
		var p Page
		if checksum(line) != string(sum) || json.Unmarshal(line, &p) != nil {
			continue
		}
		key := p.key()
		if w, ok := whereOf(key); ok && w == (Where{p.Day, p.Pool, p.ID}) && strings.Count(key, "/") == strings.Count(folder, "/")+2 {
			pages[key] = append(pages[key], p)
		}
	}
	return pages
}

// amend changes a page in the storage, unless it has the changes.
func amend(ctx context.Context, storage certmagic.Storage, key string, changes []Page) error {
	p := Page{ID: changes[0].ID, Pool: changes[0].Pool, Day: changes[0].Day}
	text, err := storage.Load(ctx, key)
	if err == nil {
		err = json.Unmarshal(text, &p)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if last := changes[len(changes)-1]; last.Changes <= p.Changes {
		return nil
	}
	at := make(map[Key]int)
	for i, row := range p.Rows {
		at[row.Key] = i
	}
	for _, c := range changes {
		if c.Changes <= p.Changes {
			continue
		}
		p.Changes = c.Changes
		for _, row := range c.Rows {
			if i, known := at[row.Key]; known {
				p.Rows[i] = row
			} else {
				at[row.Key] = len(p.Rows)
				p.Rows = append(p.Rows, row)
			}
		}
	}
	p.Rows = slices.DeleteFunc(p.Rows, func(row Row) bool { return row.Use == (Use{}) })
	if text, err = json.Marshal(p); err != nil {
		return err
	}
	return storage.Store(ctx, key, text)
}
