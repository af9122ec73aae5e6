package quotas

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// TestAReloadKeepsTheUseOfAQuota also if the quota changes. Without the option,
// nothing limits.
func TestAReloadKeepsTheUseOfAQuota(t *testing.T) {
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		used(60, 40)(w, r)
	}))
	t.Cleanup(backend.Close)
	pool, address := lbtest.Unique("quotas"), fmt.Sprintf("127.0.0.1:%d", lbtest.FreePort(t))
	config := func(quota string) string {
		return fmt.Sprintf("{\nadmin off\ndefault_bind 127.0.0.1\n}\nhttp://%s {\nheader X-Config %d\nopenai_lb {\npool %s\nbackend %s {\n%s\n}\n}\n}", address, len(quota), pool, backend.URL, quota)
	}
	ask := func(quota string) lbtest.Reply {
		url := "http://" + address + "/v1/chat/completions"
		// a GET is no inference, and so charged to no quota
		lbtest.WaitFor(t, func() bool {
			return lbtest.Get(lbtest.NewClient(t), "http://"+address+"/v1/models").Header.Get("X-Config") == strconv.Itoa(len(quota))
		})
		return lbtest.Post(lbtest.NewClient(t), url, prompt(20, `"max_tokens":1,`))
	}
	const high, low = "requests 100/hour", "requests 1/hour"
	lbtest.Run(t, config(high))
	ask(high).WantStatus(t, 200)
	lbtest.Reload(t, config(low))
	ask(low).WantError(t, 429, "rate_limit_exceeded")
	lbtest.Reload(t, config(high))
	ask(high).WantStatus(t, 200)
	lbtest.Reload(t, config("priority 7"))
	ask("priority 7").WantStatus(t, 200)
}
