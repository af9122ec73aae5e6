package keys

import "context"

// Source supplies the credentials that authenticate requests to a
// backend. Caddy modules in the namespace http.openai_lb.credentials implement
// it: `auth <name>` uses the module of that name. Many requests use a source
// concurrently.
type Source interface {
	// Credential returns the credential for one attempt. It must not wait while
	// it has a valid one, nor after the context is done. After an error, the
	// request fails over to another backend, and this one is benched for a
	// minute, or for as long as the error's method RetryAfter() time.Duration
	// says. The error must not contain a secret.
	Credential(ctx context.Context) (Credential, error)

	// Renew returns another credential after the backend refused this one with
	// status 401. It returns the same one if there is no other.
	Renew(ctx context.Context, refused Credential) (Credential, error)

	// Identity identifies the account, and contains no secret. Backend state
	// survives a reload as long as the backend's URL and its Identity stay the
	// same.
	Identity() string
}

// Credential authenticates a request: a header and its value.
type Credential struct {
	Header string
	Value  string

	// Secret is the key or token in Value, which no reply or log may repeat.
	// Default: Value without its scheme, such as Bearer.
	Secret string
}

func apiKey(key string) Credential {
	return Credential{Header: "Api-Key", Value: key, Secret: key}
}

// Bearer returns the credential with a token in an Authorization header (RFC 6750).
func Bearer(token string) Credential {
	return Credential{Header: "Authorization", Value: "Bearer " + token, Secret: token}
}

func (c Credential) secret() string {
	if c.Secret == "" {
		return KeyIn(c.Value) // of a source that sets only the value
	}
	return c.Secret
}
