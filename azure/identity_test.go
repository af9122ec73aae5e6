package azure

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2"

	openailb "github.com/openai-lb/caddy-openai-lb"
)

// load sets up credentials from JSON, as Caddy does.
func load(t *testing.T, config string) (*Credentials, error) {
	t.Helper()
	ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
	t.Cleanup(cancel)
	module, err := ctx.LoadModuleByID("http.openai_lb.credentials.azure_identity", json.RawMessage(config))
	if err != nil {
		return nil, err
	}
	return module.(*Credentials), nil
}

func mustLoad(t *testing.T, config string) *Credentials {
	t.Helper()
	c, err := load(t, config)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// age makes the current token look old enough to be renewed.
func (c *Credentials) age() {
	older := *c.shared.current.Load()
	older.arrived = older.arrived.Add(-renewInterval)
	c.shared.current.Store(&older)
}

// expire makes the current token one that is to be replaced.
func (c *Credentials) expire() { c.shared.due.Store(0) }

func (c *Credentials) wantToken(t *testing.T, n int) {
	t.Helper()
	got, err := c.Credential(t.Context())
	if err != nil || got != bearer(tokenNumber(n)) {
		t.Errorf("got %v, %v, want token %d", got, err, n)
	}
}

// wantRenewed has token n refused, and wants the next one in its place.
func (c *Credentials) wantRenewed(t *testing.T, n int) {
	t.Helper()
	c.age()
	got, err := c.Renew(t.Context(), bearer(tokenNumber(n)))
	if err != nil || got != bearer(tokenNumber(n+1)) {
		t.Errorf("got %v, %v, want token %d", got, err, n+1)
	}
	c.wantToken(t, n+1)
}

// wantRefreshed has a token replaced in the background.
func (c *Credentials) wantRefreshed(t *testing.T, n int) {
	t.Helper()
	c.expire()
	c.wantToken(t, n)
	waitFor(t, func() bool { return c.shared.current.Load().credential == bearer(tokenNumber(n+1)) })
}

func waitFor(t *testing.T, happened func() bool) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !happened(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it did not happen")
		}
	}
}

// ownResource is one that no other test has a token for: for the default chain,
// MSAL remembers those of managed identities as long as the process lives.
func ownResource() string { return fmt.Sprintf("https://%d.example", resources.Add(1)) }

var resources atomic.Int64

func TestAManagedIdentityGetsTokensOfAppService(t *testing.T) {
	own := ownResource()
	for name, tc := range map[string]struct{ config, param, id, resource string }{
		"system-assigned":           {`{"credential":"managed_identity"}`, "", "", "https://cognitiveservices.azure.com"},
		"by client ID":              {`{"credential":"managed_identity","client_id":"{env.THE_ID}"}`, "client_id", "the-id", "https://cognitiveservices.azure.com"},
		"by object ID":              {`{"credential":"managed_identity","object_id":" {env.THE_ID} "}`, "object_id", "the-id", "https://cognitiveservices.azure.com"},
		"by resource ID":            {`{"credential":"managed_identity","resource_id":"/a/b"}`, "mi_res_id", "/a/b", "https://cognitiveservices.azure.com"},
		"in the government's cloud": {`{"credential":"managed_identity","cloud":"government"}`, "", "", "https://cognitiveservices.azure.us"},
		"for something else":        {`{"credential":"managed_identity","scope":"https://ai.azure.com/.default"}`, "", "", "https://ai.azure.com"},
		"as the default":            {`{"scope":"` + own + `/.default"}`, "", "", own},
		"in China's cloud":          {`{"credential":"managed_identity","cloud":"china"}`, "", "", "https://cognitiveservices.azure.cn"},
	} {
		t.Run(name, func(t *testing.T) {
			e := appService(t)
			t.Setenv("THE_ID", "the-id")
			c := mustLoad(t, tc.config)
			e.wantRequests(t, 0)
			c.wantToken(t, 1)
			c.wantRenewed(t, 1)
			c.wantRefreshed(t, 2)
			e.wantRequests(t, 3)
			for _, query := range e.received() {
				if query.Get("resource") != tc.resource || query.Get(tc.param) != tc.id || query.Has("claims") {
					t.Errorf("the endpoint was asked for %v", query)
				}
				for _, param := range []string{"client_id", "object_id", "mi_res_id"} {
					if param != tc.param && query.Has(param) {
						t.Errorf("the endpoint was asked for %v", query)
					}
				}
			}
		})
	}
}

func TestAnEndpointThatRemembersItsTokenIsAskedOnce(t *testing.T) {
	for _, config := range []string{`{"credential":"managed_identity"}`, `{"scope":"` + ownResource() + `/.default"}`} {
		e := appService(t)
		e.same = true
		c := mustLoad(t, config)
		c.wantToken(t, 1)
		c.age()
		for range 50 {
			if got, err := c.Renew(t.Context(), bearer(tokenNumber(1))); err != nil || got != bearer(tokenNumber(1)) {
				t.Errorf("got %v, %v", got, err)
			}
		}
		e.wantRequests(t, 2)
	}
}

func TestAClientSecretGetsTokensOfEntra(t *testing.T) {
	e := entra(t)
	file := writeFile(t, "secret", clientSecret+"\n")
	c := mustLoad(t, `{"credential":"client_secret","tenant_id":"the-tenant","client_id":"the-client",
		"client_secret":"{file.`+file+`}","authority_host":"`+e.URL+`"}`)
	e.wantRequests(t, 0)
	c.wantToken(t, 1)
	c.wantRenewed(t, 1)
	writeFile(t, file, "the next secret")
	c.wantRefreshed(t, 2)
	e.wantRequests(t, 3)
	for n, form := range e.received() {
		secret := clientSecret
		if n == 2 {
			secret = "the next secret"
		}
		if form.Get("client_id") != "the-client" || form.Get("client_secret") != secret ||
			!strings.Contains(form.Get("scope"), "https://cognitiveservices.azure.com/.default") || form.Has("claims") {
			t.Errorf("Entra got %v", form)
		}
	}
}

func TestAWorkloadIdentityGetsTokensOfEntra(t *testing.T) {
	for name, config := range map[string]string{
		"by its environment": `{"credential":"workload_identity"}`,
		"as the default":     `{}`,
	} {
		t.Run(name, func(t *testing.T) {
			e := entra(t)
			file := writeFile(t, "token", "ASSERTION-1")
			t.Setenv("AZURE_TENANT_ID", "the-tenant")
			t.Setenv("AZURE_CLIENT_ID", "the-client")
			t.Setenv("AZURE_FEDERATED_TOKEN_FILE", file)
			t.Setenv("AZURE_AUTHORITY_HOST", e.URL)
			c := mustLoad(t, config)
			c.wantToken(t, 1)
			writeFile(t, file, "ASSERTION-2")
			c.wantRenewed(t, 1)
			e.wantRequests(t, 2)
			for n, form := range e.received() {
				if form.Get("client_id") != "the-client" || form.Get("client_assertion") != []string{"ASSERTION-1", "ASSERTION-2"}[n] || form.Has("claims") {
					t.Errorf("Entra got %v", form)
				}
			}
		})
	}
	t.Run("by options", func(t *testing.T) {
		e := entra(t)
		file := writeFile(t, "token", "ASSERTION-1")
		c := mustLoad(t, `{"credential":"workload_identity","tenant_id":"the-tenant","client_id":"the-client",
			"token_file":"`+file+`","authority_host":"`+e.URL+`"}`)
		c.wantToken(t, 1)
		c.wantRefreshed(t, 1)
		e.wantRequests(t, 2)
	})
}

func TestTheSameOptionsShareASource(t *testing.T) {
	appService(t)
	load := func(config string) *Credentials { return mustLoad(t, config) }
	secret := func(secret string) *Credentials {
		return load(`{"credential":"client_secret","tenant_id":"t","client_id":"c","client_secret":"` + secret + `"}`)
	}
	a, b := load(`{"credential":"managed_identity","client_id":"x"}`), load(`{"credential":"managed_identity","client_id":" x"}`)
	if a.shared != b.shared || a.Identity() != b.Identity() {
		t.Error("the same identity has two sources")
	}
	others := []*Credentials{
		a, load(`{"credential":"managed_identity","client_id":"y"}`), load(`{"credential":"managed_identity","object_id":"x"}`),
		load(`{"credential":"managed_identity","client_id":"x","scope":"https://ai.azure.com/.default"}`), load(`{}`), secret("one"),
	}
	for i, one := range others {
		for _, other := range others[:i] {
			if one.shared == other.shared || one.Identity() == other.Identity() {
				t.Errorf("%v and %v share a source", one.settings, other.settings)
			}
		}
	}
	one, two := secret("one"), secret("two")
	if one.shared == two.shared || one.Identity() == two.Identity() {
		t.Error("another secret is not tried")
	}
	if strings.Contains(one.Identity(), "one") {
		t.Error("the identity reveals the secret")
	}
}

func TestErrorsSayWhatMattersAndNoSecret(t *testing.T) {
	const description = `AADSTS7000215: Invalid client secret provided. Ensure the secret is the value.`
	for name, tc := range map[string]struct {
		fail http.HandlerFunc
		want string
	}{
		"what Entra says": {
			errorReply(401, `{"error":"invalid_client","error_description":"`+description+` Trace ID: 1 Correlation ID: 2","error_codes":[7000215]}`),
			"ClientSecretCredential: 401 Unauthorized, invalid_client, " + description,
		},
		"an echo of the secret": {
			errorReply(400, `{"error":"invalid_request","error_description":"bad secret `+clientSecret+`\r\nmore"}`),
			"ClientSecretCredential: 400 Bad Request, invalid_request, bad secret …",
		},
		"a long story": {
			errorReply(400, `{"error":"invalid_scope","error_description":"`+strings.Repeat("AADSTS1002012 é ", 100)+`"}`),
			"ClientSecretCredential: 400 Bad Request, invalid_scope, AADSTS1002012 é ",
		},
		"an error that is no JSON": {
			errorReply(403, `<html>`+tokenSecret+`</html>`), "ClientSecretCredential: 403 Forbidden",
		},
		"half a token": {
			errorReply(200, `{"access_token":"`+tokenSecret+`-1",`), "ClientSecretCredential: ",
		},
		"a token with an error": {
			errorReply(200, `{"access_token":"`+tokenSecret+`-1","error":"strange"}`), "ClientSecretCredential: ",
		},
		"no token": {errorReply(200, `{}`), "ClientSecretCredential: "},
	} {
		t.Run(name, func(t *testing.T) {
			e := entra(t)
			e.fail = tc.fail
			c := mustLoad(t, `{"credential":"client_secret","tenant_id":"the-tenant","client_id":"the-client",
				"client_secret":"`+clientSecret+`","authority_host":"`+e.URL+`"}`)
			got, err := c.Credential(t.Context())
			if err == nil || got != (openailb.Credential{}) {
				t.Fatalf("got %v, %v, want an error", got, err)
			}
			t.Log(err)
			without(t, "the error", err.Error())
			if !strings.HasPrefix(err.Error(), tc.want) || !utf8.ValidString(err.Error()) || len(err.Error()) > maxMessage+10 || strings.Contains(err.Error(), "\n") {
				t.Errorf("got %q, want %q", err, tc.want)
			}
		})
	}
}

func TestErrorsOfManagedIdentities(t *testing.T) {
	const config = `{"credential":"managed_identity"}`
	e := appService(t)
	e.fail = errorReply(400, `{"StatusCode":400,"Message":"No User Assigned Identity found.\nmore","CorrelationId":"1"}`)
	if _, err := mustLoad(t, config).Credential(t.Context()); err == nil || err.Error() != "ManagedIdentityCredential: 400 Bad Request, No User Assigned Identity found." {
		t.Errorf("got %v", err)
	}

	// a pause it asks for is longer than the one after a failure, up to a
	// minute
	for client, asks := range map[string]string{
		"seconds": "40",
		"date":    time.Now().Add(40 * time.Second).UTC().Format(http.TimeFormat),
		"absurd":  "86400",
	} {
		e.fail = func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Retry-After", asks)
			errorReply(429, `{"error":"throttled"}`)(w, r)
		}
		throttled := mustLoad(t, `{"credential":"managed_identity","client_id":"`+client+`"}`)
		if _, err := throttled.Credential(t.Context()); err == nil || err.Error() != "ManagedIdentityCredential: 429 Too Many Requests, throttled" {
			t.Errorf("got %v", err)
		}
		want := 40 * time.Second
		if client == "absurd" {
			want = maxBackoff
		}
		if wait := time.Until(time.Unix(0, throttled.shared.due.Load())); wait < want-20*time.Second || wait > want {
			t.Errorf("asked by %q, the next request is in %s, want %s", asks, wait, want)
		}
	}

	// the default chain says what each of its credentials lacks
	e.fail = errorReply(403, `{"message":"not yours","access_token":"`+tokenSecret+`"}`)
	_, err := mustLoad(t, `{"scope":"`+ownResource()+`/.default"}`).Credential(t.Context())
	if err == nil || !strings.Contains(err.Error(), "EnvironmentCredential: missing environment variable AZURE_TENANT_ID; ") ||
		!strings.Contains(err.Error(), "ManagedIdentityCredential authentication failed: 403 Forbidden, not yours") {
		t.Errorf("got %v", err)
	}
	t.Log(err)
	without(t, "the error", err.Error())

	e.Close()
	if _, err := mustLoad(t, `{"credential":"managed_identity","client_id":"gone"}`).Credential(t.Context()); err == nil || !strings.HasSuffix(err.Error(), "connection refused") || strings.Contains(err.Error(), "?") {
		t.Errorf("got %v", err)
	}
}
