package admin

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/openai-lb/caddy-openai-lb/internal/importer"
)

// importCommand returns the command import.
func importCommand() *cobra.Command {
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
		made, err := importer.LiteLLM(text)
		if err != nil {
			err = fmt.Errorf("%s: %w", printable(filepath.Base(args[0])), err)
		}
		return made, err
	})
	add("aca-lb", "Reads the variables of openai-aca-lb", cobra.NoArgs, func([]string) (string, error) { return importer.ACA() })
	return command
}
