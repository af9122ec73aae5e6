package affinity

import (
	"cmp"
	"encoding/binary"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/ownership"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

// A caller's objects are often used together: a file and a vector store, an
// assistant and a thread, a response and a file. So they are made in one
// account, which is the caller's home. Callers without names count as one
// caller, because they may use each other's objects.
//
// All replicas find the same home without communicating: among the accounts
// that could get the request anyway, it is the first one in the order of the
// caller's name (see package pool). If that changes because the home is drained
// or fails, the caller moves. The new home is remembered like the owner of an
// object, under a key that no object has. So it outlives a restart and reaches
// other replicas, as owners do.
//
// Conversations, threads and stored responses are made in any account as long
// as their caller has no other objects. Each of them is bound to its account,
// so with a home, a caller that makes nothing else would always use one
// account. The caller's first other object is made where its latest
// conversation, thread or response is.

// homeOf returns the key under which a caller's home is remembered. lastOf
// returns the key for the account of the caller's latest conversation, thread
// or response.
func homeOf(c ownership.CallerDigest) ownership.Key { return keyOf("home", c) }
func lastOf(c ownership.CallerDigest) ownership.Key { return keyOf("last", c) }

func keyOf(purpose string, c ownership.CallerDigest) ownership.Key {
	return ownership.KeyOf(binary.LittleEndian.AppendUint64([]byte(purpose+"\x00"), uint64(c))) // no id has a NUL
}

// findHome finds the caller's home for a request that makes an object.
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

// lookUpHome asks other replicas for the caller's home, and for the account of
// its latest conversation if that is not known here.
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

func (f *finder) keep(key ownership.Key, found ownership.Found) (account string) {
	a := f.affinity
	if found.TTL <= 0 || !slices.Contains(a.accounts, found.Account) {
		return ""
	}
	f.store.Put(key, ownership.Owner{Account: found.Account}, f.now, min(found.TTL, idTTL))
	return found.Account
}

// Maker returns how the pool chooses the account for a request that makes an
// object. It returns nil if the caller does not affect the choice.
func (p *Placement) Maker() *pool.Maker {
	if p.maker.Home == "" && p.maker.Order == 0 {
		return nil
	}
	return &p.maker
}

// remember records the account in which the caller's object was made. If the
// request names other objects, its object is made where these are, so it does
// not change a known home.
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
