package waiting

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
)

// waitingSite runs a balancer with a backend that throttles, at which requests
// of alice and others wait.
func waitingSite(t *testing.T) (pool string, reload func(), replies chan lbtest.Reply) {
	t.Helper()
	a, server := lbtest.Listen(t, "a")
	a.Replies(lbtest.Status(429, "Retry-After", "9", "X-Ratelimit-Limit-Requests", "600", "X-Ratelimit-Remaining-Requests", "0", "X-Ratelimit-Reset-Requests", "9"))
	port := lbtest.FreePort(t)
	pool = lbtest.Unique("waiting")
	config := func(minutes int) string {
		return fmt.Sprintf("{\nadmin off\ndefault_bind 127.0.0.1\n}\nhttp://:%d {\nopenai_lb {\npool %s\nbackend %s {\nmodel gpt-4o\n}\nwait 10s\nstream_idle_timeout %dm\n"+
			"client_key alice %s\nclient_key bob %s\ncaller alice {\nrequests 2/minute\n}\n}\n}", port, pool, strings.TrimSuffix(server.URL, "/"), minutes, aliceKey, bobKey)
	}
	lbtest.Run(t, config(1))
	client, url := lbtest.NewClient(t), fmt.Sprintf("http://127.0.0.1:%d/v1/chat/completions", port)
	replies = make(chan lbtest.Reply)
	for range 3 {
		go func() { replies <- lbtest.Post(client, url, chat, "Authorization", "Bearer "+bobKey) }()
	}
	lbtest.WaitFor(t, func() bool { return waits(t, pool) == 3 })
	a.Recovers() // it would serve them later
	return pool, func() { lbtest.Reload(t, config(2)) }, replies
}

func waits(t *testing.T, pool string) float64 {
	return lbtest.Scrape(t).Sum("waiting", map[string]string{"pool": pool})
}

func TestWaitingRequestsLeaveAtAReload(t *testing.T) {
	pool, reload, replies := waitingSite(t)
	reload()
	for range 3 {
		(<-replies).WantError(t, 429, "rate_limit_exceeded")
	}
	if got := waits(t, pool); got != 0 {
		t.Errorf("%v requests wait", got)
	}
}

func TestWaitingRequestsLeaveAtAStop(t *testing.T) {
	_, _, replies := waitingSite(t)
	stopped := make(chan error)
	go func() { stopped <- caddy.Stop() }()
	for range 3 {
		(<-replies).WantError(t, 429, "rate_limit_exceeded")
	}
	if err := <-stopped; err != nil {
		t.Error(err)
	}
}

// A request at another backend waits behind others no longer than they wait.
func TestARequestMayGoWhereOthersHaveWaitedBeforeAReload(t *testing.T) {
	a, serverA := lbtest.Listen(t, "a")
	b, serverB := lbtest.Listen(t, "b")
	port, name := lbtest.FreePort(t), lbtest.Unique("waiting")
	config := func(minutes int) string {
		return fmt.Sprintf("{\nadmin off\ndefault_bind 127.0.0.1\n}\nhttp://:%d {\nopenai_lb {\npool %s\nbackend %s\nbackend %s {\npriority 2\n}\nwait 10s\nstream_idle_timeout %dm\n}\n}",
			port, name, serverA.URL, serverB.URL, minutes)
	}
	lbtest.Run(t, config(9))
	client, url := lbtest.NewClient(t), fmt.Sprintf("http://127.0.0.1:%d/v1/chat/completions", port)
	a.Replies(lbtest.Status(429, "Retry-After-Ms", "9000"))
	b.Replies(lbtest.Status(500))
	ctx, leave := context.WithCancel(t.Context())
	go func() {
		r, _ := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(chat))
		if res, err := client.Do(r); err == nil {
			res.Body.Close()
		}
	}()
	lbtest.WaitFor(t, func() bool { return waits(t, name) == 1 })
	goOn := make(chan struct{})
	b.Forget()
	b.Replies(func(rw http.ResponseWriter, r *http.Request) {
		<-goOn
		lbtest.Status(500)(rw, r)
	})
	replies := make(chan lbtest.Reply)
	go func() { replies <- lbtest.Post(client, url, chat) }()
	lbtest.WaitFor(t, func() bool { return len(b.Received()) == 1 })
	leave()
	lbtest.WaitFor(t, func() bool { return waits(t, name) == 0 })
	for _, entry := range pools.Default.Entries() {
		for _, m := range entry.Pool.Members {
			m.Reset(pool.Order{})
		}
	}
	a.Recovers()
	lbtest.Reload(t, config(8))
	close(goOn)
	(<-replies).WantServed(t, "a")
}
