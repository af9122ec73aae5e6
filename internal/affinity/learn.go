package affinity

import (
	"net/http"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/ownership"
)

// Served records that the account served the request with this reply, which
// shows that the account stores the objects that the request names. For the id
// of an input item, this is no proof unless another account did not know the
// id.
func (p *Placement) Served(account string, res *http.Response) {
	if p.affinity == nil || res.StatusCode < 200 || res.StatusCode >= 300 {
		return
	}
	p.remember(account)
	p.wasAsked = p.asked()
	for _, object := range p.unknown {
		if object.kind != openaiapi.ItemID || len(p.missing) > 0 {
			p.put(object.Key, account, object.caller) // the reply proves where the object is, but not whose it is
		}
	}
	if p.unknown = nil; p.ids != noIDs && len(res.Header["Location"]) > 0 {
		if text := openaiapi.IDInLocation(res.Header.Get("Location")); text != "" {
			p.learn(account, openaiapi.ObjectID, []byte(text))
		}
	}
}

// learn records the account of an id in a reply, and the caller that the id
// belongs to. That is the caller of this request if the request made the
// object, or if the object is a new part of one of the caller's objects.
// Otherwise the reply does not show whose object it is.
func (p *Placement) learn(account string, kind openaiapi.IDKind, text []byte) {
	key := ownership.KeyOf(text)
	made := false
	switch kind {
	case openaiapi.ObjectID:
		made = p.creation == createsAll
	case openaiapi.PartID, openaiapi.EncryptedContent:
		made = p.creation != createsNothing && p.isNew(key)
	}
	caller := p.caller
	if !made || p.names(key) {
		caller = 0
	}
	p.ids = learnedIDs
	p.put(key, account, caller)
}

// learnUnstored records that a new output item of a response that is not stored
// belongs to the caller. This matters only if callers are strict, because
// clients send such items back.
func (p *Placement) learnUnstored(text []byte) {
	if key := ownership.KeyOf(text); p.affinity.strict && p.creation == createsAll && p.isNew(key) && !p.names(key) {
		p.put(key, "", p.caller)
	}
}

// isNew reports whether the id may belong to the caller, because it is not
// known to belong to no caller.
func (p *Placement) isNew(key ownership.Key) bool {
	o, known := p.affinity.owners.loaded().Get(key, time.Now())
	return !known || o.Caller.Named()
}

func (p *Placement) names(key ownership.Key) bool {
	return slices.ContainsFunc(p.named, func(object id) bool { return object.Key == key })
}

func (p *Placement) put(key ownership.Key, account string, caller ownership.CallerDigest) {
	a, now := p.affinity, time.Now()
	o, news := a.owners.loaded().Put(key, ownership.Owner{Account: account, Caller: caller}, now, idTTL)
	if news && (len(a.all) > 1 || o.Caller.Named()) {
		a.owners.tell(key, o, idTTL)
	}
	a.owners.saveIfDue(now)
}
