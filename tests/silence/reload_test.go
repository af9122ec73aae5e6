package silence

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestRequestsMoveThatWaitWhileTheConfigIsReloaded(t *testing.T) {
	a, serverA := lbtest.Listen(t, "a")
	_, serverB := lbtest.Listen(t, "b")
	port := lbtest.FreePort(t)
	config := func(minutes int) string {
		return fmt.Sprintf("{\nadmin off\ndefault_bind 127.0.0.1\n}\nhttp://:%d {\nopenai_lb {\nbackend %s\nbackend %s {\npriority 2\n}\nstream_idle_timeout %dm\n}\n}",
			port, serverA.URL, serverB.URL, minutes)
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
	lbtest.Post(client, url, chat).WantServed(t, "b")
}
