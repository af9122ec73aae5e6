package affinity

import (
	"slices"
	"strings"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/ownership"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

// Anywhere is the Placement of nearly all requests: any account may get them,
// and their replies teach nothing. Nobody changes it.
var Anywhere = new(Placement)

// Placement defines which accounts may get a request. It belongs to the
// goroutine that serves the request.
type Placement struct {
	affinity *Affinity
	caller   ownership.Caller
	// account is the only one that may get the request, if it is known. basis
	// is why, and first the first id that has an owner.
	account string
	basis   basis
	first   struct {
		text string
		kind openaiapi.IDKind
	}
	// creation is how much of the reply is the caller's, and subject the object
	// below which the request is.
	creation creation
	subject  ownership.Key
	// named are all ids of the request, and unknown those without an owner.
	named, unknown []id
	// minter is who gets the client secret in the reply, or nil if there is
	// none.
	minter *Secret
	// within is the path in which the reply of a new API names objects. It is
	// empty for all others. said are the texts of such a request, which its
	// reply may repeat.
	within string
	said   map[ownership.Key]struct{}
	// makes is what the request makes, and free reports whether it names
	// nothing. maker is how the pool chooses.
	makes openaiapi.Made
	free  bool
	maker pool.Maker
	// missing are the accounts that do not have what the request names.
	missing []string
	// wasAsked reports whether the account that served the request was asked.
	wasAsked bool
	// ids is what the reply teaches.
	ids teaching
}

// basis is why only one account may get a request.
type basis uint8

const (
	_ basis = iota // any account may
	// listed: the request asks for a list, and each account lists only its
	// objects.
	listed
	// owned: the account stores an object that the request names.
	owned
)

// creation is which of the objects in a reply are the caller's.
type creation uint8

const (
	// createsNothing: the reply does not show whose its objects are.
	createsNothing creation = iota
	// createsParts: new parts of the subject, which is the caller's.
	createsParts
	// createsAll: the request makes what its reply shows.
	createsAll
)

// teaching is what a reply teaches.
type teaching uint8

const (
	// noIDs: the reply names no objects.
	noIDs teaching = iota
	// someIDs: it names objects.
	someIDs
	// learnedIDs: it did, and their account is known now.
	learnedIDs
)

// Allows reports whether the account may get the request.
func (p *Placement) Allows(account string) bool {
	return (p.account == "" || p.account == account) && !slices.Contains(p.missing, account)
}

// Anywhere reports whether the request names no stored objects, so that any
// account may get it.
func (p *Placement) Anywhere() bool { return p.account == "" && len(p.unknown) == 0 }

// Stored returns, in words for the client, the object because of which only one
// account may get the request. It is empty if any account may get it.
func (p *Placement) Stored() string {
	if p.account == "" {
		return ""
	}
	kind := "object"
	switch p.first.kind {
	case openaiapi.PreviousResponseID:
		kind = "response"
	case openaiapi.ItemID:
		kind = "item"
	case openaiapi.EncryptedContent:
		kind = "encrypted content"
	default:
		switch {
		case p.basis == listed:
			return "this list"
		case p.first.text == "":
			return "the caller's objects"
		}
		if known, ok := kinds[p.first.text[:max(0, strings.IndexAny(p.first.text, "_-"))]]; ok {
			kind = known
		}
	}
	return "the " + kind + " '" + pool.CutText(p.first.text, longestShown) + "'"
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

// Exclude records that the account does not store the objects that the request
// names.
func (p *Placement) Exclude(account string) { p.missing = append(p.missing, account) }

// Misses returns how many accounts do not store them.
func (p *Placement) Misses() int { return len(p.missing) }

// The reasons why a backend was chosen, in placeholders and logs.
const (
	// None: by no affinity.
	None = "none"
	// Owner: its account is known to store the objects that the request names.
	Owner = "owner"
	// Asked: the owner was not known, so the accounts were asked.
	Asked = "asked"
	// Cache: by the session's key.
	Cache = "cache"
	// Home: the objects that the caller makes are there.
	Home = "home"
	// Learned: the choice was free, and the reply named objects.
	Learned = "learned"
)

// Why returns why a backend was chosen.
func (p *Placement) Why(a pool.Affinity) string {
	switch {
	case p.basis == owned:
		return Owner
	case p.asked():
		return Asked
	case a.Result != "":
		return Cache
	case p.maker.Chosen:
		return Home
	case p.ids == learnedIDs:
		return Learned
	}
	return None
}

// asked reports whether accounts are asked for what the request names. An
// input item, which may come whole, only counts once an account lacks it.
func (p *Placement) asked() bool {
	return p.wasAsked || len(p.missing) > 0 || p.Asks() && slices.ContainsFunc(p.unknown, func(it id) bool { return it.kind != openaiapi.ItemID })
}

// Result returns, for metrics, whether the owner of the objects that the
// request names was known. Both are empty if it names none.
func (p *Placement) Result() (kind, result string) {
	switch {
	case p.basis == owned:
		return Owner, "hit"
	case p.asked():
		return Owner, "miss"
	}
	return "", ""
}

// CameTo returns the result of the affinity that Why returns: hit, move or
// miss. It is empty if the choice was free.
func (p *Placement) CameTo(a pool.Affinity) string {
	if _, result := p.Result(); result != "" {
		return result
	}
	return string(a.Result)
}
