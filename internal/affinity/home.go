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

// Home defines which accounts may get a request. It belongs to the goroutine
// that serves the request. The zero Home allows any account.
type Home struct {
	affinity *Affinity
	caller   owners.Caller
	// account is the only one that may get the request, if it is known.
	account string
	// list reports whether it was chosen because the request asks for a list, and
	// owns that it was because of an id.
	list, owns bool
	// creates reports whether the request makes what its reply shows. mine reports
	// whether the request is about an object of the caller's, which is the subject.
	creates, mine bool
	subject       owners.Key
	// named are all ids of the request, and unknown those without an owner.
	named, unknown []id
	// missing are the accounts that do not have what the request names.
	missing []string
	// firstText and firstKind are those of the first id that has an owner.
	firstText string
	firstKind openaiapi.Kind
	// teaches reports whether the reply names objects, and learned whether it did.
	teaches, learned bool
}

type id struct {
	owners.Key
	kind openaiapi.Kind
	// own reports whether the id has to be the caller's own.
	own bool
	// caller is the one that it belongs to, as far as that is known.
	caller owners.Caller
}

// Request is the input for finding a Home.
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

// Home returns the home of a request. If no account may get it, refused is true
// and refusal says why.
func (a *Affinity) Home(r Request) (h Home, refusal apierror.Error, refused bool) {
	if a == nil {
		return h, refusal, false
	}
	if a.strict {
		if refusal, refused = r.refuses(); refused {
			return h, refusal, true
		}
	}
	stored := openaiapi.ReadStored(r.Method, r.Operation, r.RawQuery)
	stored.Teaches = stored.Teaches || stored.TeachesIfStored && (r.Body.Stores || r.Body.Speaks)
	if !stored.Teaches && len(stored.IDs) == 0 && !r.Body.HasIDs() {
		return h, refusal, false
	}
	return a.find(&r, stored)
}

func (a *Affinity) find(r *Request, stored openaiapi.Stored) (Home, apierror.Error, bool) {
	h := Home{affinity: a, caller: owners.CallerNamed(r.Caller), list: stored.List, teaches: stored.Teaches, creates: stored.Creates && (stored.Subject == "" || r.showsAll())}
	if stored.Subject != "" {
		h.subject = owners.KeyOf(stored.Subject)
	}
	f := finder{Home: &h, store: a.keeper.store(), now: time.Now()}
	f.unread = a.keeper.isUnread()
	for i, text := range stored.IDs {
		f.own = a.strict && i == 0 // the others are below it
		f.take(openaiapi.Object, []byte(text))
	}
	f.own = a.strict
	r.Body.EachID(r.Text, f.take)
	f.askReplicas()
	h.list = h.list && !h.owns
	return h, f.refusal, f.refused
}

// showsAll reports whether every object that the body names was seen. What is made below another object
// may otherwise be one that the body names, such as a file that is added to a vector store.
func (r *Request) showsAll() bool {
	return openaiapi.BodyNamesNothing(r.Method, r.Operation) || !r.Compressed && r.CutAt == 0 && !r.Disputed && r.Body.Readable(r.Text)
}

// finder finds the owner of a request's ids.
type finder struct {
	*Home
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
	return a.shared != nil && !o.Caller.Named() && (f.caller != 0 && (f.own || o.Caller == 0) || o.Account == "" && len(a.accounts) > 1)
}

// apply uses what is known about an id. An account that the config no longer
// has may have another name or key now, so that it is not known who has the
// object. The caller is known anyway.
func (f *finder) apply(it id, text []byte, o owners.Owner) {
	f.mine = f.mine || it.Key == f.subject && o.Caller == f.caller
	it.caller = o.Caller
	switch {
	case it.own && f.unread && !o.Caller.Named():
		f.refuse(apierror.OwnersUnknown)
	case !o.MayUse(f.caller), it.own && o.Caller != f.caller:
		f.refuse(notFound(it.kind, string(text)))
	case !slices.Contains(f.affinity.accounts, o.Account):
		f.unknown = append(f.unknown, it)
	case !f.owns:
		f.owns, f.account, f.firstText, f.firstKind = true, o.Account, string(text), it.kind
	case f.account != o.Account:
		f.refuse(apart(f.firstText, string(text)))
	}
}

// foundFor is how long an id counts as belonging to no caller after other
// replicas were asked. Then they are asked again: one of them may have been
// unable to answer, or may have learned the caller since.
const foundFor = 5 * time.Minute

// askReplicas asks what other replicas know of the open ids. If there is no
// answer, what is known here has to do, and is not taken for what they know.
// It does not do for an id that has to be the caller's own.
func (f *finder) askReplicas() {
	if f.refused || len(f.open) == 0 {
		return
	}
	keys := make([]owners.Key, len(f.open))
	for i := range keys {
		keys[i] = f.open[i].Key
	}
	found, err := f.affinity.shared.Ask(f.caller, keys, f.affinity.patience)
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
func (h *Home) Allows(account string) bool {
	return (h.account == "" || h.account == account) && !slices.Contains(h.missing, account)
}

// Stored returns, in words for the client, the object because of which only one
// account may get the request. It is empty if any account may get it.
func (h *Home) Stored() string {
	if h.account == "" {
		return ""
	}
	kind := "object"
	switch h.firstKind {
	case openaiapi.PreviousResponse:
		kind = "response"
	case openaiapi.Item:
		kind = "item"
	case openaiapi.Encrypted:
		kind = "encrypted content"
	default:
		if h.list {
			return "this list"
		}
		if known, ok := kinds[h.firstText[:max(0, strings.IndexAny(h.firstText, "_-"))]]; ok {
			kind = known
		}
	}
	return "the " + kind + " '" + showntext.Cut(h.firstText, longestShown) + "'"
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
func (h *Home) IsList() bool { return h.list }

// Makes reports whether the request makes an object without naming one.
func (h *Home) Makes() bool { return h.creates && len(h.named) == 0 }

// Settle makes the account the only one that may get the request.
func (h *Home) Settle(account string) { h.account = account }

// Asks reports whether the owner is found by asking one account after the
// other.
func (h *Home) Asks() bool {
	return h.affinity != nil && h.account == "" && len(h.unknown) > 0 && len(h.affinity.accounts) > 1
}

// Missing records that the account does not store the objects that the request
// names.
func (h *Home) Missing(account string) { h.missing = append(h.missing, account) }

// Asked returns how many accounts do not store them.
func (h *Home) Asked() int { return len(h.missing) }

// Served records that the account served the request, with this reply. So the
// account stores the objects that the request names. Only an input item's id
// proves nothing, unless another account did not know it.
func (h *Home) Served(account string, res *http.Response) {
	if h.affinity == nil || res.StatusCode < 200 || res.StatusCode >= 300 {
		return
	}
	for _, it := range h.unknown {
		if it.kind != openaiapi.Item || len(h.missing) > 0 {
			h.found(it, account)
		}
	}
	if h.unknown = nil; h.teaches && len(res.Header["Location"]) > 0 {
		if text := openaiapi.IDInLocation(res.Header.Get("Location")); text != "" {
			h.learn(account, openaiapi.Object, []byte(text))
		}
	}
}

// found records that the account has what an id names. That says nothing about
// whose it is. What other replicas say about that does not hold for long.
func (h *Home) found(it id, account string) {
	ttl := h.affinity.ttl
	if h.affinity.shared != nil && h.caller != 0 && !it.caller.Named() {
		ttl = min(ttl, foundFor)
	}
	h.put(it.Key, account, it.caller, ttl)
}

// learn records the account of an id in a reply, and the caller that it belongs
// to. That is the caller of this request if the request made the object, or if
// the object is a new part of one of the caller's. Otherwise the reply shows
// nothing about whose the object is.
func (h *Home) learn(account string, kind openaiapi.Kind, text []byte) {
	key := owners.KeyOf(text)
	made := false
	switch kind {
	case openaiapi.Object:
		made = h.creates
	case openaiapi.Part, openaiapi.Encrypted:
		made = (h.creates || h.mine) && h.isNew(key)
	}
	caller := h.caller
	if !made || h.names(key) {
		caller = 0
	}
	h.learned = true
	h.put(key, account, caller, h.affinity.ttl)
}

// learnUnstored records that a new output item of a response that no account
// stores belongs to the caller. Only a caller who reaches nothing else needs that,
// because clients send such items back.
func (h *Home) learnUnstored(text []byte) {
	if key := owners.KeyOf(text); h.affinity.strict && h.creates && h.isNew(key) && !h.names(key) {
		h.put(key, "", h.caller, h.affinity.ttl)
	}
}

// isNew reports whether the id may be the caller's: it is not known as one that
// belongs to no caller.
func (h *Home) isNew(key owners.Key) bool {
	o, known := h.affinity.keeper.store().Get(key, time.Now())
	return !known || o.Caller.Named()
}

func (h *Home) names(key owners.Key) bool {
	return slices.ContainsFunc(h.named, func(it id) bool { return it.Key == key })
}

func (h *Home) put(key owners.Key, account string, caller owners.Caller, ttl time.Duration) {
	a, now := h.affinity, time.Now()
	o, news := a.keeper.store().Put(key, owners.Owner{Account: account, Caller: caller}, now, ttl)
	if news && (len(a.accounts) > 1 || o.Caller.Named()) {
		a.shared.Tell(key, o, a.ttl)
	}
	a.keeper.saveIfDue(now)
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
