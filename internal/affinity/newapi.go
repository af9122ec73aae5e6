package affinity

import (
	"net/http"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/ownership"
)

// For an unknown API, package openaiapi guesses how requests use objects. An
// object that a request makes is learned as in any other API. With client keys,
// that is not enough: a list may show objects that another caller made before
// this pool knew of them, and a name may be such an object. So a caller reaches
// only objects that replies to its own requests have named, and objects below
// them.
//
// Only new names in a reply are learned. If the request contains a name, or the
// name already has an owner, the owner stays. Otherwise a caller could take
// over an object by an update that repeats the object's name, or by a request
// whose reply repeats the request's text.

// maxSentTexts is the maximum number of texts of a request that are compared
// with the names in its reply. If there are more, the caller does not become
// the owner of these names.
const maxSentTexts = 10_000

// takeNames adds the possible names in the path and the body of a request to a
// new API.
func (f *finder) takeNames(r *Query, stored *openaiapi.Stored) {
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
	f.parent = stored.Parent
	f.sentTexts = make(map[ownership.Key]struct{})
	for _, n := range stored.Names {
		f.sentTexts[ownership.KeyOf(n.Text)] = struct{}{}
	}
	if f.creation = createsNothing; r.showsAll() && f.recordTexts(r) {
		f.creation = createsAll
	}
}

// recordTexts records the texts of the body. It reports whether it has recorded
// all of them.
func (f *finder) recordTexts(r *Query) (all bool) {
	each := openaiapi.EachString
	if r.Body.IsForm() {
		each = openaiapi.EachLine
	}
	all = true
	each(r.Text, func(text []byte) bool {
		f.sentTexts[ownership.KeyOf(text)] = struct{}{}
		all = len(f.sentTexts) < maxSentTexts
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

// checkNames refuses a caller's request to a new API if it may reach objects
// that no reply has named to that caller. The first name in its path must
// belong to the caller.
func (f *finder) checkNames(r *Query, stored *openaiapi.Stored) {
	for _, n := range stored.Names {
		switch {
		case slices.Contains(f.ownedKeys, keyOfName(n)):
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
	if _, repeated := p.sentTexts[ownership.KeyOf(name.Text)]; repeated {
		return
	}
	var caller ownership.CallerDigest
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
