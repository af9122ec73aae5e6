package ledger

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/certmagic"

	"github.com/openai-lb/caddy-openai-lb/internal/pools"
)

// Page is the use of a pool's requests on one day, as counted by one process.
type Page struct {
	// ID is unique to the page.
	ID   string `json:"id"`
	Pool string `json:"pool"`
	// Day is a date, in UTC.
	Day string `json:"day"`
	// Changes is the number of changes. It is greater in a later version of the
	// page.
	Changes int64 `json:"changes"`
	Rows    []Row `json:"rows"`
	// Whole reports whether a page in a journal has all rows, and not only
	// changed ones.
	Whole bool `json:"whole,omitempty"`
	// Unreadable is the error of a page in the storage that cannot be parsed.
	// The page then has no rows.
	Unreadable string `json:"unreadable,omitempty"`
}

// folder is the folder of the pages in the storage. A page is
// <day>/<pool>_<id>.json in it.
const folder = "openai_lb/ledger"

const suffix = ".json"

// reading is the saver's task of reading pages.
const reading = "read"

func (p *Page) key() string {
	return folder + "/" + p.Day + "/" + url.PathEscape(p.Pool) + "_" + p.ID + suffix
}

// Where is a page's key in the storage, parsed.
type Where struct{ Day, Pool, ID string }

// Where returns the place of the page.
func (p *Page) Where() Where { return Where{p.Day, p.Pool, p.ID} }

// whereOf parses a key. It reports false for other keys that a storage may have
// there, such as those of files that are being written.
func whereOf(key string) (w Where, ok bool) {
	rest, ok := strings.CutPrefix(key, folder+"/")
	day, name, isFile := strings.Cut(rest, "/")
	name, isPage := strings.CutSuffix(name, suffix)
	i := strings.LastIndexByte(name, '_')
	if !ok || !isFile || !isPage || i < 0 {
		return w, false
	}
	pool, err := url.PathUnescape(name[:i])
	return Where{day, pool, name[i+1:]}, err == nil
}

// save saves the changed pages. It is the save function of the Saver. Once a
// day, it deletes old pages.
func (l *Ledger) save(ctx context.Context, storage certmagic.Storage) error {
	journals := l.journal.turn()
	for _, p := range l.pages(func(d *day) bool { return d.changes != d.saved }) {
		text, err := json.Marshal(p)
		if err == nil {
			err = storage.Store(ctx, p.key(), text)
		}
		if err != nil {
			return &pools.StorageError{What: "could not save the ledger", Key: p.key(), Err: err}
		}
		l.saved(p)
	}
	l.journal.removeSoon(journals)
	go func() { // the storage does not wait for a disk that hangs
		if !l.journal.proves() {
			l.saver.Changed() // so it is tried again
		}
	}()
	if to := l.journal.to.Load(); to != nil && l.adopted.Load() != to {
		go l.adopt()
	}
	return l.purge(ctx, storage, time.Now().Unix()/dayLength)
}

// saved records that a page is saved. It drops saved pages from memory that are
// complete, which are those of the days before yesterday.
func (l *Ledger) saved(p Page) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for number, d := range l.days {
		if nameOf(number) == p.Day {
			d.saved = p.Changes
			if d.saved == d.changes { // so the journal needs nothing
				d.unmark()
			}
		}
		if number < l.today.number-1 && d.saved == d.changes {
			delete(l.days, number)
		}
	}
}

// purge deletes old pages of all pools. Because this process's clock may be
// wrong, today counts as at most one day after the newest page of other
// processes.
func (l *Ledger) purge(ctx context.Context, storage certmagic.Storage, today int64) error {
	if l.purged == today {
		return nil
	}
	keys, err := list(ctx, storage)
	slices.Sort(keys)
	newest := int64(0)
	for _, key := range keys {
		if w, ok := whereOf(key); ok && !l.holds(w.ID) {
			if at, err := time.Parse(time.DateOnly, w.Day); err == nil {
				newest = max(newest, at.Unix()/dayLength)
			}
		}
	}
	oldest := folder + "/" + nameOf(min(today, newest+1)-keptDays)
	for _, key := range slices.Backward(keys) { // a folder after what is in it
		if key < oldest && err == nil {
			if err = storage.Delete(ctx, key); errors.Is(err, fs.ErrNotExist) {
				err = nil // another replica was faster
			}
		}
	}
	if err != nil {
		return &pools.StorageError{What: "could not delete old pages of the ledger", Key: folder, Err: err}
	}
	l.purged = today
	return nil
}

// list returns the keys of pages. It retries, because a storage of files fails
// if another process replaces a file at that time.
func list(ctx context.Context, storage certmagic.Storage) (keys []string, err error) {
	for range 10 {
		if keys, err = storage.List(ctx, folder, true); err == nil || !errors.Is(err, fs.ErrNotExist) {
			return keys, err
		}
		if !storage.Exists(ctx, folder) {
			return nil, nil
		}
	}
	return nil, err
}

// IsIn reports whether a storage has pages.
func IsIn(ctx context.Context, storage certmagic.Storage) bool { return storage.Exists(ctx, folder) }

// Read returns the pages in a storage for which want returns true. A page that
// cannot be parsed, such as an empty file after a power cut, is returned with
// Unreadable set, and does not affect other pages. The error is about pages
// that the storage could not read.
func Read(ctx context.Context, storage certmagic.Storage, want func(Where) bool) (pages []Page, err error) {
	keys, err := list(ctx, storage)
	if err != nil {
		return nil, &pools.StorageError{What: "could not list the ledger", Key: folder, Err: err}
	}
	var errs []error
	for _, key := range keys {
		if w, ok := whereOf(key); !ok || !want(w) {
			continue
		}
		if ctx.Err() != nil {
			return nil, &pools.StorageError{What: "could not read the ledger", Key: key, Err: ctx.Err()}
		}
		p, err := readPage(ctx, storage, key)
		switch {
		case errors.Is(err, errUnreadable):
			w, _ := whereOf(key)
			pages = append(pages, Page{ID: w.ID, Pool: w.Pool, Day: w.Day, Rows: []Row{}, Unreadable: err.Error()})
		case p != nil:
			pages = append(pages, *p)
		default:
			errs = append(errs, err)
		}
	}
	return pages, errors.Join(errs...)
}

// readPage reads a page. If the page was deleted, it returns neither a page nor
// an error.
func readPage(ctx context.Context, storage certmagic.Storage, key string) (*Page, error) {
	p := new(Page)
	text, err := storage.Load(ctx, key)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err == nil {
		if err = json.Unmarshal(text, p); err != nil {
			err = fmt.Errorf("%w: %w", errUnreadable, err)
		}
	}
	if err != nil {
		return nil, &pools.StorageError{What: "could not read the ledger", Key: key, Err: err}
	}
	return p, nil
}

// Newest returns the latest version of each page, because pages may have both a
// version from a storage and one from its process.
func Newest(pages []Page) (newest []Page) {
	at := make(map[Where]int)
	for _, p := range pages {
		w := p.Where()
		if i, known := at[w]; !known {
			at[w] = len(newest)
			newest = append(newest, p)
		} else if p.Changes > newest[i].Changes {
			newest[i] = p
		}
	}
	return newest
}

// Pages returns all pages for which want returns true: those in the storage,
// and those in the memory of this process, which may be newer. It stops when
// the context is done.
func Pages(ctx context.Context, want func(Where) bool) (pages []Page, err error) {
	var all []*Ledger
	inUse.Range(func(_, value any) bool {
		all = append(all, value.(*Ledger))
		return true
	})
	for i, l := range all {
		if i == 0 { // all use the storage of the config
			l.saver.Use(reading, func(using context.Context, storage certmagic.Storage) error {
				using, cancel := context.WithCancel(using)
				defer cancel()
				defer context.AfterFunc(ctx, cancel)()
				if pages, err = Read(using, storage, want); ctx.Err() != nil {
					err = ctx.Err() // which is no fault of the storage
				}
				return err
			})
		}
		pages = append(pages, l.pages(func(d *day) bool { return want(Where{nameOf(d.number), l.pool, d.id}) })...)
	}
	return Newest(pages), err
}
