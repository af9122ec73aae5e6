package keys

import (
	"net/http"
	"net/url"
	"reflect"
	"slices"
	"testing"
)

func TestACredentialAndItsSecretGoWithAnAttempt(t *testing.T) {
	caller := Presented{Header: []Line{{"Authorization", []string{"Bearer key-of-alice"}}}}
	for name, c := range map[string]struct {
		auth       *Auth
		credential Credential
		header     http.Header
		secrets    Secrets
	}{
		"a key":                 {&Auth{}, apiKey("key-of-a-backend"), http.Header{"Api-Key": {"key-of-a-backend"}}, Secrets{"key-of-a-backend"}},
		"a token":               {&Auth{}, Bearer("key-of-a-backend"), http.Header{"Authorization": {"Bearer key-of-a-backend"}}, Secrets{"key-of-a-backend"}},
		"a value with spaces":   {&Auth{}, Credential{"x-key", "Key id=1 secret", "id=1 secret"}, http.Header{"X-Key": {"Key id=1 secret"}}, Secrets{"id=1 secret"}},
		"a value alone":         {&Auth{}, Credential{Header: "Authorization", Value: "Bearer key-of-a-backend"}, http.Header{"Authorization": {"Bearer key-of-a-backend"}}, Secrets{"key-of-a-backend"}},
		"a key of the config":   {&Auth{InHeaders: []string{"Bearer key-of-a-gateway"}}, Credential{}, http.Header{}, Secrets{"key-of-a-gateway"}},
		"a password":            {&Auth{InHeaders: []string{"Basic Z2F0ZXdheTpwYXNzd29yZC1vZi1h"}}, Credential{}, http.Header{}, Secrets{"Z2F0ZXdheTpwYXNzd29yZC1vZi1h", "password-of-a"}},
		"a key of the caller's": {&Auth{Passthrough: true}, Credential{}, http.Header{"Authorization": {"Bearer key-of-alice"}}, Secrets{"key-of-alice"}},
	} {
		t.Run(name, func(t *testing.T) {
			for range 2 {
				if got := c.auth.Secrets(c.credential, caller); !slices.Equal(got, c.secrets) {
					t.Errorf("the secrets are %q, want %q", got, c.secrets)
				}
			}
			header := make(http.Header)
			if c.auth.Authorize(header, new(url.URL), c.credential, caller); !reflect.DeepEqual(header, c.header) {
				t.Errorf("the header is %v, want %v", header, c.header)
			}
		})
	}
}
