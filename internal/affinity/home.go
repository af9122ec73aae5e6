package affinity

import (
	"cmp"
	"encoding/binary"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/ownership"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/replicas"
)

// What a caller makes is often used together: a file and a vector store, an
// assistant and a thread, a response and a file. So it is made in one account,
// the caller's home. Callers without names are one caller, because they may use
// each other's objects.
//
// Each replica finds the same home without talking: the first account in the
// order of the caller's name (see package pool) among those that would get the
// request anyway. If that is another one than before, because the home is
// drained or fails, the caller moves. Where it moved is remembered like the
// owner of an object, with an id that no object has, so it outlives a restart
// and reaches other replicas just as owners do.
//
// Conversations, threads and stored responses are made at any account while
// their caller uses no other objects: they are bound to the account where they
// began, so a caller that has only these would be bound to one account. What
// else the caller makes first goes where the last of them is.

// homeOf is the id for the account where a caller's objects are made, and
// lastOf the one for where its last conversation, thread or response is.
func homeOf(c ownership.Caller) ownership.Key { return keyOf("home", c) }
func lastOf(c ownership.Caller) ownership.Key { return keyOf("last", c) }

func keyOf(what string, c ownership.Caller) ownership.Key {
	return ownership.KeyOf(binary.LittleEndian.AppendUint64([]byte(what+"\x00"), uint64(c))) // no id has a NUL
}

// findHome finds out where the caller's objects are, for a request that makes
// another one.
func (f *finder) findHome() {
	p := f.Placement
	if p.makes == openaiapi.MakesNothing || len(p.named) > 0 || len(p.affinity.accounts) < 2 {
		return
	}
	p.free = true
	home, last := f.accountOf(homeOf(p.caller)), f.accountOf(lastOf(p.caller))
	if home == "" && p.makes != openaiapi.MakesResponse { // of which there are many
		home, last = f.lookUpHome(last)
	}
	order := max(1, uint64(p.caller))
	switch {
	case p.makes == openaiapi.MakesObject:
		p.maker = pool.Maker{Home: home, Last: last, Order: order}
	case home == "": // then the choice is free
	case p.makes == openaiapi.MakesHistory:
		p.maker = pool.Maker{Home: home, Order: order}
	default:
		p.maker = pool.Maker{Home: home}
	}
}

func (f *finder) accountOf(key ownership.Key) string {
	if o, _ := f.store.Get(key, f.now); slices.Contains(f.affinity.accounts, o.Account) {
		return o.Account
	}
	return ""
}

// lookUpHome asks other replicas where the caller's objects are, and where its
// last conversation is if that is not known here.
func (f *finder) lookUpHome(lastHere string) (home, last string) {
	a, keys := f.affinity, []ownership.Key{homeOf(f.caller), lastOf(f.caller)}
	if a.others == nil {
		return "", lastHere
	}
	found, err := a.others.Lookup(f.caller, keys)
	if err != nil {
		return "", lastHere
	}
	return f.keep(keys[0], found[0]), cmp.Or(lastHere, f.keep(keys[1], found[1]))
}

func (f *finder) keep(key ownership.Key, found replicas.Found) (account string) {
	a := f.affinity
	if found.TTL <= 0 || !slices.Contains(a.accounts, found.Account) {
		return ""
	}
	f.store.Put(key, ownership.Owner{Account: found.Account}, f.now, min(found.TTL, idTTL))
	return found.Account
}

// Maker returns how the pool chooses among the accounts for a request that
// makes an object, or nil if the caller does not matter.
func (p *Placement) Maker() *pool.Maker {
	if p.maker.Home == "" && p.maker.Order == 0 {
		return nil
	}
	return &p.maker
}

// remember records where the caller's object was made. What names other objects
// is made where these are, and does not move the caller.
func (p *Placement) remember(account string) {
	a := p.affinity
	if p.makes == openaiapi.MakesNothing || len(a.accounts) < 2 {
		return
	}
	home, _ := a.owners.loaded().Get(homeOf(p.caller), time.Now())
	isKnown := slices.Contains(a.accounts, home.Account)
	switch {
	case p.makes == openaiapi.MakesObject && (p.free || !isKnown):
		p.put(homeOf(p.caller), account, 0)
	case p.makes != openaiapi.MakesObject && !isKnown:
		p.put(lastOf(p.caller), account, 0)
	}
}
