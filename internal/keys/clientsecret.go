package keys

import "strings"

// clientSecretPrefix is the prefix of the secrets that a server gives to a
// browser, for one realtime session, instead of its key.
const clientSecretPrefix = "ek_"

// ClientSecret returns the client secret that the request has instead of a key,
// or an empty string.
func (p *Presented) ClientSecret() (secret string) {
	p.remove(func(key string, identifies bool) bool {
		if secret == "" && identifies && strings.HasPrefix(key, clientSecretPrefix) {
			secret = key
		}
		return false
	})
	return secret
}

// WithoutClientSecret removes a client secret from the presented keys, because
// an attempt sends it separately.
func (p *Presented) WithoutClientSecret(secret string) {
	p.remove(func(key string, _ bool) bool { return key == secret })
}

// Holder returns the caller that has a key for which matches returns true. It
// returns ErrExpired if that key has expired.
func (c *Clients) Holder(matches func(Caller) bool) (Caller, error) {
	for _, client := range *c.known.Load() {
		switch {
		case !matches(client.Caller):
		case client.expiry.isOver():
			return Caller{}, ErrExpired
		default:
			return client.Caller, nil
		}
	}
	return Caller{}, errUnknownKey
}

// TokenHolder returns the caller of this name, whose token was checked earlier.
// It returns an error if tokens no longer identify callers.
func (c *Clients) TokenHolder(name string) (Caller, error) {
	if c.config.Tokens == nil {
		return Caller{}, errUnknownKey
	}
	return Caller{Name: name, Label: c.config.Label(name)}, nil
}
