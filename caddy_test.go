package openailb_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
)

// These tests are about habits of Caddy that no feature shows at once if they
// change: see CONTRIBUTING.md.

// A policy that got another list for each request would set up a balancer for
// each.
func TestReverseProxyPassesTheSameUpstreamsEachTime(t *testing.T) {
	a, server := lbtest.Listen(t, "a")
	name := lbtest.Unique("p")
	address := lbtest.ServeAt(t, fmt.Sprintf("reverse_proxy %s {\nlb_policy openai_lb {\npool %s\n}\ntransport openai_lb\n}", server.Listener.Addr(), name))
	balancer := func() *pools.Entry {
		entries := pools.Default.Entries()
		i := slices.IndexFunc(entries, func(e *pools.Entry) bool { return e.Name == name })
		if i < 0 {
			t.Fatal("there is no balancer")
		}
		return entries[i]
	}
	client := lbtest.NewClient(t)
	lbtest.Ask(client, "http://"+address+"/").WantServed(t, "a")
	first := balancer()
	lbtest.Ask(client, "http://"+address+"/").WantServed(t, "a")
	if balancer() != first {
		t.Error("the second request has another balancer")
	}
	if n := len(a.Received()); n != 2 {
		t.Errorf("a got %d requests, want 2", n)
	}
}

// reverse_proxy asks its transport whether it uses TLS, and for the Host of
// requests.
func TestAPlainReverseProxyReachesItsUpstreamsByTLSAndByTheirName(t *testing.T) {
	a, server, trust := lbtest.ListenTLS(t, "a", false)
	trust = strings.TrimPrefix(trust, "transport http")
	address := lbtest.ServeAt(t, "reverse_proxy "+server.URL+" {\nlb_policy openai_lb\ntransport openai_lb {\nhttp"+trust+"\n}\n}")
	lbtest.Ask(lbtest.NewClient(t), "http://"+address+"/").WantServed(t, "a")
	if got := a.Received()[0].Request; got.TLS == nil || got.Host != server.Listener.Addr().String() {
		t.Errorf("a was reached as %q with TLS %v, want its own name by TLS", got.Host, got.TLS != nil)
	}
}

func TestABackendGetsNoHeaderBesidesTheClientsItsKeyAndTheMarkOfTheBalancer(t *testing.T) {
	a, server := lbtest.Listen(t, "a")
	address := lbtest.ServeAt(t, "openai_lb {\nbackend "+server.URL+" {\napi_key key\n}\n}")
	lbtest.Ask(lbtest.NewClient(t), "http://"+address+"/v1/chat/completions").WantServed(t, "a")
	got := slices.Sorted(maps.Keys(a.Received()[0].Request.Header))
	if want := []string{"Accept-Encoding", "Authorization", "Content-Length", "Openai-Lb-Loop", "User-Agent"}; !slices.Equal(got, want) {
		t.Errorf("the backend gets %v, want %v", got, want)
	}
}
