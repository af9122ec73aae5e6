package affinity

import (
	"errors"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/owners"
	"github.com/openai-lb/caddy-openai-lb/internal/replicas"
	"github.com/openai-lb/caddy-openai-lb/internal/showntext"
)

// Placement defines which accounts may get a request. It belongs to the goroutine
// that serves the request. The zero Placement allows any account.
type Placement struct {
	affinity *Affinity
	caller   owners.Caller
	// account is the only one that may get the request, if it is known. basis is
	// why, and first the first id that has an owner.
	account string
	basis   basis
	first   struct {
		text string
		kind openaiapi.Kind
	}
	// creation is how much of the reply is the caller's, and subject the object below
	// which the request is.
	creation creation
	subject  owners.Key
	// named are all ids of the request, and unknown those without an owner.
	named, unknown []id
	// missing are the accounts that do not have what the request names.
	missing []string
	// ids is what the reply teaches.
	ids teaching
}

// basis is why only one account may get a request.
type basis int

const (
	// free: any account may.
	free basis = iota
	// listed: the request asks for a list, and each account lists only its objects.
	listed
	// owned: the account stores an object that the request names.
	owned
)

// creation is which of the objects in a reply are the caller's.
type creation int

const (
	// createsNothing: the reply does not show whose its objects are.
	createsNothing creation = iota
	// createsParts: new parts of the subject, which is the caller's.
	createsParts
	// createsAll: the request makes what its reply shows.
	createsAll
)

// teaching is what a reply teaches.
type teaching int

const (
	// noIDs: the reply names no objects.
	noIDs teaching = iota
	// someIDs: it names objects.
	someIDs
	// learnedIDs: it did, and their account is known now.
	learnedIDs
)

type id struct {
	owners.Key
	kind openaiapi.Kind
	// own reports whether the id has to be the caller's own.
	own bool
	// caller is the one that it belongs to, as far as that is known.
	caller owners.Caller
}

// Request is the input for finding a Placement.
type Request struct {
	Method, Operation, RawQuery string
	// Body is the parsed body, and Text the body itself.
	Body *openaiapi.Request
	Text []byte
	// Caller is the name of the caller, if callers have names.
	Caller string
	// Upgrade reports whether it opens a WebSocket, and Compressed whether its body
	// could not be read.
	Upgrade, Compressed bool
	// Disputed reports whether servers may read the body as different types.
	Disputed bool
	// CutAt is how many bytes were read of a longer body. 0: all of it.
	CutAt int64
}

// Place returns the placement of a request. If no account may get it, refused is
// true and refusal says why.
func (a *Affinity) Place(r Request) (p Placement, refusal apierror.Error, refused bool) {
	if a == nil {
		return p, refusal, false
	}
	if a.strict {
		if refusal, refused = r.refuses(); refused {
			return p, refusal, true
		}
	}
	stored := openaiapi.ReadStored(r.Method, r.Operation, r.RawQuery)
	stored.Teaches = stored.Teaches || stored.TeachesIfStored && (r.Body.Stores || r.Body.Speaks)
	if !stored.Teaches && len(stored.IDs) == 0 && !r.Body.HasIDs() {
		return p, refusal, false
	}
	return a.find(&r, stored)
}

func (a *Affinity) find(r *Request, stored openaiapi.Stored) (Placement, apierror.Error, bool) {
	p := Placement{affinity: a, caller: owners.CallerNamed(r.Caller)}
	if stored.List {
		p.basis = listed // unless an id has an owner
	}
	if stored.Teaches {
		p.ids = someIDs
	}
	if stored.Creates && (stored.Subject == "" || r.showsAll()) {
		p.creation = createsAll
	}
	if stored.Subject != "" {
		p.subject = owners.KeyOf(stored.Subject)
	}
	f := finder{Placement: &p, store: a.owners.loaded(), now: time.Now()}
	f.unread = a.owners.isUnread()
	for i, text := range stored.IDs {
		f.own = a.strict && i == 0 // the others are below it
		f.take(openaiapi.Object, []byte(text))
	}
	f.own = a.strict
	r.Body.EachID(r.Text, f.take)
	f.lookUp()
	return p, f.refusal, f.refused
}

// showsAll reports whether every object that the body names was seen. What is made below another object
// may otherwise be one that the body names, such as a file that is added to a vector store.
func (r *Request) showsAll() bool {
	return openaiapi.BodyNamesNothing(r.Method, r.Operation) || !r.Compressed && r.CutAt == 0 && !r.Disputed && r.Body.Readable(r.Text)
}

// finder finds the owner of a request's ids.
type finder struct {
	*Placement
	store *owners.Memory
	// unread reports whether the store lacks what was saved.
	unread  bool
	now     time.Time
	refusal apierror.Error
	refused bool
	// own reports whether the next id has to be the caller's own.
	own bool
	// open are the ids of which other replicas may know more.
	open []openID
}

type openID struct {
	id
	text  []byte
	owner owners.Owner // as far as it is known here
}

func (f *finder) refuse(e apierror.Error) {
	if !f.refused {
		f.refusal, f.refused = e, true
	}
}

func (f *finder) take(kind openaiapi.Kind, text []byte) {
	it := id{Key: owners.KeyOf(text), kind: kind, own: f.own}
	f.named = append(f.named, it)
	o, _ := f.store.Get(it.Key, f.now)
	if f.othersMayKnow(o) {
		f.open = append(f.open, openID{it, text, o})
	} else {
		f.apply(it, text, o)
	}
}

// othersMayKnow reports whether other replicas may know what this one does not:
// the caller of an id, if callers have names, and its account, if there are
// several.
func (f *finder) othersMayKnow(o owners.Owner) bool {
	a := f.affinity
	return a.others != nil && !o.Caller.Named() && (f.caller != 0 && (f.own || o.Caller == 0) || o.Account == "" && len(a.accounts) > 1)
}

// apply uses what is known about an id. An account that the config no longer
// has may have another name or key now, so that it is not known who has the
// object. The caller is known anyway.
func (f *finder) apply(it id, text []byte, o owners.Owner) {
	if it.Key == f.subject && o.Caller == f.caller {
		f.creation = max(f.creation, createsParts)
	}
	it.caller = o.Caller
	switch {
	case it.own && f.unread && !o.Caller.Named():
		f.refuse(apierror.OwnersUnknown)
	case !o.MayUse(f.caller), it.own && o.Caller != f.caller:
		f.refuse(notFound(it.kind, string(text)))
	case !slices.Contains(f.affinity.accounts, o.Account):
		f.unknown = append(f.unknown, it)
	case f.basis != owned:
		f.basis, f.account, f.first.text, f.first.kind = owned, o.Account, string(text), it.kind
	case f.account != o.Account:
		f.refuse(apart(f.first.text, string(text)))
	}
}

// foundFor is how long an id counts as belonging to no caller after other
// replicas were asked. Then they are asked again: one of them may have been
// unable to answer, or may have learned the caller since.
const foundFor = 5 * time.Minute

// lookUp asks other replicas what they know of the open ids. If there is no
// answer, what is known here has to do, and is not taken for what they know.
// It does not do for an id that has to be the caller's own.
func (f *finder) lookUp() {
	if f.refused || len(f.open) == 0 {
		return
	}
	keys := make([]owners.Key, len(f.open))
	for i := range keys {
		keys[i] = f.open[i].Key
	}
	found, err := f.affinity.others.Lookup(f.caller, keys, f.affinity.patience)
	if errors.Is(err, replicas.ErrCrowded) || err != nil && slices.ContainsFunc(f.open, func(it openID) bool { return it.own }) {
		f.refuse(apierror.OwnersUnknown)
		return
	}
	for i, it := range f.open {
		o := it.owner
		if err == nil {
			o = f.settle(it, found[i])
		}
		f.apply(it.id, it.text, o)
	}
}

// settle remembers what other replicas know of an id, and returns its owner.
func (f *finder) settle(it openID, found replicas.Found) owners.Owner {
	a, o, ttl := f.affinity, it.owner, min(found.TTL, f.affinity.ttl)
	if found.TTL > 0 {
		if o.Caller = found.Caller; o.Account == "" || slices.Contains(a.accounts, found.Account) {
			o.Account = found.Account
		}
	}
	if o.Caller == 0 && f.caller != 0 && !it.own {
		o.Caller, ttl = owners.NoCaller, foundFor
	}
	if slices.Contains(a.accounts, o.Account) {
		o, _ = f.store.Put(it.Key, o, f.now, ttl)
	}
	return o
}

// Allows reports whether the account may get the request.
func (p *Placement) Allows(account string) bool {
	return (p.account == "" || p.account == account) && !slices.Contains(p.missing, account)
}

// Stored returns, in words for the client, the object because of which only one
// account may get the request. It is empty if any account may get it.
func (p *Placement) Stored() string {
	if p.account == "" {
		return ""
	}
	kind := "object"
	switch p.first.kind {
	case openaiapi.PreviousResponse:
		kind = "response"
	case openaiapi.Item:
		kind = "item"
	case openaiapi.Encrypted:
		kind = "encrypted content"
	default:
		if p.basis == listed {
			return "this list"
		}
		if known, ok := kinds[p.first.text[:max(0, strings.IndexAny(p.first.text, "_-"))]]; ok {
			kind = known
		}
	}
	return "the " + kind + " '" + showntext.Cut(p.first.text, longestShown) + "'"
}

// kinds are the kinds of objects, by the prefix of their ids.
var kinds = map[string]string{
	"resp": "response", "conv": "conversation", "file": "file", "batch": "batch", "vs": "vector store", "upload": "upload",
	"cntr": "container", "asst": "assistant", "thread": "thread", "ftjob": "fine-tuning job", "eval": "eval", "video": "video",
	"chatcmpl": "chat completion", "rtc": "call",
}

// IsList reports whether the request asks for a list. Any account could answer,
// but each lists only its own objects, so it has to be the same account every
// time.
func (p *Placement) IsList() bool { return p.basis == listed }

// Makes reports whether the request makes an object without naming one.
func (p *Placement) Makes() bool { return p.creation == createsAll && len(p.named) == 0 }

// Settle makes the account the only one that may get the request.
func (p *Placement) Settle(account string) { p.account = account }

// Asks reports whether the owner is found by asking one account after the
// other.
func (p *Placement) Asks() bool {
	return p.affinity != nil && p.account == "" && len(p.unknown) > 0 && len(p.affinity.accounts) > 1
}

// Missing records that the account does not store the objects that the request
// names.
func (p *Placement) Missing(account string) { p.missing = append(p.missing, account) }

// Misses returns how many accounts do not store them.
func (p *Placement) Misses() int { return len(p.missing) }

// Served records that the account served the request, with this reply. So the
// account stores the objects that the request names. Only an input item's id
// proves nothing, unless another account did not know it.
func (p *Placement) Served(account string, res *http.Response) {
	if p.affinity == nil || res.StatusCode < 200 || res.StatusCode >= 300 {
		return
	}
	for _, it := range p.unknown {
		if it.kind != openaiapi.Item || len(p.missing) > 0 {
			p.found(it, account)
		}
	}
	if p.unknown = nil; p.ids != noIDs && len(res.Header["Location"]) > 0 {
		if text := openaiapi.IDInLocation(res.Header.Get("Location")); text != "" {
			p.learn(account, openaiapi.Object, []byte(text))
		}
	}
}

// found records that the account has what an id names. That says nothing about
// whose it is. What other replicas say about that does not hold for long.
func (p *Placement) found(it id, account string) {
	ttl := p.affinity.ttl
	if p.affinity.others != nil && p.caller != 0 && !it.caller.Named() {
		ttl = min(ttl, foundFor)
	}
	p.put(it.Key, account, it.caller, ttl)
}

// learn records the account of an id in a reply, and the caller that it belongs
// to. That is the caller of this request if the request made the object, or if
// the object is a new part of one of the caller's. Otherwise the reply shows
// nothing about whose the object is.
func (p *Placement) learn(account string, kind openaiapi.Kind, text []byte) {
	key := owners.KeyOf(text)
	made := false
	switch kind {
	case openaiapi.Object:
		made = p.creation == createsAll
	case openaiapi.Part, openaiapi.Encrypted:
		made = p.creation != createsNothing && p.isNew(key)
	}
	caller := p.caller
	if !made || p.names(key) {
		caller = 0
	}
	p.ids = learnedIDs
	p.put(key, account, caller, p.affinity.ttl)
}

// learnUnstored records that a new output item of a response that no account
// stores belongs to the caller. Only a caller who reaches nothing else needs that,
// because clients send such items back.
func (p *Placement) learnUnstored(text []byte) {
	if key := owners.KeyOf(text); p.affinity.strict && p.creation == createsAll && p.isNew(key) && !p.names(key) {
		p.put(key, "", p.caller, p.affinity.ttl)
	}
}

// isNew reports whether the id may be the caller's: it is not known as one that
// belongs to no caller.
func (p *Placement) isNew(key owners.Key) bool {
	o, known := p.affinity.owners.loaded().Get(key, time.Now())
	return !known || o.Caller.Named()
}

func (p *Placement) names(key owners.Key) bool {
	return slices.ContainsFunc(p.named, func(it id) bool { return it.Key == key })
}

func (p *Placement) put(key owners.Key, account string, caller owners.Caller, ttl time.Duration) {
	a, now := p.affinity, time.Now()
	o, news := a.owners.loaded().Put(key, owners.Owner{Account: account, Caller: caller}, now, ttl)
	if news && (len(a.accounts) > 1 || o.Caller.Named()) {
		a.others.Tell(key, o, a.ttl)
	}
	a.owners.saveIfDue(now)
}

// longestShown is how much of an id an error shows.
const longestShown = 80

// notFound is the error for an object that the caller may not use, in the words
// that OpenAI's API has for it.
func notFound(kind openaiapi.Kind, text string) apierror.Error {
	text = showntext.Cut(text, longestShown)
	e := apierror.Error{Status: http.StatusNotFound, Kind: "invalid_request_error", Code: "not_found", Class: apierror.InvalidRequest}
	switch kind {
	case openaiapi.PreviousResponse:
		e.Message, e.Code = "Previous response with id '"+text+"' not found.", "previous_response_not_found"
	case openaiapi.Item:
		e.Message = "Item with id '" + text + "' not found."
	case openaiapi.Encrypted:
		e.Message, e.Code = "The encrypted content "+text+" could not be verified.", "invalid_encrypted_content"
	default:
		e.Message = "No such object: " + text
	}
	return e
}

// apart is the error for a request whose objects are in different accounts.
func apart(one, other string) apierror.Error {
	return apierror.Error{Status: http.StatusBadRequest, Kind: "invalid_request_error", Code: "objects_in_different_accounts", Class: apierror.InvalidRequest,
		Message: "The request names objects that are stored in different accounts: " + showntext.Cut(one, longestShown) +
			" and " + showntext.Cut(other, longestShown) + ". No account has both."}
}
