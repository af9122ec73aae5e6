package replicas

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/ownership"
	"github.com/openai-lb/caddy-openai-lb/state"
)

// Owners is what replicas know together of the ids of one pool. Each replica
// sends the store what it learns, in the background, and asks the store only
// for ids that it does not know. The methods of a nil Owners do nothing.
//
// In the store, an id is a digest of its key and of the pool's name. Its value
// is a digest of the account, and one of the caller's name if it is a caller's.
type Owners struct {
	replica  *Replica
	pool     string
	accounts map[accountDigest]string
}

// accountDigest stands for an account, whose own name may contain a host.
type accountDigest [8]byte

func digestOf(account string) accountDigest {
	sum := sha256.Sum256([]byte("account " + account))
	return accountDigest(sum[:])
}

// Owners returns what the replicas know of the ids of a pool with these
// accounts. Pools of one name are the same pool to all replicas.
func (l *Link) Owners(pool string, accounts []string) *Owners {
	if l == nil {
		return nil
	}
	o := &Owners{replica: l.replica, pool: pool, accounts: make(map[accountDigest]string, len(accounts))}
	for _, account := range accounts {
		o.accounts[digestOf(account)] = account
	}
	return o
}

// ownerStore is what the store keeps of owners: queue has those that it is to
// keep, and lookups are those that it is asked for, each with this patience.
type ownerStore struct {
	queue    *queue[owned]
	lookups  *ownership.Lookups
	patience lookupPatience
}

// owned is an id of which the store is to keep the owner.
type owned struct {
	pool  string
	id    ownership.Key
	owner ownership.Owner
	ttl   time.Duration
}

// maxOwned is how many ids wait to be sent at most.
const maxOwned = 16_384

// Send makes the store keep the owner of an id for the other replicas. It never
// waits.
func (o *Owners) Send(id ownership.Key, owner ownership.Owner, ttl time.Duration) {
	if o == nil {
		return
	}
	ownersDropped.Add(float64(o.replica.stored.queue.add(owned{o.pool, id, owner, ttl})))
}

func entryKey(pool string, id ownership.Key) string {
	sum := sha256.Sum256(append([]byte("id "+pool+"\x00"), id[:]...))
	return base64.RawURLEncoding.EncodeToString(sum[:16])
}

// entry returns what the store keeps of it. The caller that made an object
// never changes, and one that found it by asking proves nothing about that.
func (i owned) entry() state.Entry {
	account := digestOf(i.owner.Account)
	e := state.Entry{Key: entryKey(i.pool, i.id), Value: account[:], TTL: max(i.ttl, time.Second), Firm: i.owner.Caller.Named()}
	if e.Firm {
		e.Value = binary.LittleEndian.AppendUint64(e.Value, uint64(i.owner.Caller))
	}
	return e
}

// sendOwners makes the store keep owners, as they are learned. Those that the
// store does not keep now go to the end of the queue, so that they hold up no
// others.
func (r *Replica) sendOwners(ctx context.Context) {
	var refused refusals
	for {
		items := r.stored.queue.take(ctx)
		if items == nil {
			break
		}
		failed, err := r.keep(ctx, items)
		for _, i := range failed {
			ownersDropped.Add(float64(r.stored.queue.add(i)))
		}
		refused.kept(r, err)
		if len(failed) == len(items) {
			pause(ctx, retry)
		}
	}
	if r.connectivity.isConnected() {
		r.keepLast(context.WithoutCancel(ctx))
	}
}

// keepLast makes the store keep what the last requests taught.
func (r *Replica) keepLast(ctx context.Context) {
	until := time.Now().Add(patience)
	for items := r.stored.queue.next(); len(items) > 0 && time.Now().Before(until); items = r.stored.queue.next() {
		if failed, _ := r.keep(ctx, items); len(failed) == len(items) {
			return
		}
	}
}

// keep returns the items that the store does not keep, and why not.
func (r *Replica) keep(ctx context.Context, items []owned) (failed []owned, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	entries := make([]state.Entry, len(items))
	for i, item := range items {
		entries[i] = item.entry()
	}
	indexes, err := r.store.Keep(ctx, entries)
	for _, i := range indexes {
		failed = append(failed, items[i])
	}
	ownersOut.Add(float64(len(items) - len(failed)))
	return failed, err
}

// refusals logs one line if owners are refused for long and nothing else fails:
// a replica that is not connected has its own line.
type refusals struct {
	inARow int
	logged bool
}

// loggedFrom is how many times in a row some owners are refused before it is
// logged.
const loggedFrom = 8

func (f *refusals) kept(r *Replica, err error) {
	switch {
	case err != nil:
		f.inARow++
		if f.inARow >= loggedFrom && !f.logged && r.connectivity.isConnected() {
			f.logged = true
			r.logger.Load().Warn("could not share owners", zap.String("error", bounded(err.Error())))
		}
	case r.stored.queue.len() == 0: // or else those that were refused may be among them
		if f.logged {
			r.logger.Load().Info("sharing owners again")
		}
		*f = refusals{}
	}
}

// Found is the owner of an id, and for how long that holds. TTL is 0 if no
// replica knows it.
type Found struct {
	ownership.Owner
	TTL time.Duration
	// Unsure reports whether no replica is known to know it, but one in another
	// region may.
	Unsure bool
}

// Gone is in place of an account that the pool does not have.
const Gone = "gone"

// Lookup asks for the owners of the ids that a request of the caller names, and
// waits for the answer as long as lookupPatience says, after the caller's turn
// has come. It returns ownership.ErrNoAnswer if there is none in time, and then
// for a while without asking, or ownership.ErrCrowded.
func (o *Owners) Lookup(c ownership.Caller, ids []ownership.Key) (found []Found, err error) {
	if o == nil || len(ids) == 0 {
		return nil, ownership.ErrNoAnswer
	}
	r := o.replica
	outcome := "skipped"
	err = ownership.ErrNoAnswer
	if r.runs.Load() {
		err = r.stored.lookups.Do(c, func() bool {
			found, outcome = o.find(ids)
			return found != nil
		})
	}
	lookupsTotal.WithLabelValues(outcome).Inc()
	return found, err
}

// find asks the store. It returns nil if there is no answer, and the outcome.
func (o *Owners) find(ids []ownership.Key) (found []Found, outcome string) {
	keys := make([]string, len(ids))
	for i, id := range ids {
		keys[i] = entryKey(o.pool, id)
	}
	ctx, cancel := context.WithTimeout(context.Background(), o.replica.stored.patience.now())
	defer cancel()
	began := time.Now()
	entries, err := o.replica.store.Find(ctx, keys)
	lookupDuration.Observe(time.Since(began).Seconds())
	switch {
	case err == nil && len(entries) == len(ids):
		return o.found(entries)
	case errors.Is(err, state.ErrIncomplete) && len(entries) == len(ids):
		found, outcome = o.found(entries)
		for i := range found {
			found[i].Unsure = found[i].TTL <= 0
		}
		return found, outcome
	case ctx.Err() != nil:
		return nil, "late"
	}
	return nil, "failed"
}

// found reads what the store has, whoever wrote it.
func (o *Owners) found(entries []state.Entry) (found []Found, outcome string) {
	found, outcome = make([]Found, len(entries)), "unknown"
	for i, e := range entries {
		const short, long = len(accountDigest{}), len(accountDigest{}) + 8
		if e.TTL <= 0 || len(e.Value) != short && len(e.Value) != long {
			continue
		}
		account, ok := o.accounts[accountDigest(e.Value[:short])]
		if !ok {
			account = Gone
		}
		found[i] = Found{Owner: ownership.Owner{Account: account}, TTL: e.TTL}
		if len(e.Value) == long {
			found[i].Caller = ownership.Caller(binary.LittleEndian.Uint64(e.Value[short:]))
		}
		outcome = "found"
	}
	return found, outcome
}
