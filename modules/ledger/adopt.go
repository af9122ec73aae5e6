package ledger

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/certmagic"

	"github.com/openai-lb/caddy-openai-lb/internal/pools"
)

// amending and adopting are the saver's tasks of adding one journal, which logs
// nothing, and of adding all journals.
const amending, adopting = "amend", "adopt"

var (
	errJournalHeld  = errors.New("its process runs")
	errJournalMoved = errors.New("another config has another storage")
	errJournalLarge = errors.New("it is too large")
	errUnreadable   = errors.New("the page in the storage is not understood")
)

func journalError(name string, err error) error {
	return &pools.StorageError{What: "could not read a journal of the ledger", Key: name, Err: err}
}

// adopt adds the journals of ended processes to their pages in the storage, for
// all pools, and removes the journals. After an error, it is retried. It uses
// the saver only while it changes the storage, because the disk with the
// journals may hang.
func (l *Ledger) adopt() {
	to := l.journal.to.Load()
	if to == nil {
		return
	}
	if !l.adopting.CompareAndSwap(false, true) {
		l.saver.Changed()
		return
	}
	defer l.adopting.Store(false)
	err := l.adoptAll(to)
	if !l.saver.Use(adopting, func(context.Context, certmagic.Storage) error { return err }) {
		l.saver.Changed()
		return
	}
	l.adopted.Store(to)
}

func (l *Ledger) adoptAll(to *journalPlace) error {
	entries, err := os.ReadDir(to.folder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var errs []error
	if err != nil {
		errs = append(errs, journalError(to.folder, err))
	}
	running := ""
	for _, e := range entries { // in the order of their names
		id, _, isNumbered := strings.Cut(e.Name(), "-")
		if !isNumbered || !strings.HasSuffix(e.Name(), journalSuffix) || id == running || !e.Type().IsRegular() {
			continue
		}
		switch err := l.adoptFile(to, filepath.Join(to.folder, e.Name())); {
		case errors.Is(err, errJournalHeld):
			running = id // or another process adopts it
		case errors.Is(err, fs.ErrNotExist): // another process was faster
		case errors.Is(err, errJournalMoved):
			return err
		default:
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// adoptFile adds one journal to the storage and removes it. It sets aside a
// journal that can never be added.
func (l *Ledger) adoptFile(to *journalPlace, name string) error {
	file, err := os.OpenFile(name, os.O_RDWR|openSafely, 0)
	if err != nil {
		return journalError(name, err)
	}
	defer file.Close()
	if lock(file) != nil {
		return errJournalHeld
	}
	text, err := io.ReadAll(io.LimitReader(file, 2*maxJournal+1))
	switch {
	case err != nil:
		return journalError(name, err)
	case len(text) > 2*maxJournal:
		return setAside(name, errJournalLarge)
	}
	var failed, bad error
	err = errJournalMoved
	l.saver.Use(amending, func(ctx context.Context, storage certmagic.Storage) error {
		if l.journal.to.Load() != to {
			return nil
		}
		err = nil
		for key, changes := range readJournal(text) {
			switch err := amend(ctx, storage, key, changes); {
			case errors.Is(err, errUnreadable):
				bad = &pools.StorageError{What: "could not save what a journal of the ledger has", Key: key, Err: err}
			case err != nil:
				failed = &pools.StorageError{
					What: "could not save what a journal of the ledger has", Key: key, Err: err,
				}
			}
		}
		return nil
	})
	switch {
	case err != nil || failed != nil:
		return errors.Join(err, failed)
	case bad != nil:
		return setAside(name, bad)
	}
	_ = os.Remove(name) // another process would, and change nothing
	return nil
}

// setAside renames a journal so that no process reads it.
func setAside(name string, cause error) error {
	return journalError(name+".bad", errors.Join(cause, os.Rename(name, name+".bad")))
}

// IsID reports whether the text may be the id of a page: at most 32 hexadecimal
// digits.
func IsID(id string) bool {
	_, err := hex.DecodeString(id)
	return err == nil && id != "" && len(id) <= 32
}

// readJournal returns the pages in the text of a journal, by their keys in the
// storage. It ignores lines that were not written completely.
func readJournal(text []byte) map[string][]Page {
	pages := make(map[string][]Page)
	for line := range bytes.Lines(text) {
		sum, line, _ := bytes.Cut(bytes.TrimSuffix(line, []byte("\n")), []byte(" "))
		var p Page
		if checksum(line) != string(sum) || json.Unmarshal(line, &p) != nil {
			continue
		}
		key := p.key()
		if _, err := time.Parse(time.DateOnly, p.Day); err != nil || !IsID(p.ID) {
			continue
		}
		if w, ok := whereOf(key); ok && w == p.Where() && strings.Count(key, "/") == strings.Count(folder, "/")+2 {
			pages[key] = append(pages[key], p)
		}
	}
	return pages
}

// amend applies the changes of a journal to a page in the storage, unless the
// page has them already.
func amend(ctx context.Context, storage certmagic.Storage, key string, changes []Page) error {
	p := Page{ID: changes[0].ID, Pool: changes[0].Pool, Day: changes[0].Day}
	text, err := storage.Load(ctx, key)
	if err == nil {
		if err = json.Unmarshal(text, &p); err != nil {
			return errors.Join(errUnreadable, err)
		}
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
		if c.Whole {
			p.Rows = nil
			clear(at)
		}
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
