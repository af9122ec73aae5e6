package ledger

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/certmagic"

	"github.com/openai-lb/caddy-openai-lb/internal/pools"
)

const (
	// readPause is the shortest pause between two readings of the storage. The
	// pause is also at least readShare times as long as a reading, so that
	// readings take at most a hundredth of the time.
	readPause = 10 * time.Second
	readShare = 100
	// readPatience is how long a request waits for the storage.
	readPatience = 3 * time.Second
)

// ModelUse is a caller's use of a model, today and in this month, in UTC.
type ModelUse struct {
	Model string `json:"model"`
	Today Use    `json:"today"`
	Month Use    `json:"month"`
}

// otherPage is a page in the storage that is not in memory, because it belongs
// to another replica, or to an earlier process or day. An otherPage is never
// modified.
type otherPage struct {
	day      string
	modified time.Time
	size     int64
	use      map[string]map[string]Use // by caller and model
}

func newOtherPage(p *Page, info certmagic.KeyInfo) *otherPage {
	o := &otherPage{p.Day, info.Modified, info.Size, make(map[string]map[string]Use)}
	for _, row := range p.Rows {
		byModel := o.use[row.Caller]
		if byModel == nil {
			byModel = make(map[string]Use)
			o.use[row.Caller] = byModel
		}
		u := byModel[row.Model]
		u.Add(row.Use)
		byModel[row.Model] = u
	}
	return o
}

// report caches the pages in the storage for the answers to callers. Only pages
// that have changed are read again.
type report struct {
	mu sync.Mutex
	// others are the pages of this month by their keys. The map does not
	// change. It is nil before the first reading.
	others map[string]*otherPage
	// day is the day of the latest reading.
	day     string
	readDue time.Time
	// reading is closed when the reading in progress is complete. It is nil if
	// there is none. Requests wait for it no later than until.
	reading chan struct{}
	until   time.Time
}

// Models returns the caller's use by model at this replica, and at replicas
// with the same storage, as far as these have saved it.
func (l *Ledger) Models(now time.Time, caller string) []ModelUse {
	others, today := l.refresh(now), now.UTC().Format(time.DateOnly)
	all := make(map[string]*ModelUse)
	add := func(day, model string, u Use) {
		sum := all[model]
		if sum == nil {
			sum = &ModelUse{Model: model}
			all[model] = sum
		}
		if sum.Month.Add(u); day == today {
			sum.Today.Add(u)
		}
	}
	l.mu.Lock()
	l.collect()
	for number, d := range l.days {
		if day := nameOf(number); sameMonth(day, today) {
			for _, row := range d.rows.of[caller] {
				add(day, row.Model, row.Use)
			}
		}
	}
	l.mu.Unlock()
	for _, p := range others {
		if sameMonth(p.day, today) {
			for model, u := range p.use[caller] {
				add(p.day, model, u)
			}
		}
	}
	models := make([]ModelUse, 0, len(all))
	for _, u := range all {
		models = append(models, *u)
	}
	slices.SortFunc(models, func(a, b ModelUse) int { return cmp.Compare(a.Model, b.Model) })
	return models
}

// sameMonth reports whether two dates are in the same month.
func sameMonth(a, b string) bool { return strings.HasPrefix(a, b[:len("2006-01")]) }

// refresh returns the other pages in the storage. If a reading is due, it
// starts one and waits for it, but not for long.
func (l *Ledger) refresh(now time.Time) map[string]*otherPage {
	r, today := &l.report, now.UTC().Format(time.DateOnly)
	r.mu.Lock()
	if r.reading == nil && (!now.Before(r.readDue) || r.day != today) {
		r.reading, r.until, r.day = make(chan struct{}), now.Add(readPatience), today
		go l.readOthers(now, r.others, r.reading)
	}
	reading, until := r.reading, r.until
	r.mu.Unlock()
	if reading != nil {
		pools.WaitFor(reading, until.Sub(now))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.others
}

// readOthers reads the pages in the storage that are not in memory. Known pages
// that have not changed are not read again, and pages that cannot be read keep
// their known version.
func (l *Ledger) readOthers(now time.Time, known map[string]*otherPage, done chan struct{}) {
	defer close(done)
	others, listed := make(map[string]*otherPage), false
	l.saver.Use(reading, func(ctx context.Context, storage certmagic.Storage) error {
		keys, err := list(ctx, storage)
		if err != nil {
			return &pools.StorageError{What: "could not list the ledger", Key: folder, Err: err}
		}
		listed = true
		var errs []error
		today := now.UTC().Format(time.DateOnly)
		for _, key := range keys {
			if w, ok := whereOf(key); !ok || w.Pool != l.pool || !sameMonth(w.Day, today) || l.holds(w.ID) {
				continue
			}
			if before := known[key]; before != nil {
				others[key] = before
			}
			page, err := readOther(ctx, storage, key, known[key])
			if page != nil {
				others[key] = page
			}
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	})
	r := &l.report
	r.mu.Lock()
	defer r.mu.Unlock()
	took := time.Since(now)
	r.reading, r.readDue = nil, now.Add(took+max(readPause, readShare*took))
	if listed || r.others == nil {
		r.others = others
	}
}

// readOther reads a page, unless it is known and has not changed.
func readOther(ctx context.Context, storage certmagic.Storage, key string, known *otherPage) (*otherPage, error) {
	info, err := storage.Stat(ctx, key)
	if err == nil && known != nil && !info.Modified.IsZero() && info.Modified.Equal(known.modified) &&
		info.Size == known.size {
		return known, nil
	}
	p, err := readPage(ctx, storage, key)
	if p == nil {
		return nil, err
	}
	return newOtherPage(p, info), nil
}

// holds reports whether a page is in memory.
func (l *Ledger) holds(id string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, d := range l.days {
		if d.id == id {
			return true
		}
	}
	return false
}
