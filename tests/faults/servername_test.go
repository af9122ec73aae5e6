package faults

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// TestABackendWhoseServerNameIsAPlaceholderIsReachedAgain has one that is away
// for a while.
func TestABackendWhoseServerNameIsAPlaceholderIsReachedAgain(t *testing.T) {
	_, server := lbtest.Listen(t, "b")
	_, trust := backendTLS(t)
	port := lbtest.FreePort(t)
	address := lbtest.ServeAt(t, fmt.Sprintf(`openai_lb {
		backend https://127.0.0.1:%d {
			name a
		}
		backend %s {
			name b
			priority 2
		}
		%s
	}`, port, server.URL, strings.Replace(trust, "tls_trust_pool", "tls_server_name {http.reverse_proxy.upstream.host}\ntls_trust_pool", 1)))
	url := "http://" + address + "/v1/chat/completions"
	client := lbtest.NewClient(t)
	lbtest.Ask(client, url).WantServed(t, "b")
	listener, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		t.Fatal(err)
	}
	back := httptest.NewUnstartedServer(http.HandlerFunc((&lbtest.Backend{Name: "a"}).ServeHTTP))
	back.Listener.Close()
	back.Listener = listener
	lbtest.StartTLS(t, back)
	lbtest.WaitFor(t, func() bool {
		res, err := client.Post(url, "application/json", nil)
		if err != nil {
			return false
		}
		res.Body.Close()
		return res.Header.Get("X-Backend") == "a"
	})
}
