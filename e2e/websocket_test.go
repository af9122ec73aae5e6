package e2e

import (
	"encoding/json"
	"flag"
	"testing"
)

var handshakes = flag.Int("handshakes", 200, "how many WebSockets each client opens")

// TestEveryWebSocketIsOpened opens many WebSockets with real clients, while all
// backends but the last fail at handshakes.
func TestEveryWebSocketIsOpened(t *testing.T) {
	for _, client := range []struct {
		name, runtime string
		install       func() error
		trust         string
		command       []string
	}{
		{"Python, websockets", "python3", installPython, "SSL_CERT_FILE=", []string{"python/.venv/bin/python", "python/sockets.py"}},
		{"Node, ws", "node", installNode, "NODE_EXTRA_CA_CERTS=", []string{"node", "node/sockets.mjs"}},
	} {
		t.Run(client.name, func(t *testing.T) {
			lookPath(t, client.runtime)
			if err := client.install(); err != nil {
				t.Fatal(err)
			}
			s := start(t, []backend{
				{simulator: "fault hang_before_headers"},
				{options: "auth api_key\n api_key wrong"},
				{simulator: "fault error_200"},
				{simulator: "fault reset"},
				{simulator: "fault wrong_upgrade"},
				{},
			})
			order, _ := json.Marshal(map[string]any{"url": s.url + "/v1/realtime?model=gpt-realtime", "count": *handshakes, "parallel": 20})
			var got []struct {
				Backend, Text, Error string
				Seconds              float64
			}
			runJSON(t, string(order), &got, client.trust+s.root, client.command...)
			longest := 0.0
			for _, g := range got {
				longest = max(longest, g.Seconds)
				if g.Error != "" || g.Backend != names[5] || g.Text != "This reply comes from a" {
					t.Errorf("a session is %+v", g)
				}
			}
			// a handshake may take 5 s, and only one backend is silent
			if t.Logf("the longest of %d handshakes took %.3f s", len(got), longest); len(got) != *handshakes || longest > 10 {
				t.Errorf("there are %d sessions, of which one waited %.3f s", len(got), longest)
			}
		})
	}
}

// TestResponsesComeOverWebSockets has the official SDKs, three accounts, and
// one that fails.
func TestResponsesComeOverWebSockets(t *testing.T) {
	for _, client := range []struct {
		name, runtime string
		install       func() error
		trust         string
		command       []string
	}{
		{"Python", "python3", installPython, "SSL_CERT_FILE=", []string{"python/.venv/bin/python", "python/responses.py"}},
		{"Node", "node", installNode, "NODE_EXTRA_CA_CERTS=", []string{"node", "node/responses.mjs"}},
	} {
		t.Run(client.name, func(t *testing.T) {
			lookPath(t, client.runtime)
			if err := client.install(); err != nil {
				t.Fatal(err)
			}
			s := start(t, []backend{{}, {simulator: "fault status:503"}, {}})
			order, _ := json.Marshal(map[string]any{"url": s.url + "/v1", "count": *handshakes / 2, "parallel": 10})
			var got []struct{ ID, Error string }
			runJSON(t, string(order), &got, client.trust+s.root, client.command...)
			for _, g := range got {
				if g.ID == "" || g.Error != "" {
					t.Errorf("a chain is %+v", g)
				}
			}
			if len(got) != *handshakes/2 {
				t.Errorf("there are %d chains", len(got))
			}
		})
	}
}
