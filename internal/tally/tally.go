// Package tally adds up what callers use at all replicas, so that they have their limits together.
//
// Each replica is the only writer of its own use. It sends that to the others as reports, which say how much it has
// used in each window, and not how much more than before. So a report that is late, repeated or out of order
// changes nothing, one that is lost is made up for by the next, and the store adds up nothing. A report is the record of
// a chunk of callers: it is sent when it has changed, every 250 ms while one of these callers is above half of a limit,
// otherwise every 2 s. A replica that starts, or was not connected, loads all of them.
//
// The records of a replica that has ended stay in the store, and count until their windows are over. Months are
// longer than the store keeps a record, so the other replicas refresh it.
//
// A replica that has not been connected for 3 s, or not since it started, may use its share of each limit: 1/N, where N
// is the number of replicas last seen. No request waits for any of that.
package tally

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/meter"
	"github.com/openai-lb/caddy-openai-lb/state"
)

const (
	// patience is after which time without a connection a replica uses only its share.
	patience = 3 * time.Second
	// settling is how long it goes on with that when it is connected again, because the others are connected
	// again a little later, and only then send what they have used.
	settling = 2 * time.Second
	// reload is how often all records are loaded, to refresh those of replicas that have ended.
	reload = time.Hour
	// misread is by how much the store's clock may be misread.
	misread = 500 * time.Millisecond
)

// Tally is what a replica sends others, and hears of them, of the callers of its pools.
type Tally struct {
	mu    sync.Mutex
	pools []*pool
	// missed reports whether reports may have been missed, and loading whether all of them are being loaded.
	// loaded is when they were loaded.
	missed, loading bool
	loaded          time.Time
	// ended are records to be refreshed, of replicas that have ended.
	ended []state.Record
	// ahead is by how much the store's clock is ahead of ours. The windows follow it.
	ahead time.Duration
	connection
}

// connection is what limits have to do with being connected.
type connection struct {
	// replicas is how many there were when this one was last connected.
	replicas int
	// lost is when the connection ended, and back when there was one again. They are zero otherwise.
	lost, back time.Time
	// share is the number of replicas while this one uses only its share, or 0.
	share int
}

// Share shares the use of a pool's callers until end is called. The digest, of 32 hexadecimal digits, is that of the
// pool's name.
func (t *Tally) Share(digest string, callers *meter.Callers) (end func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	i := slices.IndexFunc(t.pools, func(p *pool) bool { return p.digest == digest && p.callers == callers })
	if i < 0 {
		i = len(t.pools)
		t.pools = append(t.pools, &pool{digest: digest, callers: callers})
		t.missed = true
	}
	p := t.pools[i]
	p.users++
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if p.users--; p.users > 0 {
			return
		}
		t.pools = slices.DeleteFunc(t.pools, func(other *pool) bool { return other == p })
		if t.share > 0 {
			callers.Share(time.Now(), 0)
		}
		if t.ahead != 0 {
			callers.Follow(0)
		}
	}
}

// Run sends what the pools' callers use with put, until the context is done. replicas returns whether this replica
// is connected, and how many there are.
func (t *Tally) Run(ctx context.Context, put func(context.Context, []state.Record) error, replicas func() (connected bool, n int)) {
	ticks := time.NewTicker(fast)
	defer ticks.Stop()
	for {
		select {
		case <-ctx.Done():
			if connected, _ := replicas(); connected {
				t.flush(context.WithoutCancel(ctx), time.Now(), put, true)
			}
			return
		case <-ticks.C:
			connected, n := replicas()
			now := time.Now()
			t.connect(now, connected, n)
			t.flush(ctx, now, put, false)
		}
	}
}

// connect applies the state of the connection to the limits.
func (t *Tally) connect(now time.Time, connected bool, n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := &t.connection
	switch {
	case !connected && c.lost.IsZero():
		c.lost = now
	case !connected:
		if c.back = (time.Time{}); c.replicas > 1 && now.Sub(c.lost) >= patience {
			c.share = c.replicas
		}
	case !c.lost.IsZero() && c.back.IsZero():
		c.back = now
		for _, p := range t.pools {
			p.resend()
		}
	case !c.lost.IsZero() && now.Sub(c.back) >= settling:
		c.lost, c.back = time.Time{}, time.Time{}
		if c.share > 0 {
			c.share = 0
			t.applyShare(now)
		}
	case c.lost.IsZero():
		c.replicas = n
	}
	if c.share > 0 {
		t.applyShare(now) // also to pools that are new
	}
}

// Expect sets how many replicas there are, for as long as this one has not been connected. Until then it uses its share,
// without patience: it is not known what the others use.
func (t *Tally) Expect(now time.Time, n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.replicas == 0 {
		t.replicas, t.lost = n, now.Add(-patience)
	}
}

// Follow makes the windows follow the store's clock, which is ahead of ours by so much. So all replicas mean the same
// windows, whatever their own clocks show. A difference that may come from reading that clock changes nothing.
func (t *Tally) Follow(ahead time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if (ahead-t.ahead).Abs() > misread && ahead.Abs() <= state.MaxTTL {
		t.ahead = ahead
	}
	for _, p := range t.pools {
		p.callers.Follow(t.ahead)
	}
}

// Replicas returns how many replicas share the use of callers, or did when this one was last connected. 0: that is
// not known, or there are no callers.
func (t *Tally) Replicas() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.pools) == 0 {
		return 0
	}
	return t.replicas
}

func (t *Tally) applyShare(now time.Time) {
	for _, p := range t.pools {
		p.callers.Share(now, t.share)
	}
}

// flush sends what is due. all reports whether that is all that has changed.
func (t *Tally) flush(ctx context.Context, now time.Time, put func(context.Context, []state.Record) error, all bool) {
	var b batch
	t.mu.Lock()
	for _, p := range t.pools {
		p.collect(&b, now, all)
	}
	b.records = append(b.records, t.ended...)
	t.ended = nil
	t.mu.Unlock()
	if len(b.records) == 0 {
		return
	}
	// if there is no room for a record, the others have got its message nevertheless
	if err := put(ctx, b.records); err != nil && !errors.Is(err, state.ErrFull) {
		t.mu.Lock()
		b.failed()
		t.mu.Unlock()
	}
}

// Missed records that reports may have been missed.
func (t *Tally) Missed() {
	t.mu.Lock()
	t.missed = true
	t.mu.Unlock()
}

// Groups returns the groups of records to load next.
func (t *Tally) Groups(now time.Time) (groups []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.pools) == 0 {
		return nil
	}
	// if loading is still set, that has failed
	t.loading = t.loading || t.missed || now.Sub(t.loaded) >= reload
	t.missed = false
	groups = append(groups, markGroup)
	if t.loading {
		for _, p := range t.pools {
			groups = append(groups, groupOf(p.digest))
		}
	}
	slices.Sort(groups)
	return slices.Compact(groups)
}

// Loaded applies the records of these groups, and returns the others.
func (t *Tally) Loaded(kept []state.Kept, now time.Time) (others []state.Kept) {
	t.mu.Lock()
	groups := map[string]bool{markGroup: true}
	for _, p := range t.pools {
		groups[groupOf(p.digest)] = true
	}
	t.mu.Unlock()
	marks := make(map[string]bool)
	var reports []state.Kept
	for _, k := range kept {
		switch {
		case !groups[k.Group]:
			others = append(others, k)
		case k.Group == markGroup:
			marks[k.Key] = k.TTL > state.MaxTTL/2
		default:
			reports = append(reports, k)
		}
	}
	for _, k := range reports {
		if r, err := t.hear(k.Message, now); err == nil && k.TTL < state.MaxTTL/2 {
			t.refresh(k, r, now)
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, p := range t.pools {
		if there, found := marks[p.callers.Writer()]; p.marked && !found {
			p.resend()
		} else if !there {
			p.marked = false
		}
	}
	if t.loading {
		t.loading, t.loaded = false, now
		for _, p := range t.pools {
			if !p.heard && !t.missed { // otherwise it may not be in what was loaded
				p.heard = true
				p.callers.Spread(now)
			}
		}
	}
	return others
}

// refresh keeps the record of a replica that has ended, if it still counts: it is the same for longer.
func (t *Tally) refresh(k state.Kept, r report, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !slices.ContainsFunc(r.callers, func(c callerUse) bool {
		return slices.ContainsFunc(c.entries, func(e meter.Entry) bool { return !e.Over(now.Add(t.ahead)) })
	}) {
		return
	}
	t.ended = append(t.ended, state.Record{
		Group: k.Group, Key: k.Key, Mode: state.Latest, Version: versionText(r.version), TTL: state.MaxTTL, Message: k.Message,
	})
}

// Hear applies a report of another replica. It returns an error if the message is none, or one of another version.
func (t *Tally) Hear(message []byte, now time.Time) error {
	_, err := t.hear(message, now)
	return err
}

// hear returns a report without callers if it is not for the pools here, or their own.
func (t *Tally) hear(message []byte, now time.Time) (r report, err error) {
	if len(message) > state.MaxMessage {
		return r, errInvalid
	}
	r, body, err := decodeHeader(message)
	if err != nil {
		return r, err
	}
	var pools []*meter.Callers
	t.mu.Lock()
	for _, p := range t.pools {
		if p.digest == r.pool && p.callers.Writer() != r.writer {
			pools = append(pools, p.callers)
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
		}
	}
	return r, nil
}
