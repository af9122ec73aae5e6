// Package state defines the interface of engines by which replicas of the
// balancer share what they learn: which backend throttles, which one an
// operator took out of use, which account stores an object, and how much of
// limits is used. An engine is a Caddy module in the namespace
// http.openai_lb.state. It only moves bytes. The balancer decides what they
// mean, when they are sent, and what happens while the engine cannot be
// reached.
//
// An [Engine] opens a [Store], which keeps records, claims and entries, and
// passes messages. Authors of an engine implement both. [SecretReader] and
// [SpreadStore] are for engines with secrets in files, and with several
// servers. Package statetest tests them.
//
// The methods of a Store are called by many goroutines at the same time. Each
// must return when its context is done.
//
// Requests do not wait for a Store, except for [Store.Find]: a request that
// names an object which its replica does not know waits for the object's entry,
// for a short time.
package state

import (
	"context"
	"errors"
	"time"
)

// Engine is the interface of modules in the namespace http.openai_lb.state.
type Engine interface {
	// Identity identifies the engine. Handlers whose engines have the same
	// Identity share a Store, also through a reload of the config. It may
	// contain secrets, and is never shown.
	Identity() string

	// Open returns the engine's store. It connects to nothing yet.
	Open() (Store, error)
}

// SecretReader is an Engine with secrets in files. Operators see which of them
// cannot be read.
type SecretReader interface {
	// Secrets returns functions that read the secrets in files again, by the
	// names of their options. If that fails, the previous secret stays. The
	// errors contain no secret.
	Secrets() map[string]func() error
}

// Store keeps records for all replicas, and passes messages between them. Its
// methods are called from several goroutines. Each returns an error when its
// context is done, at the latest.
//
// Times to live are measured by the store's own clock, so that the clocks of
// the replicas do not matter.
type Store interface {
	// Put sends the message or the news of each record to all listeners, and
	// keeps the record as its Mode says. If a record cannot be kept, the others
	// are still kept, and its message is still sent.
	Put(ctx context.Context, records []Record) error

	// Load returns the records of these groups whose time has not passed, and
	// the time by the store's clock. With several clocks, it is the clock of
	// the first group. Records that another program wrote are left out.
	Load(ctx context.Context, groups []string) (kept []Kept, now time.Time, err error)

	// Claim reports, in the order of the claims, whether this store has the
	// name. It gets a name that no other store has claimed within the time to
	// live of that claim.
	Claim(ctx context.Context, claims []Claim) (won []bool, err error)

	// Listen calls hear with every message that is sent, including this
	// replica's own, until that is no longer possible. It calls ready when it
	// has started, and again whenever messages may have been missed. Messages
	// come at least once a second, so a connection without any message for some
	// seconds is lost. hear does not keep the message.
	Listen(ctx context.Context, ready func(), hear func(message []byte)) error

	// Keep keeps each entry under its key if there is no entry whose time has
	// not passed, or if the existing entry is not firm and the new one is.
	// Otherwise only the time to live starts anew. It sends no message. If an
	// entry cannot be kept, the others are still kept: failed are the indexes
	// of all such entries, and err says why the first of them was not kept.
	Keep(ctx context.Context, entries []Entry) (failed []int, err error)

	// Find returns the entries with these keys, in the order of the keys. A
	// missing entry, or one whose time has passed, has no value. With
	// ErrIncomplete, those that are missing may exist.
	Find(ctx context.Context, keys []string) ([]Entry, error)

	// Close ends the store. No other method is called after it.
	Close() error
}

// SpreadStore is a Store that has several servers, and works while one of them
// does.
type SpreadStore interface {
	Store
	// Missing says which of the servers cannot be reached, or returns nil.
	// Replicas that reach only those servers are not heard.
	Missing() error
	// Near names the one that answers fastest.
	Near() string
}

// Record is a record that a store keeps.
type Record struct {
	// Group and Key name the record. Group consists of letters, digits and '-',
	// and Key of one byte or more. The records of a group are loaded together.
	Group, Key string
	// Most is how many records the group may have, including this one;
	// otherwise it is not kept. 0: MaxRecords.
	Most int
	// Version distinguishes records of the same name, as Mode says.
	Version string
	// Mode defines what happens to an existing record of the same name.
	Mode Mode
	// Near is the largest difference between the ends of two records of
	// different versions that Extend treats as one.
	Near time.Duration
	// TTL is how long the record is kept, MaxTTL at most. 0: forever.
	TTL time.Duration
	// Message is the record's content.
	Message []byte
	// News is sent in place of Message, if listeners know the rest of it. nil:
	// Message. Empty, but not nil: nothing is sent.
	News []byte
}

// Mode defines when a record is kept if there is one of the same name whose
// time has not passed.
type Mode int

const (
	// Extend keeps whichever of the two lasts longer. If both have the same
	// version, the message is replaced, and the time to live stays. If Near
	// makes them one, the record with the smaller version is kept, for the
	// longer time.
	Extend Mode = iota
	// Finish replaces the message, and the time to live stays. From then on,
	// Extend does nothing with the same version, and replaces the record with
	// any other version. Finish does nothing if there is no record of the same
	// version.
	Finish
	// Replace replaces the record.
	Replace
	// Latest keeps whichever of the two has the greater version, compared as
	// text. If both have the same version, the new one is kept.
	Latest
)

// Kept is a record that a store has kept.
type Kept struct {
	Group, Key string
	// Version is that of the record, so that two of the same name can be told
	// apart.
	Version string
	// Partial reports whether only some servers of a SpreadStore keep this
	// version. It holds nevertheless, and a replica that knows what it says
	// puts it again.
	Partial bool
	// TTL is the rest of its time to live. 0: it is kept forever.
	TTL     time.Duration
	Message []byte
}

// Claim is a claim to a name that only one of many stores gets.
type Claim struct {
	Name string
	TTL  time.Duration
}

// Entry is a value that a store keeps under a key, for Find. There may be
// millions.
type Entry struct {
	// Key consists of letters, digits, '-' and '_'.
	Key string
	// Value consists of at most MaxValue bytes.
	Value []byte
	// Firm reports whether no other entry may replace this one.
	Firm bool
	// TTL is how long the entry is kept, at least a millisecond.
	TTL time.Duration
}

// MaxValue is the most bytes that the value of an entry may have.
const MaxValue = 64

// MaxMessage is the most bytes that a message may have. Longer ones come from
// other programs, and need not be passed on.
const MaxMessage = 4096

// MaxTTL is the longest time to live of a record that is not kept forever.
const MaxTTL = 24 * time.Hour

// MaxRecords is the most records of a group that a store keeps. Only made-up
// names of models lead to that many.
const MaxRecords = 1024

// ErrIncomplete reports that a server did not answer which may have what is
// missing.
var ErrIncomplete = errors.New("not all servers have answered")

// ErrFull reports that a group has as many records as it may have.
var ErrFull = errors.New("too many records")
