package ledger

import (
	"iter"
	"strings"
)

// The number of rows of a page is limited, and so is each caller's number of
// rows in it, because a caller may make up models. At a limit, requests are
// added to coarser rows. First the backend is dropped, because the bill is
// about callers and models, then the service tier, and the model last. So no
// caller can spoil the rows of other callers.
const (
	// maxRows is the maximum number of rows of a page.
	maxRows = 20_000
	// maxOwn is the maximum number of rows of a caller.
	maxOwn = 2000
	// few is how many rows a caller may have until the page is full. It keeps
	// some rows for each caller, even if several others make up models.
	few = 50
)

// other replaces a value that a row does not distinguish.
const other = "other"

// restOf returns the key of the coarsest row of a caller. rest is the key of
// the row of callers that have no row.
func restOf(caller string) Key { return Key{caller, other, other, other} }

var rest = restOf("*") // which is no caller's name

// coarser lists the keys to try for a new row, one after another. A key may be
// used up to its part of both limits.
var coarser = [...]struct {
	of   func(Key) Key
	part float64
}{
	{func(k Key) Key { return k }, 0.7},
	{func(k Key) Key { return Key{k.Caller, k.Model, other, k.ServiceTier} }, 0.8},
	{func(k Key) Key { return Key{k.Caller, k.Model, other, other} }, 0.9},
	{func(k Key) Key { return restOf(k.Caller) }, 1},
}

// rows has the rows of a page by their callers.
type rows struct {
	of     map[string]map[Key]*Row
	number int
}

// get returns the row of a key, or nil.
func (r *rows) get(k Key) *Row { return r.of[k.Caller][k] }

// find returns the row for a key. If there is no room for a separate row, it
// returns a coarser one.
func (r *rows) find(k Key) *Row {
	callerRows := r.of[k.Caller]
	if row := callerRows[k]; row != nil {
		return row
	}
	bound := maxOwn
	if k.Caller == "" { // there are no others
		bound = maxRows
	}
	for _, c := range coarser {
		key := c.of(k)
		if row := callerRows[key]; row != nil {
			return row
		}
		isFree := r.number < int(c.part*maxRows)-1 &&
			(key == restOf(k.Caller) || len(callerRows) < int(c.part*float64(bound))-1)
		if isFree || len(callerRows) < few && r.number < maxRows-1 {
			return r.make(key)
		}
	}
	if row := r.get(rest); row != nil {
		return row
	}
	return r.make(rest)
}

func (r *rows) make(k Key) *Row {
	// the strings may be parts of longer ones
	k = Key{strings.Clone(k.Caller), strings.Clone(k.Model), strings.Clone(k.Backend), strings.Clone(k.ServiceTier)}
	if r.of == nil {
		r.of = make(map[string]map[Key]*Row)
	}
	if r.of[k.Caller] == nil {
		r.of[k.Caller] = make(map[Key]*Row)
	}
	row := &Row{Key: k}
	r.of[k.Caller][k] = row
	r.number++
	return row
}

func (r *rows) remove(row *Row) {
	callerRows := r.of[row.Caller]
	if callerRows[row.Key] != row {
		return
	}
	delete(callerRows, row.Key)
	if r.number--; len(callerRows) == 0 {
		delete(r.of, row.Caller)
	}
}

func (r *rows) all() iter.Seq[*Row] {
	return func(yield func(*Row) bool) {
		for _, callerRows := range r.of {
			for _, row := range callerRows {
				if !yield(row) {
					return
				}
			}
		}
	}
}
