package operators

import (
	"net/http"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// metric returns the line of a metric that the admin API has, or nothing.
func (o *operated) metric(name string) string {
	for line := range strings.Lines(o.call(http.MethodGet, "/metrics").Body) {
		if strings.HasPrefix(line, name) {
			return strings.TrimSpace(line)
		}
	}
	return ""
}

func TestTheAdminAPIHasTheMetricsAlsoAfterAFailedReload(t *testing.T) {
	o := newOperated(t)
	if got := lbtest.Post(o.client, o.address+"/v1/chat/completions", `{"model":"gpt-4o"}`); got.Status != http.StatusOK {
		t.Fatalf("got %d: %s", got.Status, got.Body)
	}
	const served = `caddy_openai_lb_requests_total{backend="b",caller="",class="served"`
	before := o.metric(served)
	broken, err := lbtest.Adapt(strings.ReplaceAll(o.caddyfile, "sk-of-", "{file./no-such-file}"))
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := caddy.Load([]byte(broken), true); err == nil {
			t.Fatal("a configuration without its key was loaded")
		}
		if got := o.metric("caddy_config_last_reload_successful"); got != "caddy_config_last_reload_successful 0" {
			t.Errorf("after a failed reload: %s", got)
		}
		if got := o.metric(served); got != before || got == "" {
			t.Errorf("after a failed reload: %q, want %q", got, before)
		}
		if o.metric("caddy_openai_lb_backend_available") == "" {
			t.Error("after a failed reload, the states of the backends are gone")
		}
	}
	lbtest.Reload(t, strings.Replace(o.caddyfile, "X-Config 1", "X-Config 2", 1))
	if got := o.metric(served); got != before {
		t.Errorf("after the next reload: %q, want %q", got, before)
	}
}
