package operators

import (
	"bufio"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestTheStatusPageShowsNoSecret(t *testing.T) {
	a, server := lbtest.Listen(t, "a")
	a.Replies(lbtest.Says(429, `{"error":{"message":"sk-of-a is over its limit","code":"sk-of-a"}}`, "Retry-After", "60", "X-Key", "sk-of-a"))
	address := lbtest.ServeAt(t, `openai_lb_status /status
	openai_lb {
		client_key alice sk-1234-of-alice
		backend `+server.URL+`/base {
			name a
			api_key sk-of-a
			header X-Gateway-Key sk-of-the-gateway
		}
	}`)
	client := lbtest.NewClient(t)
	lbtest.Ask(client, "http://"+address+"/v1/chat/completions?api-key=sk-1234-of-alice", "Authorization", "Bearer sk-1234-of-alice")
	page := lbtest.Get(client, "http://"+address+"/status")
	if page.Status != http.StatusOK || !strings.Contains(page.Body, "throttled (429), gpt-4o") {
		t.Fatalf("got %d %s", page.Status, page.Body)
	}
	for _, secret := range []string{"sk-1234", "alice", server.Listener.Addr().String(), "/base"} {
		if strings.Contains(page.Body, secret) {
			t.Errorf("the page shows %s", secret)
		}
	}
}

func TestAReloadEndsAWatchAndKeepsWhatItShows(t *testing.T) {
	a, server := lbtest.Listen(t, "a")
	port := lbtest.FreePort(t)
	address := fmt.Sprintf("http://127.0.0.1:%d", port)
	config := fmt.Sprintf(`{
		admin off
		auto_https off
	}
	:%d {
		bind 127.0.0.1
		header X-Config 1
		openai_lb_status /status
		openai_lb /v1/* {
			backend %s {
				name a
			}
		}
	}`, port, server.URL)
	lbtest.Run(t, config)
	client := lbtest.NewClient(t)
	a.Replies(lbtest.Throttled("60"))
	lbtest.Ask(client, address+"/v1/chat/completions")
	watch := func() *bufio.Scanner {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, address+"/status?events", http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		res, err := client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { res.Body.Close() })
		lines := bufio.NewScanner(res.Body)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			if strings.HasPrefix(lines.Text(), "data: ") {
				break
			}
		}
		if !strings.Contains(lines.Text(), `data-state=\"benched\"`) {
			t.Errorf("the first event is %s, %v", lines.Text(), lines.Err())
		}
		return lines
	}
	first := watch()
	lbtest.Reload(t, strings.Replace(config, "X-Config 1", "X-Config 2", 1))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for first.Scan() { // until it ends
		}
	}()
	lbtest.Within(t, "the watch ends with its config", ended)
	watch()
}
