// Package cli is the command `caddy openai-lb`, to which modules add their
// subcommands.
//
// Subcommands are made anew for each run of the command: Add takes a function
// that makes them. All subcommands inherit the flags of the parent command,
// such as --address. A subcommand may define a flag of the same name for
// itself.
//
// The rest of the package is common to subcommands: they read files of a
// bounded length, and print text that others wrote, which must not control a
// terminal.
package cli

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
)

func init() {
	caddycmd.RegisterCommand(caddycmd.Command{
		Name:  "openai-lb",
		Short: "Shows the backends of openai_lb, and takes them out of use",
		Long: `
Shows the backends of the running Caddy's load balancers, takes a backend out
of use, puts it back into use, or ends its cooldowns. A drain survives a reload
of the configuration. Without the option state, it ends with the process. With
this option, it applies to all replicas, also to those that start later. The
command also shows callers, resets their use, adds up requests and tokens for
bills, and shows replicas. With the option state, status, callers and usage show
the sum over all replicas. With --replica, they show one replica.

The command calls Caddy's admin API at --address, if that is given. Otherwise,
the address comes from the --config file, or is Caddy's default. Of a Caddyfile,
the command reads only the option admin, so other variables need not be set.
`,
		CobraFunc: addCommands,
	})
}

// makers make the subcommands.
var makers []func() []*cobra.Command

// Add adds the subcommands that a function makes. The init functions of modules
// call it.
func Add(newSubcommands func() []*cobra.Command) { makers = append(makers, newSubcommands) }

// docs is where the commands are described. Caddy's own page, which its help
// names, does not know them.
const docs = "https://github.com/openai-lb/caddy-openai-lb/blob/main/docs/operators.md#command-line"

func addCommands(parent *cobra.Command) {
	parent.SetHelpTemplate(parent.HelpTemplate() + "\nDocumentation:\n" + docs + "\n")
	parent.Example = "  caddy openai-lb status\n  caddy openai-lb status --help"
	flags := parent.PersistentFlags()
	flags.StringP("config", "c", "", "Configuration file, for the address of the admin API")
	flags.StringP("adapter", "a", "", "Name of the config adapter to apply to it")
	flags.String("address", "", "Address of the admin API, if it differs from the config")
	flags.String("pool", "", "Only the backends or callers of this pool")
	flags.Bool("json", false, "Prints the admin API's answer instead of a table")
	parent.Args = cobra.NoArgs
	parent.RunE = func(command *cobra.Command, _ []string) error { return command.Help() }
	for _, newSubcommands := range makers {
		parent.AddCommand(newSubcommands()...)
	}
	var names []string
	for _, subcommand := range parent.Commands() {
		names = append(names, subcommand.Name())
	}
	parent.Use = "openai-lb " + strings.Join(names, "|")
}

// UTC returns a time as text, to the second.
func UTC(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// Table prints rows in columns when it is flushed.
type Table struct{ *tabwriter.Writer }

// NewTable returns a table with the header of its columns.
func NewTable(to io.Writer, header ...string) Table {
	t := Table{tabwriter.NewWriter(to, 0, 0, 2, ' ', 0)}
	t.Row(header...)
	return t
}

// Row adds a row. Its cells contain no tab and no line break: Printable
// replaces them.
func (t Table) Row(cells ...string) { fmt.Fprintln(t, strings.Join(cells, "\t")) }

// Printable replaces the characters that may control a terminal. Clients can
// make up models, and other programs the text of errors.
func Printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return unicode.ReplacementChar
	}, text)
}

// Number returns a number of things, with their name for one of them.
func Number(n int, thing string) string {
	if n != 1 {
		thing += "s"
	}
	return fmt.Sprintf("%d %s", n, thing)
}
