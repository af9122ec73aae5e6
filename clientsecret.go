package openailb

import (
	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// clientSecret is a client secret that was made through the balancer: a browser
// begins a realtime session with it. The backend gets it in place of its own
// key, because the session's settings are bound to it. To the balancer, the
// request is one of the caller that has made it, as long as that caller's key
// is good.
type clientSecret struct {
	affinity.Secret
	// text is the secret itself. It is empty when no attempt can need it any
	// more.
	text string
}

// account is the only one that accepts the secret. It is empty without one.
func (s *clientSecret) account() string {
	if s == nil {
		return ""
	}
	return s.Account
}

// findSecret finds the client secret of a request that has no key, if it is one
// of a realtime session and its account is still known. It reports false if
// there is none.
func (d *reader) findSecret(q *request) bool {
	r := q.incoming
	if !openaiapi.TakesClientSecret(r, openaiapi.ParsePath(r.URL.EscapedPath()).Operation) {
		return false
	}
	text := q.credentials.ClientSecret()
	if text == "" {
		return false
	}
	found, ok := d.affinity.Secret(text)
	if ok {
		q.secret = &clientSecret{found, text}
		q.credentials.WithoutClientSecret(text)
	}
	return ok
}

// holder returns the caller whose client secret it is, or an error if the key
// is not good any more with which it was made.
func (d *reader) holder(s *clientSecret) (keys.Caller, error) {
	if s.TokenOf != "" {
		return d.clientKeys.TokenHolder(s.TokenOf)
	}
	return d.clientKeys.Holder(func(c keys.Caller) bool { return affinity.MinterOf(c.Name, c.KeyID) == s.By })
}

// trustSession makes a request with a client secret need no model: the session
// has one, which was checked when the secret was made. One that the request
// names is checked again.
func (q *request) trustSession() {
	if q.secret != nil && !q.NamesModel() && !q.HidesModel(q.received.Buffered()) {
		q.NeedsModel, q.MayInfer = false, false
	}
}
