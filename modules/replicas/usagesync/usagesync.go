// Package usagesync adds up the use of callers, and of quotas of backends, at
// all replicas.
//
// A [Syncer] sends the use at this replica to the others, and applies their
// reports to the limiters of callers. Each replica decides immediately and
// alone, by the reports that it has. Until the other replicas know its use, it
// admits only its part of the remaining limit, so that the sum stays within the
// limit (TestOthersCannotHaveUsedMoreThanTheirPartsMeanwhile in package
// limiter). Package replicas runs the Syncer, and has the store through which
// reports pass.
package usagesync

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/state"
)

const (
	// patience is how long a replica must be without a connection before it
	// uses only its share.
	patience = time.Second
	// settling is how long a replica uses only its share after it is connected
	// again. The other replicas may be connected a little later, and only then
	// send their use.
	settling = 2 * time.Second
	// reload is how often all records are loaded, so that those of ended
	// replicas can be refreshed.
	reload = time.Hour
	// furthest is how far another replica's clock, from which its versions
	// come, may be ahead of the local one. Later versions are ignored.
	furthest = 24 * time.Hour
	// misread is the largest error of reading the store's clock.
	misread = 500 * time.Millisecond
)

// Syncer adds up the use of callers at all replicas, so that each caller has
// its limits for all replicas together. It sends the use at this replica to the
// others, and applies their reports.
//
// Each replica is the only writer of its own use. Its reports contain the total
// use in each window, and not the increase since the previous report. So a
// late, repeated or reordered report changes nothing, a lost one is made up for
// by the next one, and the store need not add up anything.
//
// A report contains a chunk of callers, or the callers that have changed since
// their chunks were sent. It is sent immediately when a caller has used an
// eighth of this replica's part of the rest of a limit. While a caller is above
// half of a limit, it is sent after 250 ms, and otherwise after 2 s. With many
// replicas these times are longer.
//
// A replica that starts, or was not connected, loads all records. The records
// of a replica that has ended stay in the store, and count until their windows
// are over. A month is longer than the store keeps a record, so the other
// replicas refresh these records.
//
// A replica that is not connected gets no further part of what is left than
// 1/N, where N is the number of replicas when it was last connected. If it
// still hears the replicas of its own region, those of other regions may be
// running behind a cut link, with other users. Then it gets the fraction that
// it used before, if that is more. While connected, only a request that is
// larger than the replica's part waits for the other replicas.
//
// If a replica hears the others but misses one that has not announced its end,
// it holds the missing replica's part back for a minute (see
// limiter.Limiters.Hold).
//
// Requests in flight of callers that have a maximum of them ride on the
// reports. They count while their replica runs (see limiter.Limiters.Running).
type Syncer struct {
	mu    sync.Mutex
	pools []*sharedPool
	// missed reports whether reports may have been missed, and loading whether
	// all records are being loaded. loaded is when they were last loaded.
	missed, loading bool
	loaded          time.Time
	// look is when to check for records that the store may have lost. It is
	// zero if no check is due.
	look time.Time
	// hoursAt is when keepHours last wrote records.
	hoursAt time.Time
	// urgent receives a value when a report should be sent immediately. It is
	// nil until it is first needed.
	urgent chan struct{}
	// ended are records of ended replicas that the next flush sends.
	ended []state.Record
	// ahead is by how much the store's clock is ahead of the local one. Windows
	// follow it. read is the latest reading of that difference, which changes
	// ahead only if it differs by more than misread.
	ahead, read time.Duration
	connection
}

// Share shares the use of a pool's callers until end is called. digest is a
// hash of the pool's name, in 32 hexadecimal digits.
func (t *Syncer) Share(digest string, callers *limiter.Limiters) (end func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	i := slices.IndexFunc(t.pools, func(p *sharedPool) bool { return p.digest == digest && p.callers == callers })
	if i < 0 {
		i = len(t.pools)
		t.pools = append(t.pools, &sharedPool{digest: digest, callers: callers})
		t.missed = true
		callers.OnUrgent(t.news())
		callers.Share(time.Now(), t.sharing())
	}
	p := t.pools[i]
	p.users++
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if p.users--; p.users > 0 {
			return
		}
		t.pools = slices.DeleteFunc(t.pools, func(other *sharedPool) bool { return other == p })
		callers.Share(time.Now(), limiter.Sharing{})
		if t.ahead != 0 {
			callers.Follow(time.Now(), 0)
		}
	}
}

// news returns the channel that receives a value when a report is urgent.
func (t *Syncer) news() chan struct{} {
	if t.urgent == nil {
		t.urgent = make(chan struct{}, 1)
	}
	return t.urgent
}

// Run sends the use of the pools' callers with put, until the context is done.
// contact returns which replicas are heard.
func (t *Syncer) Run(ctx context.Context, put func(context.Context, []state.Record) error, contact func() Contact) {
	ticks := time.NewTicker(fast)
	defer ticks.Stop()
	t.mu.Lock()
	urgent, interval := t.news(), t.interval()
	t.mu.Unlock()
	var last time.Time
	var due, moment <-chan time.Time // when what is urgent is sent, and the rest, if that waits for a moment
	for {
		select {
		case <-ctx.Done():
			if contact().Whole {
				t.leave(time.Now())
				t.flush(context.WithoutCancel(ctx), time.Now(), put, 0)
				t.keepHours(context.WithoutCancel(ctx), time.Now(), put, 0)
			}
			return
		case <-ticks.C:
			now := time.Now()
			interval = t.connect(now, contact())
			t.keepHours(ctx, now, put, hoursPace)
			if !together(interval) {
				t.flush(ctx, now, put, max(fast, interval)*9/10)
			} else if moment == nil {
				moment = time.After(t.untilMoment(now, interval))
			}
		case <-moment:
			moment = nil
			t.flush(ctx, time.Now(), put, interval*9/10)
		case <-urgent:
			if due == nil {
				due = time.After(t.wait(last, interval))
			}
		case <-due: // the time that it sends may be long ago: a flush waits for the store
			last, due = time.Now(), nil
			t.flush(ctx, last, put, 0)
		}
	}
}

// connect applies the state of the connection to the limits. It returns the
// interval of urgent reports.
func (t *Syncer) connect(now time.Time, contact Contact) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := &t.connection
	switch {
	case !contact.Whole && c.lost.IsZero():
		c.lost = now
	case !contact.Whole:
		c.back = time.Time{}
		if !c.apart {
			c.cut = contact.Cut
		}
		c.apart = c.replicas > 1 && now.Sub(c.lost) >= patience
	case !c.lost.IsZero() && c.back.IsZero():
		c.back = now
		if !t.loaded.IsZero() {
			t.doubt(now)
		}
		for _, p := range t.pools {
			p.resend()
		}
	case !c.lost.IsZero() && now.Sub(c.back) >= settling:
		c.lost, c.back, c.apart, c.cut = time.Time{}, time.Time{}, false, false
	case c.lost.IsZero():
		c.replicas = contact.Replicas
		if missed := c.miss(contact); len(missed) > 0 {
			for _, p := range t.pools {
				p.callers.Hold(now, missed, contact.Replicas+contact.Missing)
			}
		}
	}
	if contact.Whole {
		for _, p := range t.pools {
			p.callers.Running(now, contact.Running, contact.Vanished, contact.Replicas+contact.Missing)
		}
	}
	t.tell(now, contact.Whole)
	t.apply(now)
	for _, p := range t.pools {
		t.confirm(p)
	}
	return t.interval()
}

// apply applies the state of the connection to the limits of all pools.
func (t *Syncer) apply(now time.Time) {
	for _, p := range t.pools {
		p.callers.Share(now, t.sharing())
	}
}

// confirm records that the reports of a pool came back, unless reports of other
// replicas may be missing.
func (t *Syncer) confirm(p *sharedPool) {
	if t.lost.IsZero() && !t.missed && !t.loading {
		p.callers.Confirm(p.back)
	}
}

// Expect sets the minimum number of replicas until this one is first connected.
// Until then, this replica uses only its share, because the use of the others
// is not known.
func (t *Syncer) Expect(now time.Time, n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.loaded.IsZero() && n > t.replicas {
		t.replicas = n
		if t.lost.IsZero() {
			t.lost = now.Add(-patience)
		}
		t.apply(now)
	}
}

// Count records the number of replicas. If it is greater than before, this
// replica shares the limits with them immediately: replicas that start together
// know of each other before they have heard each other's use.
func (t *Syncer) Count(now time.Time, n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n > t.replicas {
		t.replicas = n
		t.apply(now)
	}
}

// Follow makes the windows follow the store's clock, which is ahead of the
// local one by ahead. So all replicas have the same windows, whatever their own
// clocks show. A small difference is ignored, because it may be an error of
// reading that clock.
func (t *Syncer) Follow(now time.Time, ahead time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.read = ahead
	set := (ahead-t.ahead).Abs() > misread && ahead.Abs() <= state.MaxTTL
	if set {
		t.ahead = ahead
	}
	for _, p := range t.pools {
		p.callers.Follow(now, t.ahead)
		if set {
			p.resend() // what is used is that of other windows
			p.stale = true
		}
	}
	if set && !t.loaded.IsZero() {
		t.loaded = now.Add(settling - reload) // when the others have done so, too
	}
}

// Writers returns the ids under which other replicas know the use of the pools'
// callers.
func (t *Syncer) Writers() (writers []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, p := range t.pools {
		writers = append(writers, p.callers.Writer())
	}
	return writers
}

// Replicas returns the number of replicas that share the use of callers, or
// that did when this one was last connected. It returns 0 if the number is not
// known, or if there are no callers.
func (t *Syncer) Replicas() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.pools) == 0 {
		return 0
	}
	return t.replicas
}

// flush sends the records that are due. pace is the argument of collect.
func (t *Syncer) flush(ctx context.Context, now time.Time, put func(context.Context, []state.Record) error,
	pace time.Duration) {
	var b batch
	t.mu.Lock()
	for _, p := range t.pools {
		p.collect(&b, now, pace)
	}
	b.records = append(b.records, t.ended...)
	t.ended = nil
	t.mu.Unlock()
	if len(b.records) == 0 {
		return
	}
	// if there is no room for a record, the others have got its message
	// nevertheless
	if err := put(ctx, b.records); err != nil && !errors.Is(err, state.ErrFull) {
		t.mu.Lock()
		b.failed()
		for _, p := range t.pools {
			p.looked = time.Time{}
		}
		t.mu.Unlock()
	}
}

// Missed records that reports may have been missed.
func (t *Syncer) Missed() {
	t.mu.Lock()
	t.missed = true
	t.mu.Unlock()
}

// Groups returns the groups of records to load next.
func (t *Syncer) Groups(now time.Time) (groups []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.pools) == 0 {
		return nil
	}
	// if loading is still set, that has failed
	t.loading = t.loading || t.missed || now.Sub(t.loaded) >= reload || !t.look.IsZero() && now.After(t.look)
	t.missed = false
	for _, p := range t.pools {
		groups = append(groups, markOf(p.callers.Writer()))
		if t.loading {
			groups = append(groups, groupOf(p.digest))
		}
		if !p.heard {
			groups = append(groups, timelinesGroup(p.digest))
		}
	}
	slices.Sort(groups)
	return slices.Compact(groups)
}

// Loaded applies the records of the pools' groups, and returns all other
// records.
func (t *Syncer) Loaded(kept []state.Kept, now time.Time) (others []state.Kept) {
	t.mu.Lock()
	// marks has how long the marks of the pools are kept, groups those of
	// reports, and timelines the messages of those of timelines
	marks, groups, timelines := make(map[string]time.Duration), make(map[string]bool), make(map[string][][]byte)
	for _, p := range t.pools {
		marks[markOf(p.callers.Writer())], groups[groupOf(p.digest)], timelines[timelinesGroup(p.digest)] = 0, true, nil
	}
	t.mu.Unlock()
	var reports []state.Kept
	for _, k := range kept {
		_, isMark := marks[k.Group]
		messages, isTimeline := timelines[k.Group]
		switch {
		case isMark:
			if !k.Partial {
				marks[k.Group] = k.TTL
			}
		case isTimeline:
			timelines[k.Group] = append(messages, k.Message)
		case groups[k.Group]:
			reports = append(reports, k)
		default:
			others = append(others, k)
		}
	}
	stored := make(found)
	for _, k := range reports {
		r, err := t.hear(k.Message, now)
		if err != nil {
			continue
		}
		if !k.Partial { // or else a server has lost it
			stored.add(r)
		}
		if k.TTL < state.MaxTTL/2 {
			t.refresh(k, r, now)
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, p := range t.pools {
		if left := marks[markOf(p.callers.Writer())]; p.marked && left == 0 {
			p.resend()
			t.doubt(now)
		} else if left <= markTTL/2 {
			p.marked = false
		}
	}
	if t.loading && !t.look.IsZero() && now.After(t.look) {
		t.look = time.Time{}
		t.restore(now, stored)
	}
	if t.loading {
		t.loading, t.loaded = false, now
		for _, p := range t.pools {
			if !p.heard && !t.missed { // otherwise it may not be in what was loaded
				p.heard = true
				p.callers.Spread(now, timelinesIn(timelines[timelinesGroup(p.digest)]))
			}
		}
	}
	return others
}

// refresh schedules the same record of an ended replica to be written again, so
// that the store keeps it longer, if its use still counts.
func (t *Syncer) refresh(k state.Kept, r report, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !slices.ContainsFunc(r.callers, func(c callerUse) bool {
		return slices.ContainsFunc(c.entries, func(e limiter.Entry) bool { return !e.Over(now.Add(t.ahead)) })
	}) {
		return
	}
	t.ended = append(t.ended, state.Record{
		Group: k.Group, Key: k.Key, Mode: state.Latest, Version: versionText(r.version), TTL: state.MaxTTL,
		Message: k.Message,
	})
}

// Hear applies a report of another replica. It returns an error if the message
// is not a report of this version.
func (t *Syncer) Hear(message []byte, now time.Time) error {
	_, err := t.hear(message, now)
	return err
}

// hear applies a report. The result has no callers if the report is for none of
// the pools here, or was sent by this replica.
func (t *Syncer) hear(message []byte, now time.Time) (r report, err error) {
	if len(message) > state.MaxMessage {
		return r, errInvalid
	}
	r, body, err := decodeHeader(message)
	if err != nil {
		return r, err
	}
	if r.version > uint64(max(0, now.Add(furthest).UnixMicro())) {
		return r, errInvalid
	}
	var pools []*limiter.Limiters
	t.mu.Lock()
	for _, p := range t.pools {
		switch {
		case p.digest != r.pool:
		case p.callers.Writer() != r.writer:
			pools = append(pools, p.callers)
		case r.version > p.version: // somebody else has sent or kept it
			p.version = r.version
			p.resend()
		default:
			p.back = max(p.back, r.version)
			t.confirm(p)
		}
	}
	t.mu.Unlock()
	if len(pools) == 0 {
		return r, nil
	}
	if err := r.decode(body); err != nil {
		return r, err
	}
	for _, callers := range pools {
		for _, c := range r.callers {
			callers.Heard(now, c.id, r.writer, r.version, c.entries)
			if c.hasInFlight {
				callers.HeardInFlight(now, c.id, r.writer, r.version, c.inFlight)
			}
		}
	}
	return r, nil
}
