package affinity

import (
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/ownership"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

type id struct {
	ownership.Key
	kind openaiapi.IDKind
	// mustBeOwned reports whether the id must belong to the request's caller.
	mustBeOwned bool
	// caller is the caller that the id belongs to, as far as that is known.
	caller ownership.CallerDigest
}

// Query is the input for finding a Placement.
type Query struct {
	Method, Operation, RawQuery string
	// Body is the parsed body, and Text is the unparsed body.
	Body *openaiapi.Body
	Text []byte
	// Caller is the name of the caller, if callers have names.
	Caller string
	// KeyID identifies the caller's key. Account is the account that made the
	// client secret, if the request has one instead of a key. Both may be
	// empty.
	KeyID, Account string
	// Upgrade reports whether the request opens a WebSocket. Compressed reports
	// whether its body could not be read because it is compressed.
	Upgrade, Compressed bool
	// Disputed reports whether servers may disagree about the type of the body.
	Disputed bool
	// CutAt is how many bytes of a longer body were read. It is 0 if all of it
	// was read.
	CutAt int64
}

// Place returns the placement of a request. If no account may get the request,
// refused is true, and refusal is the error for the client.
func (a *Affinity) Place(r *Query) (p *Placement, refusal apierror.Error, refused bool) {
	if a.strict {
		if refusal, refused = r.refuses(); refused {
			return Anywhere, refusal, true
		}
	}
	stored := openaiapi.ReadStored(r.Method, r.Operation, r.RawQuery)
	stored.Teaches = stored.Teaches || stored.TeachesIfStored && (r.Body.Stores || r.Body.Speaks)
	if !stored.Teaches && !stored.NewAPI && len(stored.IDs)+len(stored.Guesses) == 0 && !r.Body.HasIDs() &&
		r.Account == "" {
		return Anywhere, refusal, false
	}
	return a.find(r, stored)
}

func (a *Affinity) find(r *Query, stored openaiapi.Stored) (*Placement, apierror.Error, bool) {
	p := &Placement{affinity: a, caller: ownership.CallerNamed(r.Caller)}
	if openaiapi.MakesClientSecret(r.Method, r.Operation) {
		p.minter = &Secret{By: MinterOf(r.Caller, r.KeyID)}
		if r.KeyID == "" {
			p.minter.TokenOf = r.Caller
		}
	}
	if r.Account != "" {
		if p.basis, p.account = owned, r.Account; !slices.Contains(a.accounts, r.Account) {
			return p, apierror.WrongKey, true // the caller may not use that account any more
		}
	}
	if stored.List && p.account == "" {
		p.basis = listed // unless an id has an owner
	}
	if stored.Teaches {
		p.ids = someIDs
	}
	if stored.Creates && (stored.Subject == "" || r.showsAll()) {
		p.creation = createsAll
	}
	if stored.Subject != "" {
		p.subject = ownership.KeyOf(stored.Subject)
	}
	f := finder{Placement: p, store: a.owners.loaded(), now: time.Now()}
	f.unread = a.owners.saver.Unread()
	for i, text := range stored.IDs {
		f.mustBeOwned = a.strict && i == 0 // the others are below it
		f.take(openaiapi.ObjectID, []byte(text))
	}
	f.mustBeOwned = a.strict
	r.Body.EachID(r.Text, f.take)
	f.mustBeOwned = false
	for _, text := range stored.Guesses {
		f.take(openaiapi.GuessedID, []byte(text))
	}
	if stored.NewAPI {
		f.takeNames(r, &stored)
	}
	f.lookUp()
	if stored.NewAPI && f.caller != 0 {
		f.checkNames(r, &stored)
	}
	if p.makes = stored.Makes; !f.refused && !r.Body.StoresNot {
		f.findHome()
	}
	return p, f.refusal, f.refused
}

// showsAll reports whether every object that the body names was seen. If not,
// the object that is made below another one may be an object that the body
// names, such as a file that is added to a vector store.
func (r *Query) showsAll() bool {
	return openaiapi.BodyNamesNothing(r.Method, r.Operation) ||
		!r.Compressed && r.CutAt == 0 && !r.Disputed && r.Body.Readable(r.Text)
}

// finder finds the owners of the ids in a request.
type finder struct {
	*Placement
	store *ownership.Memory
	// unread reports whether the saved owners were not read yet.
	unread  bool
	now     time.Time
	refusal apierror.Error
	refused bool
	// mustBeOwned reports whether the next id must belong to the caller.
	mustBeOwned bool
	// ownedKeys are the ids that are known to belong to the caller.
	ownedKeys []ownership.Key
	// open are the ids about which other replicas may know more.
	open []openID
}

type openID struct {
	id
	text  []byte
	owner ownership.Owner // as far as it is known here
}

func (f *finder) refuse(e apierror.Error) {
	if !f.refused {
		f.refusal, f.refused = e, true
	}
}

func (f *finder) take(kind openaiapi.IDKind, text []byte) {
	f.takeAs(ownership.KeyOf(text), kind, text)
}

// takeAs adds an id of the request under another key than the digest of text.
func (f *finder) takeAs(key ownership.Key, kind openaiapi.IDKind, text []byte) {
	object := id{Key: key, kind: kind, mustBeOwned: f.mustBeOwned}
	f.named = append(f.named, object)
	o, _ := f.store.Get(object.Key, f.now)
	if f.othersMayKnow(o) {
		f.open = append(f.open, openID{object, text, o})
	} else {
		f.apply(object, text, o)
	}
}

// othersMayKnow reports whether other replicas may know more about an id than
// its owner o: its caller, if callers have names, or its account, if there are
// several.
func (f *finder) othersMayKnow(o ownership.Owner) bool {
	a := f.affinity
	return a.others != nil && !o.Caller.Named() &&
		(f.caller != 0 && (f.mustBeOwned || o.Caller == 0) || o.Account == "" && len(a.all) > 1)
}

// apply applies the known owner of an id to the placement. If the config no
// longer has the owner's account, that account may have another name or key
// now, so the account counts as unknown. The caller is known anyway. An object
// in an account that the caller may not use does not exist for the caller.
func (f *finder) apply(object id, text []byte, o ownership.Owner) {
	if object.Key == f.subject && o.Caller == f.caller {
		f.creation = max(f.creation, createsParts)
	}
	object.caller = o.Caller
	if f.caller != 0 && o.Caller == f.caller {
		f.ownedKeys = append(f.ownedKeys, object.Key)
	}
	switch {
	case object.mustBeOwned && f.unread && !o.Caller.Named():
		f.refuse(apierror.OwnersUnknown)
	case !o.MayUse(f.caller), object.mustBeOwned && o.Caller != f.caller:
		f.refuse(notFound(object.kind, string(text)))
	case !slices.Contains(f.affinity.all, o.Account):
		if object.kind != openaiapi.GuessedID {
			f.unknown = append(f.unknown, object)
		}
	case !slices.Contains(f.affinity.accounts, o.Account):
		if object.kind != openaiapi.ItemID { // which may come whole
			f.refuse(notFound(object.kind, string(text)))
		}
	case f.basis != owned:
		f.basis, f.account, f.first.text, f.first.kind = owned, o.Account, string(text), object.kind
	case f.account != o.Account:
		f.refuse(differentAccounts(f.first.text, string(text)))
	}
}

// lookUp asks other replicas for the owners of the open ids. Without an answer,
// it uses the owners that are known here, but does not remember that as the
// replicas' answer. An id that must belong to the caller is then refused.
func (f *finder) lookUp() {
	if f.refused || len(f.open) == 0 {
		return
	}
	keys := make([]ownership.Key, len(f.open))
	for i := range keys {
		keys[i] = f.open[i].Key
	}
	found, err := f.affinity.others.Lookup(f.caller, keys)
	if errors.Is(err, ownership.ErrCrowded) ||
		err != nil && slices.ContainsFunc(f.open, func(object openID) bool { return object.mustBeOwned }) {
		f.refuse(apierror.OwnersUnknown)
		return
	}
	for i, object := range f.open {
		o := object.owner
		switch {
		case err != nil:
		case !found[i].Unsure:
			o = f.settle(object, found[i])
		case object.mustBeOwned:
			f.refuse(apierror.OwnersUnknown)
			return
		}
		f.apply(object.id, object.text, o)
	}
}

// settle remembers the other replicas' answer about an id, and returns the id's
// owner. If the id belongs to no caller, the replicas are asked again after
// ownership.Unclaimed, because one may have been unable to answer, or may have
// learned the caller since.
func (f *finder) settle(object openID, found ownership.Found) ownership.Owner {
	a, o, ttl := f.affinity, object.owner, min(found.TTL, idTTL)
	if found.TTL > 0 {
		if o.Caller = found.Caller; o.Account == "" || slices.Contains(a.all, found.Account) {
			o.Account = found.Account
		}
	}
	if o.Caller == 0 && f.caller != 0 && !object.mustBeOwned {
		o.Caller = ownership.NoCaller
	}
	if slices.Contains(a.all, o.Account) {
		o, _ = f.store.Put(object.Key, o, f.now, ttl)
	}
	return o
}

// longestShown is the number of bytes of an id that an error shows.
const longestShown = 80

// notFound returns the error for an object that the caller may not use, in the
// words of OpenAI's API.
func notFound(kind openaiapi.IDKind, text string) apierror.Error {
	text = pool.CutText(text, longestShown)
	switch kind {
	case openaiapi.PreviousResponseID:
		return apierror.Invalid(http.StatusNotFound, "previous_response_not_found", "Previous response with id '"+text+"' not found.")
	case openaiapi.ItemID:
		return apierror.Invalid(http.StatusNotFound, "not_found", "Item with id '"+text+"' not found.")
	case openaiapi.EncryptedContent:
		return apierror.Invalid(http.StatusNotFound, "invalid_encrypted_content", "The encrypted content "+text+" could not be verified.")
	}
	return apierror.Invalid(http.StatusNotFound, "not_found", "No such object: "+text)
}

func differentAccounts(first, second string) apierror.Error {
	return apierror.Invalid(http.StatusBadRequest, "objects_in_different_accounts", "The request names objects that are stored in different accounts: "+
		pool.CutText(first, longestShown)+" and "+pool.CutText(second, longestShown)+". No account has both.")
}
