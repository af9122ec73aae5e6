package affinity

import (
	"slices"
	"strings"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/ownership"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

// Anywhere is the Placement of a request that any account may get and whose
// reply has no ids to learn, as most requests. It must not be changed.
var Anywhere = new(Placement)

// Placement defines which accounts may get a request. Only the goroutine that
// serves the request may use it.
type Placement struct {
	affinity *Affinity
	caller   ownership.CallerDigest
	// account is the only account that may get the request. It is empty if it
	// is not known. basis is the reason. first is the first id with an owner.
	account string
	basis   basis
	first   struct {
		text string
		kind openaiapi.IDKind
	}
	// creation says which objects in the reply belong to the caller. subject is
	// the object below which the request's path is.
	creation creation
	subject  ownership.Key
	// named are all ids of the request. unknown are the ids without an owner.
	named, unknown []id
	// minter is the origin of the client secret in the reply. It is nil for
	// other replies.
	minter *Secret
	// parent is the path below which the reply of a new API names objects. It
	// is empty for known APIs. sentTexts are the texts of a request to a new
	// API, which the reply may repeat.
	parent    string
	sentTexts map[ownership.Key]struct{}
	// makes is the kind of object that the request makes. free reports whether
	// the request names no objects. maker is how the pool chooses the account.
	makes openaiapi.Made
	free  bool
	maker pool.Maker
	// missing are the accounts that do not store the objects that the request
	// names.
	missing []string
	// wasAsked reports whether the account that served the request was found by
	// asking.
	wasAsked bool
	// ids says whether the reply contains ids to learn.
	ids teaching
}

// basis is the reason why only one account may get a request.
type basis uint8

const (
	_ basis = iota // any account may
	// listed means that the request asks for a list, and each account lists
	// only its own objects.
	listed
	// owned means that the account stores an object that the request names.
	owned
)

// creation says which of the objects in a reply belong to the caller.
type creation uint8

const (
	// createsNothing means that the reply does not show whose its objects are.
	createsNothing creation = iota
	// createsParts means that new parts of the subject belong to the caller,
	// because the subject does.
	createsParts
	// createsAll means that the request makes all objects that its reply names.
	createsAll
)

// teaching says whether a reply contains ids to learn.
type teaching uint8

const (
	// noIDs means that the reply names no objects.
	noIDs teaching = iota
	// someIDs means that the reply may name objects.
	someIDs
	// learnedIDs means that the account of an object in the reply was learned.
	learnedIDs
)

// Allows reports whether the account may get the request.
func (p *Placement) Allows(account string) bool {
	return (p.account == "" || p.account == account) && !slices.Contains(p.missing, account)
}

// Anywhere reports whether the request names no stored objects, so that any
// account may get it.
func (p *Placement) Anywhere() bool { return p.account == "" && len(p.unknown) == 0 }

// Stored describes to the client the object because of which only one account
// may get the request. It returns "" if any account may get it.
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

// IsList reports whether the request asks for a list. Each account lists only
// its own objects, so the list must come from the same account every time.
func (p *Placement) IsList() bool { return p.basis == listed }

// Makes reports whether the request makes an object without naming one.
func (p *Placement) Makes() bool { return p.creation == createsAll && len(p.named) == 0 }

// Settle makes the account the only one that may get the request.
func (p *Placement) Settle(account string) { p.account = account }

// Asks reports whether the owner is found by asking one account after another.
func (p *Placement) Asks() bool {
	return p.affinity != nil && p.account == "" && len(p.unknown) > 0 && len(p.affinity.accounts) > 1
}

// Exclude records that the account does not store the objects that the request
// names.
func (p *Placement) Exclude(account string) { p.missing = append(p.missing, account) }

// Misses returns how many accounts do not store the objects that the request
// names.
func (p *Placement) Misses() int { return len(p.missing) }

// The reasons why a backend was chosen, in placeholders and logs.
const (
	// None means that no affinity affected the choice.
	None = "none"
	// Owner means that the backend's account is known to store the objects that
	// the request names.
	Owner = "owner"
	// Asked means that the owner was not known, so the accounts were asked.
	Asked = "asked"
	// Cache means that the session's key decided.
	Cache = "cache"
	// Home means that the caller's objects are made in the backend's account.
	Home = "home"
	// Learned means that the choice was free, and that the reply named objects.
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

// asked reports whether accounts are asked for the objects that the request
// names. An input item may have been sent as a whole, so its id counts only
// after an account did not know it.
func (p *Placement) asked() bool {
	return p.wasAsked || len(p.missing) > 0 ||
		p.Asks() && slices.ContainsFunc(p.unknown, func(object id) bool { return object.kind != openaiapi.ItemID })
}

// Result returns, for metrics, whether the owner of the objects that the
// request names was known. kind and result are empty if it names none.
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
// miss. It returns "" if the choice was free.
func (p *Placement) CameTo(a pool.Affinity) string {
	if _, result := p.Result(); result != "" {
		return result
	}
	return string(a.Result)
}
