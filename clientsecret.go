package openailb

import (
	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// clientSecret is a client secret that was made through the balancer. A browser
// opens a realtime session with it. The backend gets the secret instead of its
// own key, because the session's settings are bound to it. The balancer treats
// the request as one of the caller that made the secret, as long as that
// caller's key is valid.
type clientSecret struct {
	affinity.Secret
	// text is the secret itself. It is empty once no further attempt can need
	// it.
	text string
}

// account returns the only account that accepts the secret. It returns an empty
// string without a secret.
func (s *clientSecret) account() string {
	if s == nil {
		return ""
	}
	return s.Account
}

// findSecret sets the request's client secret, if the request may use one, has
// one, and the secret's account is still known. It reports whether it found
// one.
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

// holder returns the caller that made the client secret. It returns an error if
// the caller's key or token is no longer valid.
func (d *reader) holder(s *clientSecret) (keys.Caller, error) {
	if s.TokenOf != "" {
		return d.clientKeys.TokenHolder(s.TokenOf)
	}
	return d.clientKeys.Holder(func(c keys.Caller) bool { return affinity.MinterOf(c.Name, c.KeyID) == s.By })
}

// trustSession lifts the requirement of a model for a request with a client
// secret that names none: the session's model was checked when the secret was
// made. A model that the request names is checked as usual.
func (q *request) trustSession() {
	if q.secret != nil && !q.NamesModel() && !q.HidesModel(q.received.Buffered()) {
		q.NeedsModel, q.MayInfer = false, false
	}
}
