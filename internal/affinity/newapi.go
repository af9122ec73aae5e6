package affinity

import (
	"net/http"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/ownership"
)

// For an API that is not known, package openaiapi guesses how requests use
// objects. An object that a request makes there is learned like any other. With
// client keys, that is not enough: a list may show, and a name may be, what
// another caller has made before this pool knew of it. So there, a caller
// reaches only what replies to its own requests have taught, and what is below
// that.
//
// A reply teaches only new names. One that the request said, or that has an
// owner already, stays whose it is: otherwise a caller could take an object by
// an update that repeats its name, or by a request that is answered with its
// own text.

// maxSaid is how many texts of a request are compared with the names in its
// reply. If there are more, no owner is learned from the reply.
const maxSaid = 10_000

// takeNames takes what may be names in the path and the body of a request to a
// new API.
func (f *finder) takeNames(r *Request, stored *openaiapi.Stored) {
	for _, n := range stored.Names {
		kind := openaiapi.GuessedID // a word says nothing of where the request has to go
		if !n.Word {
			kind = openaiapi.ObjectID
		}
		f.takeAs(keyOfName(n), kind, []byte(n.Text))
	}
	if !r.Compressed {
		openaiapi.EachGuess(r.Text, func(text []byte) { f.take(openaiapi.GuessedID, text) })
	}
	if !stored.Creates {
		return
	}
	f.within = stored.Within
	f.said = make(map[ownership.Key]struct{})
	for _, n := range stored.Names {
		f.said[ownership.KeyOf(n.Text)] = struct{}{}
	}
	if f.creation = createsNothing; r.showsAll() && f.says(r) {
		f.creation = createsAll
	}
}

// says records the texts of the body. It reports whether these are all.
func (f *finder) says(r *Request) (all bool) {
	each := openaiapi.EachString
	if r.Body.IsForm() {
		each = openaiapi.EachLine
	}
	all = true
	each(r.Text, func(text []byte) bool {
		f.said[ownership.KeyOf(text)] = struct{}{}
		all = len(f.said) < maxSaid
		return all
	})
	return all
}

func keyOfName(n openaiapi.PathName) ownership.Key {
	if n.IsGlobal() {
		return ownership.KeyOf(n.Text)
	}
	return ownership.KeyOf(n.Scoped())
}

// checkNames refuses a request of a caller to a new API if it may reach what no
// reply has taught that caller: the first name in its path has to be the
// caller's own.
func (f *finder) checkNames(r *Request, stored *openaiapi.Stored) {
	for _, n := range stored.Names {
		switch {
		case slices.Contains(f.owns, keyOfName(n)):
			if stored.OddPath {
				f.refuse(apierror.InvalidPath("The path must be spelled as in the API's documentation."))
			}
			return
		case n.Word:
		case f.unread:
			f.refuse(apierror.OwnersUnknown)
			return
		default:
			f.refuse(notFound(openaiapi.ObjectID, n.Text))
			return
		}
	}
	switch {
	case r.Method == http.MethodPost, r.Method == http.MethodOptions, r.Upgrade:
	case f.unread && len(stored.Names) > 0:
		f.refuse(apierror.OwnersUnknown)
	default:
		f.refuse(forbidden("This operation is not available: it is not known which objects it would show or change, and some may be those of other callers."))
	}
}

// learnMade records the name of an object that a request to a new API has made.
func (p *Placement) learnMade(account string, name openaiapi.MadeName) {
	a, now := p.affinity, time.Now()
	if _, repeated := p.said[ownership.KeyOf(name.Text)]; repeated {
		return
	}
	var caller ownership.Caller
	if p.creation == createsAll {
		caller = p.caller
	}
	learn := func(key ownership.Key) {
		if _, known := a.owners.loaded().Get(key, now); known || p.names(key) {
			return
		}
		p.ids = learnedIDs
		p.put(key, account, caller)
		a.owners.guessed.add(a.owners.memory, p.caller, key)
	}
	if name.Global {
		learn(ownership.KeyOf(name.Text))
	}
	if name.Scoped != "" {
		learn(ownership.KeyOf(name.Scoped))
	}
}
