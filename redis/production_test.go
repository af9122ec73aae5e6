package redis

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	_ "github.com/caddyserver/caddy/v2/modules/caddyhttp/tracing"
	_ "github.com/caddyserver/caddy/v2/modules/metrics"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// TestTheProductionExampleWorks runs examples/production with other addresses:
// two backends in the place of Azure's and OpenAI's, a Redis, and a collector
// of traces.
func TestTheProductionExampleWorks(t *testing.T) {
	var spans atomic.Int64
	collector := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { spans.Add(1) }))
	t.Cleanup(collector.Close)
	t.Setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.URL)
	t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
	for _, name := range []string{"PTU_KEY", "EAST_KEY", "OPENAI_KEY"} {
		t.Setenv(name, "key-of-"+name)
	}
	t.Setenv("REDIS_PASSWORD", "s3cret")
	store := startServer(t, "--requirepass", "s3cret")
	ptu, ptuServer := lbtest.Listen(t, "ptu")
	east, eastServer := lbtest.Listen(t, "east")
	openai, openaiServer := lbtest.Listen(t, "openai")
	ptu.Replies(lbtest.Throttled("7"))

	dir := t.TempDir()
	lbtest.WriteFile(t, filepath.Join(dir, "client-keys"), "alice client-key-of-alice\n")
	certificate, client := lbtest.ServerCertificate(t)
	ports := make([]any, 3)
	for i := range ports {
		ports[i] = lbtest.FreePort(t)
	}
	config := read(t, "../examples/production/Caddyfile")
	for _, change := range [][2]string{
		{"{\n\t# The longest", "{\n\tadmin off\n\tauto_https disable_redirects\n\tdefault_bind 127.0.0.1\n\t# The longest"},
		{"llm.example.com {", fmt.Sprintf("https://127.0.0.1:%d {\n\t%s", ports[0], certificate)},
		{"http://:9180", fmt.Sprintf("http://127.0.0.1:%d", ports[1])},
		{"http://localhost:9181", fmt.Sprintf("http://127.0.0.1:%d", ports[2])},
		{"\tbind 127.0.0.1 ::1\n", ""},
		{"/etc/caddy/", dir + "/"},
		{"/var/log/caddy/audit.log", dir + "/audit.log"},
		{"/var/log/caddy/llm.log", dir + "/llm.log"},
		{"redis.internal:6379", store.address},
		{"https://contoso-ptu.openai.azure.com {", ptuServer.URL + " {\n\t\t\tauth api_key"},
		{"https://contoso-east.openai.azure.com {", eastServer.URL + " {\n\t\t\tauth api_key"},
		{"https://api.openai.com/v1 {", openaiServer.URL + "/v1 {"},
	} {
		if strings.Count(config, change[0]) != 1 {
			t.Fatalf("the example has %q %d times", change[0], strings.Count(config, change[0]))
		}
		config = strings.Replace(config, change[0], change[1], 1)
	}
	lbtest.Run(t, config)

	site := fmt.Sprintf("https://127.0.0.1:%d", ports[0])
	key := []string{"Authorization", "Bearer client-key-of-alice"}
	chat := func(model string) lbtest.Reply {
		return lbtest.Post(client, site+"/v1/chat/completions", `{"model":"`+model+`","messages":[]}`, key...)
	}
	chat("gpt-5.5").WantServed(t, "east", "openai")
	chat("gpt-5.6-luna").WantServed(t, "east", "openai")
	chat("gpt-5.6-terra").WantError(t, 404, "model_not_found")
	lbtest.Post(client, site+"/v1/chat/completions", `{"model":"gpt-5.5"}`).WantError(t, 401, "invalid_api_key")
	lbtest.Post(client, site+"/v1/chat/completions", strings.Repeat(" ", 33<<20), key...).WantError(t, 413, "request_too_large")
	if n := len(ptu.Received()); n != 1 {
		t.Errorf("the throttled deployment got %d requests, want 1", n)
	}
	if len(east.Received())+len(openai.Received()) != 2 {
		t.Error("the others did not get one request each time")
	}
	lbtest.Get(client, site+"/readyz").WantStatus(t, 200)
	for _, page := range []struct{ url, shows string }{
		{fmt.Sprintf("http://127.0.0.1:%d/metrics", ports[1]), `caddy_openai_lb_requests_total{backend=`},
		{fmt.Sprintf("http://127.0.0.1:%d/metrics", ports[1]), "caddy_http_requests_total"},
		{fmt.Sprintf("http://127.0.0.1:%d/", ports[2]), "ptu"},
	} {
		if got := lbtest.Get(client, page.url); got.Status != 200 || !strings.Contains(got.Body, page.shows) {
			t.Errorf("%s gets %d without %q", page.url, got.Status, page.shows)
		}
	}
	lbtest.WaitFor(t, func() bool { return inTouchHere() && spans.Load() > 0 })
	lbtest.WaitFor(t, func() bool { return strings.Contains(read(t, filepath.Join(dir, "llm.log")), `"caller":"alice"`) })
}
