// Package ledger sums up the use of requests for bills: by day, caller, model,
// backend and service tier. It is a recorder of the seam UsageModule, and
// decides nothing about a request. `caddy openai-lb usage` and GET
// /openai_lb/usage of Caddy's admin API show the sums.
//
// Each pool of each process has a Ledger, with a Page for each day. It saves a
// page in Caddy's storage under a name that no other process uses. So replicas
// may share a storage, and nothing is counted twice after a restart, because
// the new process starts new pages. The total use is the sum of all pages.
//
// A page is saved ten seconds after a change
// (TestAPageIsSavedTenSecondsAfterAChange). Before that, use is written to a
// journal on the disk. If the process is killed, another one adds that use to
// the bill (TestAKillTakesNothingThatWasUsedBefore). A power cut may lose what
// was used since the page was last saved, and so may a kill without a journal.
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

	"github.com/openai-lb/caddy-openai-lb/internal/background"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/internal/usage"
)

const (
	// maxEstimate limits the estimated tokens of a request, because a client
	// may declare any number.
	maxEstimate = 10_000_000
	// keptDays is how many days pages are kept.
	keptDays = 400
	// maxDays is how many days are in memory at most, while the storage fails.
	maxDays = 31
	// maxGone limits the rows without use that wait for the journal.
	maxGone = 1000
	// dayLength is the length of a UTC day in seconds.
	dayLength = 24 * 60 * 60
)

// Key identifies a row.
type Key struct {
	// Caller is empty if callers need no key.
	Caller string `json:"caller"`
	// Model is the client's name for it.
	Model   string `json:"model"`
	Backend string `json:"backend"`
	// ServiceTier is the tier that served the requests. Replies that name none
	// count as the default tier.
	ServiceTier string `json:"service_tier"`
}

// Use is the use of requests. Backends have reported Input, Cached, which is
// part of it, Output, and Reasoning, which is part of Output. EstimatedInput
// and EstimatedOutput were charged without a report.
type Use struct {
	Requests        int64 `json:"requests"`
	Input           int64 `json:"input"`
	Cached          int64 `json:"cached"`
	Output          int64 `json:"output"`
	Reasoning       int64 `json:"reasoning"`
	EstimatedInput  int64 `json:"estimated_input"`
	EstimatedOutput int64 `json:"estimated_output"`
}

// Add adds other use.
func (u *Use) Add(other Use) {
	u.Requests += other.Requests
	u.Input += other.Input
	u.Cached += other.Cached
	u.Output += other.Output
	u.Reasoning += other.Reasoning
	u.EstimatedInput += other.EstimatedInput
	u.EstimatedOutput += other.EstimatedOutput
}

// less returns the difference of two uses.
func (u Use) less(other Use) Use {
	return Use{
		u.Requests - other.Requests, u.Input - other.Input, u.Cached - other.Cached, u.Output - other.Output,
		u.Reasoning - other.Reasoning,
		u.EstimatedInput - other.EstimatedInput, u.EstimatedOutput - other.EstimatedOutput,
	}
}

// UseOf returns the use of a request that was charged with a cost. The backend
// may have reported only some of its tokens; the rest counts as estimated.
func UseOf(cost ratelimit.Cost, reported usage.Tokens) Use {
	u := Use{Requests: cost.Requests, Input: min(reported.Input, cost.Prompt),
		Output: min(reported.Output, cost.Output)}
	u.Cached, u.Reasoning = min(reported.Cached, u.Input), min(reported.Reasoning, u.Output)
	u.EstimatedInput, u.EstimatedOutput = min(cost.Prompt-u.Input, maxEstimate), min(cost.Output-u.Output, maxEstimate)
	return u
}

// Row is the use of a key.
type Row struct {
	Key
	Use
}

// Ledger has the use of a pool's requests.
type Ledger struct {
	pool   string
	saver  *pools.Saver
	left   background.Responses[leftUse]
	report report

	shards [shards]shard

	mu    sync.Mutex // guards the days and the timer
	days  map[int64]*day
	today *day // the one that was used last
	// timer writes the journal. due reports whether it is set.
	timer *time.Timer
	due   atomic.Bool

	journal journal
	// purged is the day of the latest purge. The saver guards it.
	purged int64
	// adopted is the place whose journals were adopted. adopting reports
	// whether an adoption is in progress.
	adopted  atomic.Pointer[journalPlace]
	adopting atomic.Bool
}

// day is a page in memory. A day that is dropped and used again gets another
// page.
type day struct {
	id     string
	number int64
	rows   rows
	// changes is the number of changes of the page, and saved the number of
	// those in the storage.
	changes, saved int64
	// changed are the rows that must be written to the journal. If whole is
	// true, all rows must. Rows without use are removed from rows, but not from
	// changed.
	changed map[*Row]bool
	whole   bool
}

// leftUse is the charge for a background response, with its row.
type leftUse struct {
	number   int64
	key, row Key
	use      Use
}

// inUse keeps the ledgers across config reloads.
var inUse = caddy.NewUsagePool()

// Config is the use of a ledger by one config.
type Config struct {
	*Ledger
	storage certmagic.Storage
	logger  *zap.Logger
}

// Open returns the ledger of a pool. The caller must close it.
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

// Start switches to the storage of this config. The previous config's storage
// is used until then, because this config may fail to start. Start also adopts
// the journals of killed processes.
func (c *Config) Start() {
	c.configure(journalFolder(c.storage))
	go c.adopt()
}

func (c *Config) configure(journals string) {
	c.journal.to.Store(nil) // while there is one, it is that of the saver's storage
	c.saver.Configure(c.storage, c.logger)
	if canLock && c.saver.Saves() {
		c.journal.record.KeepIn(journals)
		c.journal.to.Store(&journalPlace{journals, c.logger})
	}
}

// Close saves unsaved changes, and releases the ledger.
func (c *Config) Close() error {
	pools.SaveLast(c.saver.Save)
	_, err := inUse.Delete(c.pool)
	return err
}

// Records returns the times at which the ledger and its journal were written.
func (l *Ledger) Records() []*pools.Record {
	if !canLock {
		return []*pools.Record{&l.saver.Record}
	}
	return []*pools.Record{&l.saver.Record, &l.journal.record}
}

// Destruct implements caddy.Destructor. It drops nothing: unsaved changes are
// part of a bill, so saving them is retried.
func (*Ledger) Destruct() error { return nil }

// Add records the use of a request. later is the id of a response that goes on
// in the background, or else empty; u is then the charge for it.
func (l *Ledger) Add(now time.Time, k Key, u Use, later string) {
	number := now.Unix() / dayLength
	k.ServiceTier = cmp.Or(k.ServiceTier, openaiapi.DefaultTier)
	shard := &l.shards[rand.IntN(shards)]
	if later != "" || !shard.add(dayKey{number, k}, u) {
		l.mu.Lock()
		row := l.at(number).add(k, u)
		l.mu.Unlock()
		switch {
		case later != "":
			l.left.Add(later, leftUse{number, k, row, u})
		case row == k:
			shard.hold(dayKey{number, row})
		}
	}
	l.noted()
	l.saver.Changed()
}

// Awaits reports whether a background response was charged and not settled.
func (l *Ledger) Awaits(id string) bool { return id != "" && l.left.Has(id) }

// Settle replaces the charge for a background response by its reported tokens,
// on the day of its request. It also sets the service tier, unless that is
// empty. If the page of that day is no longer in memory, the charge stays.
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
		d.add(now, UseOf(ratelimit.Cost{
			Requests: was.use.Requests, Prompt: reported.Input, Output: reported.Output,
		}, reported))
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

// add adds use to the row of a key, and returns the key of that row, which may
// be coarser.
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
		p := Page{ID: d.id, Pool: l.pool, Day: nameOf(d.number), Changes: d.changes,
			Rows: make([]Row, 0, d.rows.number)}
		for row := range d.rows.all() {
			p.Rows = append(p.Rows, *row)
		}
		pages = append(pages, p)
	}
	return pages
}

// nameOf returns the date of a day.
func nameOf(number int64) string { return time.Unix(number*dayLength, 0).UTC().Format(time.DateOnly) }
