package azure

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// witness is a backend that cannot serve, and remembers what it was asked.
type witness struct {
	*httptest.Server

	mu   sync.Mutex
	seen []*http.Request
}

func newWitness(t *testing.T) *witness {
	w := new(witness)
	w.Server = httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		w.mu.Lock()
		w.seen = append(w.seen, r)
		w.mu.Unlock()
		rw.WriteHeader(http.StatusServiceUnavailable)
	}))
	t.Cleanup(w.Close)
	return w
}

// take returns the requests seen so far, and forgets them.
func (w *witness) take() []*http.Request {
	w.mu.Lock()
	defer w.mu.Unlock()
	seen := w.seen
	w.seen = nil
	return seen
}

// orders returns every order of the items.
func orders(items []string) [][]string {
	if len(items) < 2 {
		return [][]string{slices.Clone(items)}
	}
	var all [][]string
	for i, first := range items {
		rest := slices.Delete(slices.Clone(items), i, i+1)
		for _, order := range orders(rest) {
			all = append(all, append([]string{first}, order...))
		}
	}
	return all
}

// TestInNoOrderDoesABackendSeeAnothersCredential sends one request through
// backends of every kind, in every order. From one that takes the caller's own
// credential, it goes on to no other.
func TestInNoOrderDoesABackendSeeAnothersCredential(t *testing.T) {
	tokens := appService(t)
	auths := map[string]string{
		"api_key":        "auth api_key\napi_key KEY-OF-API-KEY",
		"bearer":         "auth bearer\napi_key KEY-OF-BEARER",
		"azure_identity": "auth azure_identity {\ncredential managed_identity\n}",
		"passthrough":    "auth passthrough",
		"none":           "auth none",
	}
	own := map[string][]string{
		"api_key":        {"Api-Key: KEY-OF-API-KEY"},
		"bearer":         {"Authorization: Bearer KEY-OF-BEARER"},
		"azure_identity": {"Authorization: Bearer " + tokenNumber(1)},
		"passthrough": {"Api-Key: KEY-OF-CALLER", "Authorization: Bearer KEY-OF-CALLER",
			"Sec-Websocket-Protocol: realtime, openai-insecure-api-key.KEY-OF-CALLER", "query: api-key=KEY-OF-CALLER&x=1"},
		"none": nil,
	}
	var kinds []string
	witnesses := make(map[string]*witness)
	for kind := range auths {
		kinds = append(kinds, kind)
		witnesses[kind] = newWitness(t)
	}
	all := orders(kinds)
	if len(all) != 120 {
		t.Fatalf("%d orders, want 120", len(all))
	}
	var b *balancer
	for _, order := range all {
		options := "client_key alice CLIENT-KEY-OF-ALICE\nfail_duration 1ms\n"
		for i, kind := range order {
			options += fmt.Sprintf("backend %s {\nname %s\npriority %d\n%s\n}\n", witnesses[kind].URL, kind, i+1, auths[kind])
		}
		if b == nil {
			b = start(t, options)
		} else {
			b.reload(options)
		}
		r := lbtest.NewRequest(t, http.MethodPost, "http://lb/v1/chat/completions?api-key=KEY-OF-CALLER&x=1", strings.NewReader(`{}`))
		r.Header = http.Header{
			"Authorization": {"Bearer KEY-OF-CALLER"}, "Api-Key": {"KEY-OF-CALLER"}, "X-Api-Key": {"CLIENT-KEY-OF-ALICE"},
			"Cookie": {"session=KEY-OF-CALLER"}, "Sec-Websocket-Protocol": {"realtime, openai-insecure-api-key.KEY-OF-CALLER"},
		}
		res := lbtest.Do(t, b.client, r)
		res.Body.Close()
		reached := order[:slices.Index(order, "passthrough")+1]
		for _, kind := range order {
			seen := witnesses[kind].take()
			if want := slices.Contains(reached, kind); len(seen) > 1 || want != (len(seen) == 1) {
				t.Errorf("in the order %v, %s was asked %d times", order, kind, len(seen))
			}
			for _, r := range seen {
				if got := credentialsIn(r); !slices.Equal(got, own[kind]) {
					t.Errorf("in the order %v, %s saw %q, want %q", order, kind, got, own[kind])
				}
			}
		}
	}
	tokens.wantRequests(t, 1)
}

// credentialsIn lists all that looks like a credential, wherever it is.
func credentialsIn(r *http.Request) []string {
	var found []string
	for name, values := range r.Header {
		if text := strings.Join(values, ", "); strings.Contains(text, "KEY-OF") || strings.Contains(text, tokenSecret) {
			found = append(found, name+": "+text)
		}
	}
	if strings.Contains(r.URL.RawQuery, "KEY-OF") {
		found = append(found, "query: "+r.URL.RawQuery)
	}
	slices.Sort(found)
	return found
}
