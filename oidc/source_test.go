package oidc

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/go-jose/go-jose/v4"
)

func TestWhatAnIssuerMustNotAnswer(t *testing.T) {
	good := `{"keys":` + string(must(json.Marshal([]jose.JSONWebKey{{Key: rsaKey().Public(), KeyID: "first"}}))) + `}`
	weak := string(must(json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{Key: newRSA(1024).Public()}}})))
	for name, c := range map[string]struct{ discovery, keys, want string }{
		"all is well":            {`{"issuer":"ISSUER","jwks_uri":"ISSUER/keys"}`, good, ""},
		"a kind that is unknown": {`{"issuer":"ISSUER","jwks_uri":"ISSUER/keys"}`, strings.Replace(good, `[`, `[{"kty":"NEW"},{"kty":"oct","k":"c2VjcmV0"},7,`, 1), ""},
		"another issuer":         {`{"issuer":"https://other.example","jwks_uri":"ISSUER/keys"}`, good, `that of the issuer "https://other.example"`},
		"keys without TLS":       {`{"issuer":"ISSUER","jwks_uri":"http://other.example/keys"}`, good, "jwks_uri of the discovery document is not a URL with https"},
		"keys in a file":         {`{"issuer":"ISSUER","jwks_uri":"file:///etc/passwd"}`, good, "jwks_uri of the discovery document is not a URL with https"},
		"no keys":                {`{"issuer":"ISSUER"}`, good, "jwks_uri of the discovery document is not a URL with https"},
		"no JSON":                {`<html>secret`, good, "the discovery document is not valid JSON"},
		"keys that are no JSON":  {`{"issuer":"ISSUER","jwks_uri":"ISSUER/keys"}`, `secret`, "the set of keys is not valid JSON"},
		"an empty set":           {`{"issuer":"ISSUER","jwks_uri":"ISSUER/keys"}`, `{}`, "the set of keys has none"},
		"only secret keys":       {`{"issuer":"ISSUER","jwks_uri":"ISSUER/keys"}`, `{"keys":[{"kty":"oct","k":"c2VjcmV0"}]}`, "the set of keys has none"},
		"a weak key":             {`{"issuer":"ISSUER","jwks_uri":"ISSUER/keys"}`, weak, "the set of keys has none"},
		"a key for encryption":   {`{"issuer":"ISSUER","jwks_uri":"ISSUER/keys"}`, strings.Replace(good, `"kid"`, `"use":"enc","kid"`, 1), "the set of keys has none"},
		"too much":               {`{"issuer":"ISSUER","jwks_uri":"ISSUER/keys"}`, strings.Repeat(" ", maxAnswer) + good, "answers with more than 1048576 bytes"},
		"a redirect":             {`{"issuer":"ISSUER","jwks_uri":"ISSUER/moved"}`, good, "answers with status 302"},
		"nothing there":          {`{"issuer":"ISSUER","jwks_uri":"ISSUER/gone"}`, good, "answers with status 404"},
	} {
		t.Run(name, func(t *testing.T) {
			var server *httptest.Server
			server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				switch r.URL.Path {
				case "/.well-known/openid-configuration":
					_, _ = w.Write([]byte(strings.ReplaceAll(c.discovery, "ISSUER", server.URL)))
				case "/keys":
					_, _ = w.Write([]byte(c.keys))
				case "/moved":
					http.Redirect(w, r, "/keys", http.StatusFound)
				default:
					http.NotFound(w, r)
				}
			}))
			defer server.Close()
			s := newSource(server.URL)
			defer s.client.CloseIdleConnections()
			found, err := s.fetch(t.Context())
			switch {
			case c.want == "" && (err != nil || len(found.keys) != 1):
				t.Errorf("got %v, %v", found, err)
			case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "secret")):
				t.Errorf("the error is %v, want %s", err, c.want)
			}
		})
	}
}

func FuzzPayload(f *testing.F) {
	f.Add("eyJhbGciOiJub25lIn0.eyJpc3MiOiJhIiwiYXVkIjpbImIiXSwiZXhwIjoxfQ.x")
	f.Add("e.e30.e")
	o := &Identity{Issuer: "a", Audience: "b", Caller: "azp", Tier: &Tier{Claim: "roles", Values: []Value{{"x", "gold"}}}}
	f.Fuzz(func(t *testing.T, token string) {
		c, err := payload(token)
		if err != nil {
			return
		}
		o.isOurs(c)
		v := new(verified)
		if o.name(v, c); v.unnamed == nil && v.identity.Name == "" {
			t.Error("a caller has no name")
		}
	})
}
