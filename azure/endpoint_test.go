package azure

import (
	"crypto/x509"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// tokenSecret is in all tokens, and clientSecret is the one that gets them:
// nobody but backends and token endpoints may see them.
const (
	tokenSecret  = "TOKENSECRET"
	clientSecret = "CLIENTSECRET~8Q"
)

// endpoint is a token endpoint: App Service's for managed identities, or Entra.
type endpoint struct {
	*httptest.Server

	mu       sync.Mutex
	requests []url.Values // the query or the form
	fail     http.HandlerFunc
	hold     chan struct{} // answers wait for it
	same     bool          // give the first token forever
	names    bool          // give tokens that name their audience
}

// clearEnv hides what would tell azidentity of another identity.
func clearEnv(t *testing.T) {
	t.Helper()
	for _, name := range []string{
		"AZURE_TENANT_ID", "AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET", "AZURE_CLIENT_CERTIFICATE_PATH", "AZURE_USERNAME",
		"AZURE_FEDERATED_TOKEN_FILE", "AZURE_AUTHORITY_HOST", "AZURE_TOKEN_CREDENTIALS", "AZURE_REGIONAL_AUTHORITY_NAME",
		"IDENTITY_ENDPOINT", "IDENTITY_HEADER", "IDENTITY_SERVER_THUMBPRINT", "IMDS_ENDPOINT", "MSI_ENDPOINT", "MSI_SECRET",
	} {
		t.Setenv(name, "")
		os.Unsetenv(name)
	}
}

// appService is the endpoint of the environment in an app of App Service.
func appService(t *testing.T) *endpoint {
	t.Helper()
	clearEnv(t)
	e := new(endpoint)
	e.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Identity-Header") != "the header" || r.URL.Query().Get("api-version") == "" {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		e.answer(w, r, r.URL.Query())
	}))
	t.Cleanup(e.Close)
	t.Setenv("IDENTITY_ENDPOINT", e.URL+"/msi/token")
	t.Setenv("IDENTITY_HEADER", "the header")
	return e
}

// entra is an authority of a private cloud.
func entra(t *testing.T) *endpoint {
	t.Helper()
	clearEnv(t)
	e := new(endpoint)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{tenant}/v2.0/.well-known/openid-configuration", func(w http.ResponseWriter, r *http.Request) {
		base := e.URL + "/" + r.PathValue("tenant")
		json.NewEncoder(w).Encode(map[string]string{
			"issuer":                 base + "/v2.0",
			"authorization_endpoint": base + "/oauth2/v2.0/authorize",
			"token_endpoint":         base + "/oauth2/v2.0/token",
		})
	})
	mux.HandleFunc("POST /the-tenant/oauth2/v2.0/token", func(w http.ResponseWriter, r *http.Request) {
		r.ParseForm()
		e.answer(w, r, r.PostForm)
	})
	e.Server = httptest.NewTLSServer(mux)
	t.Cleanup(e.Close)
	testRoots = x509.NewCertPool()
	testRoots.AddCert(e.Certificate())
	t.Cleanup(func() { testRoots = nil })
	return e
}

func (e *endpoint) answer(w http.ResponseWriter, r *http.Request, values url.Values) {
	e.mu.Lock()
	e.requests = append(e.requests, values)
	n, fail, hold := len(e.requests), e.fail, e.hold
	if e.same {
		n = 1
	}
	token := tokenNumber(n)
	if e.names {
		token += "-for-" + audienceOf(values)
	}
	e.mu.Unlock()
	if hold != nil {
		select {
		case <-hold:
		case <-r.Context().Done():
			return
		}
	}
	if fail != nil {
		fail(w, r)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(map[string]any{
		"token_type": "Bearer", "access_token": token, "resource": values.Get("resource"),
		"expires_in": 3600, "expires_on": fmt.Sprint(time.Now().Add(time.Hour).Unix()),
	})
}

// audienceOf is whom a requested token is for.
func audienceOf(values url.Values) string {
	scope, _, _ := strings.Cut(values.Get("scope"), "/.default")
	return scope + values.Get("resource")
}

func tokenNumber(n int) string { return fmt.Sprintf("%s-%d", tokenSecret, n) }

func (e *endpoint) set(change func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	change()
}

func (e *endpoint) received() []url.Values {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.requests
}

func (e *endpoint) wantRequests(t *testing.T, n int) {
	t.Helper()
	if got := len(e.received()); got != n {
		t.Errorf("the token endpoint got %d requests, want %d", got, n)
	}
}

// errorReply answers with what a token endpoint says of an error.
func errorReply(status int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		w.Write([]byte(body))
	}
}

func writeFile(t *testing.T, name, text string) string {
	t.Helper()
	path := name
	if !filepath.IsAbs(name) {
		path = filepath.Join(t.TempDir(), name)
	}
	lbtest.WriteFile(t, path, text)
	return path
}

// without fails a test if a text holds a secret.
func without(t *testing.T, what, text string) {
	t.Helper()
	for _, secret := range []string{tokenSecret, clientSecret, "ASSERTION"} {
		if i := strings.Index(text, secret); i >= 0 {
			t.Errorf("%s holds a secret: %s", what, text[max(0, i-200):min(len(text), i+100)])
		}
	}
}
