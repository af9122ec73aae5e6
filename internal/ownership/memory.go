package ownership

import (
	"hash/maphash"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Memory remembers the owners of a limited number of ids. If it is full, it
// forgets the least recently put ids first. It consists of many parts with a
// lock each, so that requests hardly ever wait for each other.
type Memory struct {
	parts [partCount]part
	// limit is the maximum number of ids in a part.
	limit int
	// changes counts changes of the memory.
	changes atomic.Uint64

	mu sync.Mutex // guards the writing of accounts
	// accounts are all accounts that were ever put. An entry has an index into
	// them.
	accounts atomic.Pointer[[]string]
}

const partCount = 64

// part holds the ids whose keys have the same number modulo partCount. It is a
// hash table with chains. A Go map from keys to entries would need nearly twice
// the memory per id.
type part struct {
	mu sync.Mutex
	// chains are the indexes of the first entry of each chain. count is the
	// number of ids in all chains. There is at least one chain for each id.
	chains []uint32
	count  int
	// entries are linked in a list from the oldest to the newest. The first
	// entry only holds the ends of that list.
	entries []entry
	// free is the index of the first unused entry. Unused entries are linked by
	// newer.
	free uint32
}

type entry struct {
	key Key
	// caller is the id's caller if that has a name. Otherwise it is the time
	// until which the id counts as belonging to no caller, in seconds, or 0.
	caller CallerDigest
	// account is an index into Memory.accounts.
	account uint32
	// until is when the id is forgotten, as Unix time in seconds.
	until        uint32
	older, newer uint32
	// next is the index of the next entry in the same chain, or 0.
	next uint32
}

// seed is random, so that clients cannot choose ids that are in the same chain.
var seed = maphash.MakeSeed()

// chain returns the chain of an id.
func (p *part) chain(id Key) *uint32 {
	return &p.chains[maphash.Bytes(seed, id[:])%uint64(len(p.chains))]
}

// find returns the index of an id's entry, or 0.
func (p *part) find(id Key) uint32 {
	if p.count == 0 {
		return 0
	}
	at := *p.chain(id)
	for at != 0 && p.entries[at].key != id {
		at = p.entries[at].next
	}
	return at
}

// link adds an entry to its chain.
func (p *part) link(at uint32) {
	e := &p.entries[at]
	first := p.chain(e.key)
	e.next, *first = *first, at
}

// NewMemory returns a memory for up to limit ids.
func NewMemory(limit int) *Memory {
	m := &Memory{limit: max(1, limit/partCount)}
	m.accounts.Store(new([]string))
	return m
}

// Len returns the number of ids.
func (m *Memory) Len() (n int) {
	for i := range m.parts {
		p := &m.parts[i]
		p.mu.Lock()
		n += p.count
		p.mu.Unlock()
	}
	return n
}

// Changes returns a number that grows with each change.
func (m *Memory) Changes() uint64 { return m.changes.Load() }

func (m *Memory) partOf(id Key) *part { return &m.parts[id[0]%partCount] }

// aWhile is the divisor for the fraction of an id's time to live after which
// another Put of the id is news.
const aWhile = 100

// Unclaimed is how long an id counts as belonging to no caller after a Put with
// NoCaller.
const Unclaimed = 5 * time.Minute

// Put remembers the owner of an id for ttl, or for as long as before if that is
// longer. If the id is known to belong to a named caller, it keeps that caller.
// A Put without a caller does not change how long an id counts as belonging to
// no caller.
//
// Put returns the remembered owner. news reports whether other replicas should
// know it, because something about it is new or the id was last put a while
// ago.
func (m *Memory) Put(id Key, o Owner, now time.Time, ttl time.Duration) (kept Owner, news bool) {
	e := entry{key: id, account: m.indexOf(o.Account), until: seconds(now.Add(ttl))}
	switch {
	case o.Caller.Named():
		e.caller = o.Caller
	case o.Caller == NoCaller:
		e.caller = CallerDigest(seconds(now.Add(Unclaimed)))
	}
	p := m.partOf(id)
	p.mu.Lock()
	defer p.mu.Unlock()
	news = true
	if at := p.find(id); at != 0 {
		if known := &p.entries[at]; known.until > seconds(now) {
			if known.caller.Named() && e.caller.Named() && e.caller != known.caller {
				return Owner{(*m.accounts.Load())[known.account], known.caller}, false
			}
			if known.caller.Named() || e.caller == 0 {
				e.caller = known.caller
			}
			e.until = max(e.until, known.until)
			news = e.account != known.account || e.caller.Named() && e.caller != known.caller ||
				e.until-min(e.until, known.until) > seconds(now.Add(ttl/aWhile))-seconds(now)
		}
		p.forget(at)
	}
	for p.count >= m.limit {
		p.forget(p.entries[0].newer)
	}
	p.add(e)
	m.changes.Add(1)
	return Owner{o.Account, e.callerAt(now)}, news
}

// Get returns the owner of an id. It returns false if the owner is not known.
func (m *Memory) Get(id Key, now time.Time) (Owner, bool) {
	p := m.partOf(id)
	p.mu.Lock()
	at := p.find(id)
	if at == 0 || p.entries[at].until <= seconds(now) {
		p.mu.Unlock()
		return Owner{}, false
	}
	account, caller := p.entries[at].account, p.entries[at].callerAt(now)
	p.mu.Unlock()
	return Owner{(*m.accounts.Load())[account], caller}, true
}

// Forget removes an id.
func (m *Memory) Forget(id Key) {
	p := m.partOf(id)
	p.mu.Lock()
	defer p.mu.Unlock()
	if at := p.find(id); at != 0 {
		p.forget(at)
		m.changes.Add(1)
	}
}

// callerAt returns the caller, as far as it is known at a time.
func (e *entry) callerAt(now time.Time) CallerDigest {
	switch {
	case e.caller.Named():
		return e.caller
	case e.caller > CallerDigest(seconds(now)):
		return NoCaller
	}
	return 0
}

func (p *part) each(f func(entry)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.entries) == 0 {
		return
	}
	for at := p.entries[0].newer; at != 0; at = p.entries[at].newer {
		f(p.entries[at])
	}
}

// add adds an entry as the newest one. The caller holds the lock.
func (p *part) add(e entry) {
	if p.entries == nil {
		p.entries = make([]entry, 1)
	}
	if p.count == len(p.chains) {
		p.chains = make([]uint32, max(8, 2*p.count))
		for at := p.entries[0].newer; at != 0; at = p.entries[at].newer {
			p.link(at)
		}
	}
	at := p.free
	if at != 0 {
		p.free = p.entries[at].newer
	} else {
		at = uint32(len(p.entries)) //nolint:gosec // far fewer than its limit
		p.entries = append(p.entries, entry{})
	}
	e.older, e.newer = p.entries[0].older, 0
	p.entries[at] = e
	p.entries[e.older].newer = at
	p.entries[0].older = at
	p.link(at)
	p.count++
}

// forget removes an entry. The caller holds the lock.
func (p *part) forget(at uint32) {
	e := &p.entries[at]
	link := p.chain(e.key)
	for *link != at {
		link = &p.entries[*link].next
	}
	*link = e.next
	p.count--
	p.entries[e.older].newer = e.newer
	p.entries[e.newer].older = e.older
	*e = entry{newer: p.free}
	p.free = at
}

func (m *Memory) indexOf(account string) uint32 {
	if i := slices.Index(*m.accounts.Load(), account); i >= 0 {
		return uint32(i) //nolint:gosec // there are as many as configs name
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	accounts := *m.accounts.Load()
	i := slices.Index(accounts, account)
	if i < 0 {
		i = len(accounts)
		accounts = append(slices.Clone(accounts), account)
		m.accounts.Store(&accounts)
	}
	return uint32(i) //nolint:gosec // there are as many as configs name
}

// seconds returns the Unix time of t in seconds, for entries. It ends in the
// year 2106.
func seconds(t time.Time) uint32 {
	return uint32(min(max(t.Unix(), 0), 1<<32-1)) //nolint:gosec // within bounds
}
