// Package ledger adds up what requests have used, for bills: by day, caller,
// model, backend and service tier. It is a recorder of the seam UsageModule,
// and decides nothing about a request. `caddy openai-lb usage` and GET
// /openai_lb/usage of Caddy's admin API show the sums.
//
// Each pool of each process has a Ledger, with a Page for each day. It saves a
// page in Caddy's storage under a name that no other process uses. So replicas
// may share a storage, and nothing is counted twice after a restart: the new
// process begins new pages. Whoever wants to know what was used adds up the
// pages.
package ledger

import (
	"cmp"
	cryptorand "crypto/rand"
	"encoding/hex"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/usage"
)

const (
	// maxEstimate is what a request has used at most without a report, in
	// tokens: it may declare any number.
	maxEstimate = 10_000_000
	// keptDays is for how long pages are kept.
	keptDays = 400
	// maxDays is how many days are in memory at most, while the storage fails.
	maxDays = 31
	// maxGone is how many rows without use wait for the journal at most.
	maxGone = 1000
	// dayLength is that of days in UTC.
	dayLength = 24 * 60 * 60
)

// Key says what a row is about.
type Key struct {
	// Caller is empty if callers need no key.
	Caller string `json:"caller"`
	// Model is the client's name for it.
	Model   string `json:"model"`
	Backend string `json:"backend"`
	// ServiceTier is the one that has served. Replies without one are of the
	// default tier.
	ServiceTier string `json:"service_tier"`
}

// Use is what requests have used. Input, Cached, which is part of it, Output,
// and Reasoning, which is part of that, were reported by backends.
// EstimatedInput and EstimatedOutput were charged without a report.
type Use struct {
	Requests        int64 `json:"requests"`
	Input           int64 `json:"input"`
	Cached          int64 `json:"cached"`
	Output          int64 `json:"output"`
	Reasoning       int64 `json:"reasoning"`
	EstimatedInput  int64 `json:"estimated_input"`
	EstimatedOutput int64 `json:"estimated_output"`
}

// Add adds what other requests have used.
func (u *Use) Add(other Use) {
	u.Requests += other.Requests
	u.Input += other.Input
	u.Cached += other.Cached
	u.Output += other.Output
	u.Reasoning += other.Reasoning
	u.EstimatedInput += other.EstimatedInput
	u.EstimatedOutput += other.EstimatedOutput
}

// less returns it without what another has.
func (u Use) less(other Use) Use {
	return Use{
		u.Requests - other.Requests, u.Input - other.Input, u.Cached - other.Cached, u.Output - other.Output, u.Reasoning - other.Reasoning,
		u.EstimatedInput - other.EstimatedInput, u.EstimatedOutput - other.EstimatedOutput,
	}
}

// UseOf returns what a request has used that was charged with a cost, of which
// the backend has reported some tokens.
func UseOf(cost limiter.Cost, reported usage.Tokens) Use {
	u := Use{Requests: cost.Requests, Input: min(reported.Input, cost.Prompt), Output: min(reported.Output, cost.Output)}
	u.Cached, u.Reasoning = min(reported.Cached, u.Input), min(reported.Reasoning, u.Output)
	u.EstimatedInput, u.EstimatedOutput = min(cost.Prompt-u.Input, maxEstimate), min(cost.Output-u.Output, maxEstimate)
	return u
}

// Row is what the requests of a key have used.
type Row struct {
	Key
	Use
}

// Ledger has what the requests of a pool have used.
type Ledger struct {
	pool   string
	saver  *pools.Saver
	left   limiter.Left[leftUse]
	report report

	shards [shards]shard

	mu    sync.Mutex // guards the days and the timer
	days  map[int64]*day
	today *day // the one that was used last
	// timer writes the journal, and due reports whether it will.
	timer *time.Timer
	due   atomic.Bool

	journal journal
	// purged is the day of the latest purge. The saver guards it.
	purged int64
	// adopted is the place whose journals were adopted, and adopting reports
	// whether they are being.
	adopted  atomic.Pointer[journalPlace]
	adopting atomic.Bool
}

// day is a page in memory. A day that is forgotten and comes again is another
// page.
type day struct {
	id     string
	number int64
	rows   rows
	// changes counts them, and saved are those that are in the storage.
	changes, saved int64
	// changed are rows that are to be in the journal, unless whole reports that
	// all are: rows without use leave rows, not changed.
	changed map[*Row]bool
	whole   bool
}

// leftUse is what a response in the background was charged with, and in which
// row.
type leftUse struct {
	number   int64
	key, row Key
	use      Use
}

// inUse keeps the ledgers through config reloads.
var inUse = caddy.NewUsagePool()

// Config is the use of a ledger by one config.
type Config struct {
	*Ledger
	storage certmagic.Storage
	logger  *zap.Logger
}

// Open returns the ledger of a pool. The caller closes it.
func Open(pool string, storage certmagic.Storage, logger *zap.Logger) *Config {
	value, again, _ := inUse.LoadOrNew(pool, func() (caddy.Destructor, error) { return newLedger(pool), nil })
	c := &Config{value.(*Ledger), storage, logger}
	if !again {
		c.configure(journalFolder(storage))
	}
	return c
}

func newLedger(pool string) *Ledger {
	l := &Ledger{pool: pool, days: make(map[int64]*day)}
	l.journal.record.Name = "journal"
	l.saver = pools.NewSaver("bill", nil, l.save)
	return l
}

// Start uses the storage of this config. That of the previous one is used until
// this one has started, because it may fail. It also saves what processes that
// were killed have left.
func (c *Config) Start() {
	c.configure(journalFolder(c.storage))
	go c.adopt()
}

func (c *Config) configure(journals string) {
	c.journal.to.Store(nil) // while there is one, it is that of the saver's storage
	c.saver.Configure(c.storage, c.logger)
	if canLock && c.saver.Saves() {
		c.journal.to.Store(&journalPlace{journals, c.logger})
	}
}

// Close saves what is not saved, and releases what Open acquired.
func (c *Config) Close() error {
	pools.SaveLast(c.saver.Save)
	_, err := inUse.Delete(c.pool)
	return err
}

// Records returns when the ledger and its journal were written.
func (l *Ledger) Records() []*pools.Record {
	if !canLock {
		return []*pools.Record{&l.saver.Record}
	}
	return []*pools.Record{&l.saver.Record, &l.journal.record}
}

// Destruct implements caddy.Destructor. What could not be saved is tried again:
// it is part of a bill.
func (*Ledger) Destruct() error { return nil }

// Add records what a request has used, or was charged with for a response that
// goes on in the background and has the id later. It is empty otherwise.
func (l *Ledger) Add(now time.Time, k Key, u Use, later string) {
	number := now.Unix() / dayLength
	k.ServiceTier = cmp.Or(k.ServiceTier, openaiapi.DefaultTier)
	its := &l.shards[rand.IntN(shards)]
	if later != "" || !its.add(dayKey{number, k}, u) {
		l.mu.Lock()
		row := l.at(number).add(k, u)
		l.mu.Unlock()
		switch {
		case later != "":
			l.left.Add(later, leftUse{number, k, row, u})
		case row == k:
			its.hold(dayKey{number, row})
		}
	}
	l.noted()
	l.saver.Changed()
}

// Awaits reports whether a response was left in the background, and not
// settled.
func (l *Ledger) Awaits(id string) bool { return id != "" && l.left.Has(id) }

// Settle replaces what a response was charged with that was left in the
// background, on the day of its request, by what it has used and the service
// tier that has served, unless that is empty. If that page is complete, it
// stays as it is.
func (l *Ledger) Settle(id string, reported usage.Tokens, tier string) {
	was, ok := l.left.Take(id)
	if !ok {
		return
	}
	l.mu.Lock()
	d := l.days[was.number]
	if ok = d != nil; ok {
		now := was.key
		now.ServiceTier = cmp.Or(tier, now.ServiceTier)
		d.add(was.row, Use{}.less(was.use))
		d.add(now, UseOf(limiter.Cost{Requests: was.use.Requests, Prompt: reported.Input, Output: reported.Output}, reported))
	}
	l.mu.Unlock()
	if ok {
		l.noted()
		l.saver.Changed()
	}
}

// at returns the page of a day. The caller holds the lock.
func (l *Ledger) at(number int64) *day {
	if l.today != nil && l.today.number == number {
		return l.today
	}
	d := l.days[number]
	if d == nil {
		d = &day{id: newID(), number: number, changed: make(map[*Row]bool)}
		if len(l.days) >= maxDays {
			delete(l.days, slices.Min(slices.Collect(maps.Keys(l.days))))
		}
		l.days[number] = d
	}
	l.today = d
	return d
}

func newID() string {
	var id [16]byte
	_, _ = cryptorand.Read(id[:]) // it never fails
	return hex.EncodeToString(id[:])
}

// add adds to the row of a key, and returns which one that is.
func (d *day) add(k Key, u Use) Key {
	row := d.rows.find(k)
	if row.Add(u); row.Use == (Use{}) {
		d.rows.remove(row)
	}
	d.changes++
	if d.whole {
		return row.Key
	}
	d.changed[row] = true
	if len(d.changed) > d.rows.number+maxGone {
		d.unmark()
		d.whole = true
	}
	return row.Key
}

// pages returns the pages in memory for which want returns true.
func (l *Ledger) pages(want func(*day) bool) (pages []Page) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.collect()
	for _, d := range l.days {
		if !want(d) {
			continue
		}
		p := Page{ID: d.id, Pool: l.pool, Day: nameOf(d.number), Changes: d.changes, Rows: make([]Row, 0, d.rows.number)}
		for row := range d.rows.all() {
			p.Rows = append(p.Rows, *row)
		}
		pages = append(pages, p)
	}
	return pages
}

// nameOf returns a day as a date.
func nameOf(number int64) string { return time.Unix(number*dayLength, 0).UTC().Format(time.DateOnly) }
