package importer

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"github.com/openai-lb/caddy-openai-lb/internal/backend"
	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// ACA makes a Caddyfile of the environment of Microsoft's openai-aca-lb.
func ACA() (string, error) {
	backends, variables, idle, err := backend.FromEnv(backend.DefaultPrefix)
	if err != nil {
		return "", err
	}
	if len(backends) == 0 {
		return "", fmt.Errorf("the environment has no backend: expected variables like %s", backend.ExampleVariables(backend.DefaultPrefix))
	}
	site := &site{origin: "openai-aca-lb", port: "8080"}
	for _, name := range []string{"PORT", "ASPNETCORE_HTTP_PORTS"} {
		if n, err := strconv.ParseUint(os.Getenv(name), 10, 16); err == nil && n > 0 {
			site.port = strconv.FormatUint(n, 10)
			break
		}
	}
	for i, b := range backends {
		if _, ok := directive.Word(b.Deployment); b.Deployment != "" && !ok {
			return "", errors.New(variables[i] + "_DEPLOYMENT_NAME must not contain control characters, braces or backslashes")
		}
		block := &block{url: b.URL, name: variables[i], priority: b.Priority, deployment: b.Deployment, key: b.APIKey}
		origin, err := openaiapi.ParseBaseURL(b.URL)
		if err != nil || b.Auth != keys.SchemeAPIKey || !openaiapi.IsAzure(origin.Hostname()) {
			block.auth = b.Auth
		}
		if b.Priority == 1 {
			block.priority = 0
		}
		site.blocks = append(site.blocks, block)
	}
	site.before = []string{"respond /healthz Healthy", ""}
	site.option("ready_path", "/readyz")
	for _, name := range []string{"response_header_timeout", "stream_first_event_timeout", "stream_idle_timeout"} {
		site.option(name, decimal(idle.Seconds())+"s")
	}
	site.note(0, "appsettings.json, command line arguments and ASPNETCORE_URLS are not read")
	site.note(0, "anyone who can reach this address can spend your budget, as before: add a client_key for each caller")
	return site.caddyfile(), nil
}
