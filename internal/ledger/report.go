package ledger

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/certmagic"

	"github.com/openai-lb/caddy-openai-lb/internal/pools"
)

const (
	// ownPause is the shortest time between two sums of the pages in memory, and readPause between two readings of the
	// others, which take a hundredth of the time at most.
	ownPause  = time.Second
	readPause = 10 * time.Second
	readShare = 100
	// readPatience is how long a request waits for the storage.
	readPatience = 3 * time.Second
)

// ModelUse is what a caller has used of a model, today and in this month, in UTC.
type ModelUse struct {
	Model string `json:"model"`
	Today Use    `json:"today"`
	Month Use    `json:"month"`
}

// sums are what callers have used, by caller and model.
type sums map[string]map[string]*ModelUse

func (s sums) of(caller, model string) *ModelUse {
	if s[caller] == nil {
		s[caller] = make(map[string]*ModelUse)
	}
	if s[caller][model] == nil {
		s[caller][model] = &ModelUse{Model: model}
	}
	return s[caller][model]
}

// add adds pages of a month.
func (s sums) add(pages []Page, today string) {
	for _, p := range pages {
		for _, row := range p.Rows {
			u := s.of(row.Caller, row.Model)
			if u.Month.Add(row.Use); p.Day == today {
				u.Today.Add(row.Use)
			}
		}
	}
}

// report is what callers are told. It is summed up once for many requests.
type report struct {
	mu sync.Mutex
	// own is the sum of the pages in memory, and others that of those in the storage: of other replicas, and of earlier
	// processes and days.
	own, others     sums
	ownDue, readDue time.Time
	// day is today for them.
	day string
	// reading is closed when the storage has been read. nil: it is not being read.
	reading chan struct{}
}

// Models returns what a caller has used, by model: at this replica, and at those with the same storage, as far as these
// have saved it.
func (l *Ledger) Models(now time.Time, caller string) []ModelUse {
	l.refresh(now)
	r := &l.report
	r.mu.Lock()
	defer r.mu.Unlock()
	if !now.Before(r.ownDue) {
		r.own, r.ownDue = make(sums), now.Add(ownPause)
		today := now.UTC().Format(time.DateOnly)
		r.own.add(l.pages(func(d *day) bool { return sameMonth(nameOf(d.number), today) }), today)
	}
	all := make(sums)
	for _, s := range []sums{r.own, r.others} {
		for model, u := range s[caller] {
			sum := all.of(caller, model)
			sum.Today.Add(u.Today)
			sum.Month.Add(u.Month)
		}
	}
	models := []ModelUse{}
	for _, u := range all[caller] {
		models = append(models, *u)
	}
	slices.SortFunc(models, func(a, b ModelUse) int { return cmp.Compare(a.Model, b.Model) })
	return models
}

// sameMonth compares dates.
func sameMonth(a, b string) bool { return strings.HasPrefix(a, b[:len("2006-01")]) }

// begin begins a day, unless it has begun: what is known is not of today then. The caller holds the lock.
func (r *report) begin(today string) {
	if r.day == today {
		return
	}
	if r.others != nil && !sameMonth(r.day, today) {
		clear(r.others)
	}
	for _, models := range r.others {
		for _, u := range models {
			u.Today = Use{}
		}
	}
	r.day, r.ownDue, r.readDue = today, time.Time{}, time.Time{}
}

// refresh has the storage read if that is due, and waits for it, but not for long.
func (l *Ledger) refresh(now time.Time) {
	r := &l.report
	r.mu.Lock()
	r.begin(now.UTC().Format(time.DateOnly))
	if r.reading == nil && !now.Before(r.readDue) {
		r.reading = make(chan struct{})
		go l.readOthers(now, r.reading)
	}
	reading := r.reading
	r.mu.Unlock()
	if reading != nil {
		pools.WaitFor(reading, readPatience)
	}
}

// readOthers sums up the pages in the storage that are not in memory.
func (l *Ledger) readOthers(now time.Time, done chan struct{}) {
	defer close(done)
	today, others := now.UTC().Format(time.DateOnly), make(sums)
	read := l.saver.Use(reading, func(ctx context.Context, storage certmagic.Storage) error {
		pages, err := Read(ctx, storage, func(w Where) bool {
			return w.Pool == l.pool && sameMonth(w.Day, today) && !l.holds(w.ID)
		})
		others.add(pages, today)
		return err
	})
	r := &l.report
	r.mu.Lock()
	defer r.mu.Unlock()
	took := time.Since(now)
	r.reading, r.readDue = nil, now.Add(took+max(readPause, readShare*took))
	if read || r.others == nil {
		r.others, r.day = others, today
	}
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
