package command

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/openai-lb/caddy-openai-lb/internal/backend"
	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// Import returns the command import.
func Import() *cobra.Command {
	command := &cobra.Command{
		Use:   "import",
		Short: "Prints a Caddyfile for the configuration of another balancer",
		Long: `
Prints a Caddyfile that does what the configuration of another balancer does. A
comment at its top says what does not carry over, and on which line it was. Keys
never appear in it: they become placeholders such as {env.EAST_KEY}, and a comment
says which variable to set.

  caddy openai-lb import litellm config.yaml >Caddyfile
  caddy openai-lb import aca-lb >Caddyfile

litellm reads the file of LiteLLM's proxy, and aca-lb the variables of Microsoft's
sample openai-aca-lb, such as BACKEND_1_URL, from the environment. Nothing is sent.
Then read the file, and check it with 'caddy openai-lb check'.
`,
		Args: cobra.NoArgs, SilenceUsage: true,
		RunE: func(command *cobra.Command, _ []string) error { return command.Help() },
	}
	add := func(use, short string, args cobra.PositionalArgs, made func(args []string) (string, error)) {
		command.AddCommand(&cobra.Command{Use: use, Short: short, Args: args, SilenceUsage: true, RunE: func(command *cobra.Command, args []string) error {
			text, err := made(args)
			if err == nil {
				_, err = fmt.Fprint(command.OutOrStdout(), text)
			}
			return err
		}})
	}
	add("litellm <config.yaml>", "Reads the file of LiteLLM's proxy", cobra.ExactArgs(1), func(args []string) (string, error) {
		text, err := os.ReadFile(args[0])
		if err != nil {
			return "", err
		}
		made, err := fromLiteLLM(text)
		if err != nil {
			err = fmt.Errorf("%s: %w", Printable(filepath.Base(args[0])), err)
		}
		return made, err
	})
	add("aca-lb", "Reads the variables of openai-aca-lb", cobra.NoArgs, func([]string) (string, error) { return fromACA() })
	return command
}

// fromACA makes a Caddyfile of the environment of Microsoft's openai-aca-lb.
func fromACA() (string, error) {
	backends, variables, idle, err := backend.FromEnv(backend.DefaultPrefix)
	if err != nil {
		return "", err
	}
	if len(backends) == 0 {
		return "", fmt.Errorf("the environment has no backend: expected variables like %s", backend.ExampleVariables(backend.DefaultPrefix))
	}
	made := &made{origin: "openai-aca-lb", port: "8080"}
	for _, name := range []string{"PORT", "ASPNETCORE_HTTP_PORTS"} {
		if n, err := strconv.ParseUint(os.Getenv(name), 10, 16); err == nil && n > 0 {
			made.port = strconv.FormatUint(n, 10)
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
		made.blocks = append(made.blocks, block)
	}
	made.before = []string{"respond /healthz Healthy", ""}
	made.option("ready_path", "/readyz")
	for _, name := range []string{"response_header_timeout", "stream_first_event_timeout", "stream_idle_timeout"} {
		made.option(name, decimal(idle.Seconds())+"s")
	}
	made.note(0, "appsettings.json, command line arguments and ASPNETCORE_URLS are not read")
	made.note(0, "anyone who can reach this address can spend your budget, as before: add a client_key for each caller")
	return made.caddyfile(), nil
}
