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

// Owners shares the owners of one pool's ids between replicas. Each replica
// sends the owners that it learns to the store, in the background, and asks the
// store only for ids that it does not know. It is an ownership.Others.
//
// In the store, the key of an entry is a digest of the pool's name and of the
// id's key. The value is a digest of the account and, if a caller owns the id,
// one of the caller's name.
type Owners struct {
	replica  *Replica
	pool     string
	accounts map[accountDigest]string
}

// accountDigest is a digest of an account's name, which may contain a host.
type accountDigest [8]byte

func digestOf(account string) accountDigest {
	sum := sha256.Sum256([]byte("account " + account))
	return accountDigest(sum[:])
}

// Owners returns the owners of ids of a pool with these accounts. Pools with
// the same name are the same pool for all replicas.
func (l *Link) Owners(pool string, accounts []string) ownership.Others {
	o := &Owners{replica: l.replica, pool: pool, accounts: make(map[accountDigest]string, len(accounts))}
	for _, account := range accounts {
		o.accounts[digestOf(account)] = account
	}
	return o
}

// ownerStore is the access to the owners in the store. queue holds owners to be
// stored. lookups limits the questions to the store, and patience is how long
// each may take.
type ownerStore struct {
	queue    *queue[owned]
	lookups  *ownership.Lookups
	patience lookupPatience
}

// owned is an id whose owner is to be stored.
type owned struct {
	pool  string
	id    ownership.Key
	owner ownership.Owner
	ttl   time.Duration
}

// maxOwned is the maximum number of owners that wait to be sent.
const maxOwned = 16_384

// Send stores the owner of an id for the other replicas, in the background.
func (o *Owners) Send(id ownership.Key, owner ownership.Owner, ttl time.Duration) {
	ownersDropped.Add(float64(o.replica.stored.queue.add(owned{o.pool, id, owner, ttl})))
}

func entryKey(pool string, id ownership.Key) string {
	sum := sha256.Sum256(append([]byte("id "+pool+"\x00"), id[:]...))
	return base64.RawURLEncoding.EncodeToString(sum[:16])
}

// entry returns the store's entry of the owner. It is firm if a caller is known
// to own the object: the caller that made an object never changes, and a caller
// that found it by asking proves nothing about that.
func (i owned) entry() state.Entry {
	account := digestOf(i.owner.Account)
	e := state.Entry{Key: entryKey(i.pool, i.id), Value: account[:], TTL: max(i.ttl, time.Second),
		Firm: i.owner.Caller.Named()}
	if e.Firm {
		e.Value = binary.LittleEndian.AppendUint64(e.Value, uint64(i.owner.Caller))
	}
	return e
}

// sendOwners stores owners as they are learned. Owners that the store refuses
// go to the end of the queue, so that they do not delay others.
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

// keepLast stores the owners that are still in the queue when the replica ends.
func (r *Replica) keepLast(ctx context.Context) {
	until := time.Now().Add(patience)
	for items := r.stored.queue.next(); len(items) > 0 && time.Now().Before(until); items = r.stored.queue.next() {
		if failed, _ := r.keep(ctx, items); len(failed) == len(items) {
			return
		}
	}
}

// keep stores owners. It returns those that the store did not keep, and why.
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

// refusals logs once when the store keeps refusing owners although the replica
// is connected. A lost connection is logged elsewhere.
type refusals struct {
	inARow int
	logged bool
}

// loggedFrom is the number of consecutive refusals after which they are logged.
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

// Gone is the account of an owner whose account the pool does not have.
const Gone = "gone"

// Lookup asks the store for the owners of the ids that a caller's request
// names. It waits for the caller's turn, and then for three times as long as
// the store usually takes, between [LeastPatience] and a second. It returns
// ownership.ErrNoAnswer if no answer comes in time, and for a while after that
// without asking, or ownership.ErrCrowded if too many lookups wait.
func (o *Owners) Lookup(c ownership.CallerDigest, ids []ownership.Key) (found []ownership.Found, err error) {
	if len(ids) == 0 {
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

// find asks the store, and returns the outcome for metrics. found is nil
// without an answer.
func (o *Owners) find(ids []ownership.Key) (found []ownership.Found, outcome string) {
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

// found decodes the store's entries. Any client of the store may have written
// them.
func (o *Owners) found(entries []state.Entry) (found []ownership.Found, outcome string) {
	found, outcome = make([]ownership.Found, len(entries)), "unknown"
	for i, e := range entries {
		const short, long = len(accountDigest{}), len(accountDigest{}) + 8
		if e.TTL <= 0 || len(e.Value) != short && len(e.Value) != long {
			continue
		}
		account, ok := o.accounts[accountDigest(e.Value[:short])]
		if !ok {
			account = Gone
		}
		found[i] = ownership.Found{Owner: ownership.Owner{Account: account}, TTL: e.TTL}
		if len(e.Value) == long {
			found[i].Caller = ownership.CallerDigest(binary.LittleEndian.Uint64(e.Value[short:]))
		}
		outcome = "found"
	}
	return found, outcome
}
