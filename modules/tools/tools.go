// Package tools adds two subcommands to `caddy openai-lb`, for the time before
// a configuration is live. Neither needs a Caddy that runs.
//
//   - check sets a configuration up without starting it, and asks its backends for
//     their models: checkcommand.go has its flags and what it prints, checkconfig.go
//     the configuration, and check.go the requests.
//   - import prints a Caddyfile for the configuration of another balancer: litellm.go
//     and its neighbours read LiteLLM's file into backends and notes, apim.go and its
//     neighbours JSON and policies of API Management, import_caddyfile.go and
//     import_values.go write them.
//
// The module uses no seam: nothing of it runs while requests are served. It
// uses the core's own options and credentials, so that check finds what a start
// would.
package tools

import (
	"github.com/spf13/cobra"

	"github.com/openai-lb/caddy-openai-lb/internal/cli"
)

// Configured is a backend of a configuration.
type Configured struct {
	Pool, Name, Host string
	// Models are the backend's own names of the models that its options name.
	Models []string
}

// ReadBackends sets up a Caddyfile as `check --offline` does, and returns its
// backends.
type ReadBackends func(file string) ([]Configured, error)

// More makes the subcommands of other Go modules that read the backends of a
// Caddyfile, such as `discover` of the module azure.
var More []func(ReadBackends) *cobra.Command

func init() {
	cli.Add(func() []*cobra.Command {
		all := []*cobra.Command{checkCommand(), importCommand()}
		for _, newCommand := range More {
			all = append(all, newCommand(readBackends))
		}
		return all
	})
}
