package ledger

import (
	"iter"
	"strings"
)

// A page has a bounded number of rows, and so has each caller in it: a caller
// may make up models. Where a bound is reached, requests are added up in
// coarser rows. Their backend is given up first, because the bill is about
// callers and models, then their service tier, and the model last. So no caller
// takes away what a page says about the others.
const (
	// maxRows is how many rows a page has at most.
	maxRows = 20_000
	// maxOwn is how many rows a caller has at most.
	maxOwn = 2000
	// few is how many rows a caller has as long as the page has room for any,
	// so that several callers who make up models do not take those of the
	// others.
	few = 50
)

// other stands for what a row does not distinguish.
const other = "other"

// restOf is the row of what a caller has used without room for more rows, and
// rest that of callers without one.
func restOf(caller string) Key { return Key{caller, other, other, other} }

var rest = restOf("*") // which is no caller's name

// coarser are the keys that are tried one after the other, with the part of
// both bounds up to which a new row may have them.
var coarser = [...]struct {
	of   func(Key) Key
	part float64
}{
	{func(k Key) Key { return k }, 0.7},
	{func(k Key) Key { return Key{k.Caller, k.Model, other, k.ServiceTier} }, 0.8},
	{func(k Key) Key { return Key{k.Caller, k.Model, other, other} }, 0.9},
	{func(k Key) Key { return restOf(k.Caller) }, 1},
}

// rows are those of a page, by their callers.
type rows struct {
	of     map[string]map[Key]*Row
	number int
}

// get returns the row of a key, or nil.
func (r *rows) get(k Key) *Row { return r.of[k.Caller][k] }

// find returns the row to which the use of a key is added. If there is no room
// for one of its own, it is a coarser one.
func (r *rows) find(k Key) *Row {
	own := r.of[k.Caller]
	if row := own[k]; row != nil {
		return row
	}
	bound := maxOwn
	if k.Caller == "" { // there are no others
		bound = maxRows
	}
	for _, c := range coarser {
		key := c.of(k)
		if row := own[key]; row != nil {
			return row
		}
		isFree := r.number < int(c.part*maxRows)-1 && (key == restOf(k.Caller) || len(own) < int(c.part*float64(bound))-1)
		if isFree || len(own) < few && r.number < maxRows-1 {
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
	own := r.of[row.Caller]
	if own[row.Key] != row {
		return
	}
	delete(own, row.Key)
	if r.number--; len(own) == 0 {
		delete(r.of, row.Caller)
	}
}

func (r *rows) all() iter.Seq[*Row] {
	return func(yield func(*Row) bool) {
		for _, own := range r.of {
			for _, row := range own {
				if !yield(row) {
					return
				}
			}
		}
	}
}
