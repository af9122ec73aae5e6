package callers

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// site is a Caddy with a balancer whose callers have these options.
type site struct{ pool, address, backend string }

func newSite(t *testing.T) *site {
	t.Helper()
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		used(60, 40)(w, r)
	}))
	t.Cleanup(backend.Close)
	return &site{lbtest.Unique("callers"), fmt.Sprintf("127.0.0.1:%d", lbtest.FreePort(t)), backend.URL}
}

func (s *site) config(options string) string {
	return fmt.Sprintf("{\nadmin off\ndefault_bind 127.0.0.1\n}\nhttp://%s {\nheader X-Config %d\nopenai_lb {\npool %s\nbackend %s\nclient_key alice %s\n%s\n}\n}", s.address, len(options), s.pool, s.backend, aliceKey, options)
}

// ask sends a request to the config with these options.
func (s *site) ask(t *testing.T, options string) lbtest.Reply {
	t.Helper()
	url := "http://" + s.address + "/v1/chat/completions"
	client := lbtest.ClientOf(t, strconv.Itoa(len(options)), url) // it has no key
	return lbtest.Post(client, url, prompt(20, `"max_tokens":1,`), "Authorization", "Bearer "+aliceKey)
}

func TestAReloadThatLowersALimitKeepsWhatWasUsed(t *testing.T) {
	s := newSite(t)
	const high, low, none = "caller alice { tokens 1k/day }", "caller alice { tokens 150/day }", "caller * { tokens 150/day }"
	lbtest.Run(t, s.config(block(high)))
	s.ask(t, block(high)).WantStatus(t, 200)
	lbtest.WaitFor(t, func() bool { return usedToday(s.pool) == 100 })
	broken, err := lbtest.Adapt(s.config(block(low)) + "\nhttp://:1 {\nbind 203.0.113.1\n}")
	if err != nil {
		t.Fatal(err)
	}
	if caddy.Load([]byte(broken), true) == nil {
		t.Fatal("a config was loaded that cannot start")
	}
	for _, c := range lbtest.LimitersOf(s.pool).All() {
		if u := c.Snapshot(now()).Limits; len(u) != 1 || u[0].Limit.Amount != 1000 {
			t.Errorf("after a config that failed, the limits are %v", u)
		}
	}
	lbtest.Reload(t, s.config(block(low)))
	s.ask(t, block(low)).WantStatus(t, 200)
	lbtest.WaitFor(t, func() bool { return usedToday(s.pool) == 200 })
	s.ask(t, block(low)).WantError(t, 429, "insufficient_quota")
	lbtest.Reload(t, s.config(block(none)))
	s.ask(t, block(none)).WantError(t, 429, "insufficient_quota")
	lbtest.Reload(t, s.config(block(high)))
	s.ask(t, block(high)).WantStatus(t, 200)
}

// block writes an option with a block in several lines.
func block(option string) string {
	return strings.NewReplacer("{ ", "{\n", " }", "\n}").Replace(option)
}

func usedToday(pool string) (tokens int64) {
	for _, c := range lbtest.LimitersOf(pool).All() {
		tokens += c.Snapshot(now()).Today
	}
	return tokens
}

func TestWhatWasUsedOfADayOutlivesARestart(t *testing.T) {
	s := newSite(t)
	options := block("caller alice { tokens 150/day }")
	lbtest.Run(t, s.config(options))
	for _, want := range []int64{100, 200} {
		s.ask(t, options).WantStatus(t, 200)
		lbtest.WaitFor(t, func() bool { return usedToday(s.pool) == want })
		if err := caddy.Stop(); err != nil {
			t.Fatal(err)
		}
		lbtest.Reload(t, s.config(options))
	}
	s.ask(t, options).WantError(t, 429, "insufficient_quota")
}

// TestARequestWhoseErrorIsReplacedIsSettled has a site that replaces the
// failures of the balancer.
func TestARequestWhoseErrorIsReplacedIsSettled(t *testing.T) {
	s := newSite(t)
	broken := httptest.NewServer(lbtest.Status(500))
	t.Cleanup(broken.Close)
	const options = "caller * {\ntokens 1k/day\n}"
	config := strings.Replace(s.config(options), "backend "+s.backend, "backend "+broken.URL, 1)
	config = strings.Replace(config, "openai_lb {", "intercept {\n@failed status 5xx\nhandle_response @failed {\nheader -Content-Length\nrespond later 418\n}\n}\nopenai_lb {", 1)
	lbtest.Run(t, config)
	s.ask(t, options).WantStatus(t, 418)
	lbtest.WaitFor(t, func() bool {
		for _, c := range lbtest.LimitersOf(s.pool).All() {
			if u := c.Snapshot(now()); u.Today == 0 && u.Reserved == 0 && u.InFlight == 0 {
				return true
			}
		}
		return false
	})
}
