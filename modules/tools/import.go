package tools

import (
	"fmt"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/openai-lb/caddy-openai-lb/internal/cli"
)

// importCommand returns the command import.
func importCommand() *cobra.Command {
	command := &cobra.Command{
		Use:   "import",
		Short: "Prints a Caddyfile for the configuration of another balancer",
		Long: `
Prints a Caddyfile that does what the configuration of another balancer does. A
comment at the top lists what does not carry over, with its line. Keys never appear
in the Caddyfile: they become placeholders such as {env.EAST_KEY}, and a comment says
which variables to set.

litellm reads the file of LiteLLM's proxy, or the values of its Helm chart. With
--helm, it prints values for the chart of openai_lb instead. apim reads backends,
pools and policies of Azure API Management. Nothing is sent. Read the Caddyfile
before you use it, and check it with 'caddy openai-lb check'. Microsoft's sample
openai-aca-lb needs no import: the option backends_from_env reads its variables.
`,
		Example: "  caddy openai-lb import litellm config.yaml >Caddyfile\n  caddy openai-lb import apim backends.json policy.xml >Caddyfile",
		Args:    cobra.NoArgs, SilenceUsage: true,
		RunE: func(command *cobra.Command, _ []string) error { return command.Help() },
	}
	litellm := &cobra.Command{
		Use: "litellm <config.yaml>", Short: "Reads the file of LiteLLM's proxy", Example: "  caddy openai-lb import litellm config.yaml >Caddyfile",
		Args: cobra.ExactArgs(1), SilenceUsage: true,
		RunE: func(command *cobra.Command, args []string) error {
			text, err := cli.ReadFile(args[0])
			if err != nil {
				return err
			}
			read := LiteLLM
			if helm, _ := command.Flags().GetBool("helm"); helm {
				read = LiteLLMValues
			}
			made, err := read(text)
			if err != nil {
				return fmt.Errorf("%s: %w", cli.Printable(filepath.Base(args[0])), err)
			}
			_, err = fmt.Fprint(command.OutOrStdout(), made)
			return err
		},
	}
	litellm.Flags().Bool("helm", false, "Print values for the Helm chart instead of a Caddyfile")
	command.AddCommand(litellm, importAPIMCommand())
	return command
}

// importAPIMCommand returns the command import apim.
func importAPIMCommand() *cobra.Command {
	command := &cobra.Command{
		Use: "apim <file>...", Short: "Reads backends and policies of Azure API Management",
		Long: `
Reads backends, pools and policies of Azure API Management. Each file is a list of
backends in JSON, as 'az rest' prints it, an exported template, or the XML of a policy:

  az rest --url "/subscriptions/.../service/<name>/backends?api-version=2024-05-01" >backends.json

The backends are those of the pool that the policy names, or those of the policy's
own list. A named value {{east-key}} becomes {env.EAST_KEY}.
`,
		Example: "  caddy openai-lb import apim backends.json policy.xml >Caddyfile",
		Args:    cobra.MinimumNArgs(1), SilenceUsage: true,
		RunE: func(command *cobra.Command, args []string) error {
			files := make([]File, len(args))
			for i, name := range args {
				text, err := cli.ReadFile(name)
				if err != nil {
					return err
				}
				files[i] = File{filepath.Base(name), text}
			}
			pool, _ := command.Flags().GetString("pool")
			made, err := APIM(pool, files...)
			if err != nil {
				return err
			}
			_, err = fmt.Fprint(command.OutOrStdout(), made)
			return err
		},
	}
	command.Flags().String("pool", "", "The pool to import, if there are several")
	return command
}
