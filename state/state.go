// Package state is for engines by which replicas of the balancer tell each
// other what they learn: which backend throttles, which one an operator took
// out of use, and which account has a stored object. An engine is a Caddy module
// in the namespace http.openai_lb.state. It only moves bytes. What they mean,
// when they are sent, and what happens while the engine cannot be reached is not
// its concern.
//
// No request waits for anything here, except for Find: a request that names an
// object of which its replica does not know waits for that, for a short time.
package state

import (
	"context"
	"errors"
	"time"
)

// Engine is what a module in the namespace http.openai_lb.state implements.
type Engine interface {
	// Identity tells engines apart. Handlers whose engines have the same one
	// share a Store, also through a reload of the config. It may hold secrets,
	// and is never shown.
	Identity() string

	// Open returns the engine's store. It connects to nothing yet.
	Open() (Store, error)
}

// Store keeps records for all replicas, and passes messages between them. Its
// methods are called from several goroutines. Each returns an error when its
// context is done, at the latest.
//
// Times to live pass by the store's own clock, so that the clocks of the
// replicas do not matter.
type Store interface {
	// Put sends the message of each record to all who listen, and keeps the
	// record as its Mode says. A record that cannot be kept does not keep the
	// others from it, nor its own message from being sent.
	Put(ctx context.Context, records []Record) error

	// Load returns the records of these groups whose time has not passed, and the
	// time by the store's clock. Of several clocks, it is the one of the first
	// group. Records that another program wrote are left out.
	Load(ctx context.Context, groups []string) (kept []Kept, now time.Time, err error)

	// Claim reports, in the order of the claims, whether this store has the name,
	// or gets it because no other has claimed it within the time to live of that
	// claim.
	Claim(ctx context.Context, claims []Claim) (won []bool, err error)

	// Listen calls hear with every message that is sent, those of this replica
	// included, until that is no longer possible. It calls ready when it has
	// begun. Messages come at least once a second, so that a connection on which
	// none comes for some seconds is lost. hear does not keep the message.
	Listen(ctx context.Context, ready func(), hear func(message []byte)) error

	// Keep keeps each entry under its key if there is none whose time has not
	// passed, or if the one that is there is not firm and the new one is.
	// Otherwise only the time to live begins anew. Nobody is told. An entry that
	// cannot be kept does not keep the others from it: failed are the indexes of
	// all such entries, and err says why the first of them was not kept.
	Keep(ctx context.Context, entries []Entry) (failed []int, err error)

	// Find returns the entries with these keys, in the order of the keys. One
	// that is not there, or whose time has passed, has no value.
	Find(ctx context.Context, keys []string) ([]Entry, error)

	// Close ends the store. No other method is called after it.
	Close() error
}

// Record is what a store keeps.
type Record struct {
	// Group and Key name the record. Group is of letters, digits and '-', and
	// Key of any bytes, of which there is at least one. The records of a group are
	// loaded together.
	Group, Key string
	// Most is how many records the group may have, this one included, or else it
	// is not kept. 0: MaxRecords.
	Most int
	// Version tells records of the same name apart, as Mode says.
	Version string
	// Mode says what becomes of a record of the same name that is kept already.
	Mode Mode
	// Near is within which time two records of different versions end that Extend
	// takes for one.
	Near time.Duration
	// TTL is how long the record is kept, MaxTTL at most. 0: forever.
	TTL time.Duration
	// Message is the record's content.
	Message []byte
}

// Mode says when a record is kept if there is one of the same name whose time
// has not passed.
type Mode int

const (
	// Extend keeps whichever of the two lasts longer. If both have the same
	// version, the message is replaced, and the time to live stays. If they are
	// one by Near, the one of the smaller version is kept as long as the longer.
	Extend Mode = iota
	// Finish replaces the message, and the time to live stays. From then on,
	// Extend does nothing with the same version, and replaces the record with
	// any other. Finish does nothing if there is no record of the same version.
	Finish
	// Replace replaces the record.
	Replace
	// Latest keeps whichever of the two has the greater version, compared as text.
	// If both have the same, the new one is kept.
	Latest
)

// Kept is a record that a store has kept.
type Kept struct {
	Group, Key string
	// TTL is what is left of its time. 0: it is kept forever.
	TTL     time.Duration
	Message []byte
}

// Claim is for a name that one store of many gets.
type Claim struct {
	Name string
	TTL  time.Duration
}

// Entry is what a store keeps by itself, for whoever asks for its key. There may
// be millions.
type Entry struct {
	// Key is of letters, digits, '-' and '_'.
	Key string
	// Value is of any bytes, of which there are MaxValue at most.
	Value []byte
	// Firm tells that no other entry takes the place of this one.
	Firm bool
	// TTL is how long the entry is kept, at least a millisecond.
	TTL time.Duration
}

// MaxValue is how many bytes the value of an entry has at most.
const MaxValue = 64

// MaxMessage is how many bytes a message has at most. Longer ones are not for
// us, and need not be passed on.
const MaxMessage = 4096

// MaxTTL is how long a record is kept at most that is not kept forever.
const MaxTTL = 24 * time.Hour

// MaxRecords is how many records of a group a store keeps at most. There are
// that many only if somebody makes up names of models.
const MaxRecords = 1024

// ErrFull reports that a group has as many records as it may have.
var ErrFull = errors.New("too many records")
