package silence

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestRequestsMoveThatWaitWhileTheConfigIsReloaded(t *testing.T) {
	for name, block := range map[string]string{
		"openai_lb": "openai_lb {\nbackend http://%[1]s\nbackend http://%[2]s {\npriority 2\n}\nmax_fails %[3]d\n}",
		"reverse_proxy": "reverse_proxy %[1]s %[2]s {\nlb_policy openai_lb {\nupstream %[2]s {\npriority 2\n}\n}\n" +
			"transport openai_lb {\nmax_fails %[3]d\n}\n}",
	} {
		t.Run(name, func(t *testing.T) {
			a, serverA := lbtest.Listen(t, "a")
			_, serverB := lbtest.Listen(t, "b")
			port := lbtest.FreePort(t)
			config := func(maxFails int) string {
				return fmt.Sprintf("{\nadmin off\ndefault_bind 127.0.0.1\n}\nhttp://:%d {\n%s\n}", port,
					fmt.Sprintf(block, strings.TrimPrefix(serverA.URL, "http://"), strings.TrimPrefix(serverB.URL, "http://"), maxFails))
			}
			lbtest.Run(t, config(1))
			client, url := lbtest.NewClient(t), fmt.Sprintf("http://127.0.0.1:%d/v1/chat/completions", port)
			for range 12 {
				lbtest.Post(client, url, chat).WantServed(t, "a")
			}
			a.Forget()
			a.Replies(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
			replies := make(chan lbtest.Reply)
			for range 2 {
				go func() { replies <- lbtest.Post(client, url, chat) }()
			}
			lbtest.WaitFor(t, func() bool { return len(a.Received()) == 2 })
			lbtest.Reload(t, config(2))
			(<-replies).WantServed(t, "b") // b has never served before
			(<-replies).WantServed(t, "b")
			if name == "openai_lb" { // the other one learns anew
				lbtest.Post(client, url, chat).WantServed(t, "b")
			}
		})
	}
}
