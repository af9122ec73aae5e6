package adminapi

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/overview"
	"github.com/openai-lb/caddy-openai-lb/internal/replicas"
)

func init() {
	caddycmd.RegisterCommand(caddycmd.Command{
		Name:  "openai-lb",
		Usage: "status|drain|resume|reset|replicas",
		Short: "Shows the backends of openai_lb, and takes them out of use",
		Long: `
Shows how the backends of the running Caddy's load balancers are, takes one out
of use, puts it back, or ends its benches. What a drain began outlives a reload
of the configuration, and ends with the process. With the option state it holds
for all replicas, also for those that start later. Shows those replicas, too.

It asks Caddy's admin API, at the --address if that is given. Otherwise the
address is taken from the --config file, or else it is Caddy's default.
`,
		CobraFunc: addCommands,
	})
}

func addCommands(parent *cobra.Command) {
	flags := parent.PersistentFlags()
	flags.StringP("config", "c", "", "Configuration file, for the address of the admin API")
	flags.StringP("adapter", "a", "", "Name of the config adapter to apply to it")
	flags.String("address", "", "Address of the admin API, if it is not that of the config")
	flags.String("pool", "", "Only the backends of this pool")
	parent.Args = cobra.NoArgs
	parent.RunE = func(command *cobra.Command, _ []string) error { return command.Help() }
	parent.AddCommand(
		newCommand("status", "Shows all backends", cobra.NoArgs),
		newCommand("replicas", "Shows the replicas that share what they know, and when each was last heard", cobra.NoArgs),
		newCommand("drain <backend>", "Takes a backend out of use: it gets requests only when no other one is left", cobra.ExactArgs(1)),
		newCommand("resume <backend>", "Puts a drained backend back into use", cobra.ExactArgs(1)),
		newCommand("reset <backend>", "Ends the benches of a backend", cobra.ExactArgs(1)),
	)
}

func newCommand(use, short string, args cobra.PositionalArgs) *cobra.Command {
	command := &cobra.Command{Use: use, Short: short, Args: args}
	command.RunE = caddycmd.WrapCommandFuncForCobra(func(flags caddycmd.Flags) (int, error) {
		if err := ask(command.Name(), flags, command.OutOrStdout()); err != nil {
			return caddy.ExitCodeFailedStartup, err
		}
		return caddy.ExitCodeSuccess, nil
	})
	return command
}

// ask asks the admin API for the status, or gives it an order, and prints what
// it answers with.
func ask(what string, flags caddycmd.Flags, to io.Writer) error {
	method, uri, show := http.MethodGet, backendsPath, showBackends
	switch what {
	case "status":
	case "replicas":
		uri, show = replicasPath, showReplicas
	default:
		method, uri = http.MethodPost, backendsPath+"/"+openaiapi.EscapeSegment(flags.Arg(0))+"/"+what
	}
	if flags.Changed("pool") {
		uri += "?pool=" + url.QueryEscape(flags.String("pool"))
	}
	address, err := caddycmd.DetermineAdminAPIAddress(flags.String("address"), nil, flags.String("config"), flags.String("adapter"))
	if err != nil {
		return fmt.Errorf("the address of the admin API cannot be determined: %w", err)
	}
	res, err := caddycmd.AdminAPIRequest(address, method, uri, nil, nil)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	return show(to, res.Body)
}

// decode reads an answer of the admin API.
func decode(answer io.Reader, into any) error {
	if err := json.NewDecoder(answer).Decode(into); err != nil {
		return fmt.Errorf("the admin API's answer cannot be read: %w", err)
	}
	return nil
}

// showReplicas prints replicas as a table.
func showReplicas(to io.Writer, answer io.Reader) error {
	var statuses []replicas.Status
	if err := decode(answer, &statuses); err != nil {
		return err
	}
	table := tabwriter.NewWriter(to, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "HOST\tID\tSINCE\tHEARD")
	for _, s := range statuses {
		if !s.InTouch {
			fmt.Fprintf(table, "out of touch: %d messages wait\n", s.Queue)
		}
		for _, p := range s.Peers {
			fmt.Fprintln(table, strings.Join([]string{printable(p.Host), p.ID, moment(p.Since), moment(p.Heard)}, "\t"))
		}
	}
	return table.Flush()
}

func moment(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// showBackends prints backends as a table.
func showBackends(to io.Writer, answer io.Reader) error {
	var backends []overview.Backend
	if err := decode(answer, &backends); err != nil {
		return err
	}
	table := tabwriter.NewWriter(to, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "POOL\tNAME\tPRIORITY\tWEIGHT\tSTATE\tCLASS\tMODEL\tREMAINING\tIN FLIGHT\tREQUESTS\tFAILURES")
	for _, b := range backends {
		remaining := ""
		if b.RemainingMs > 0 {
			remaining = (time.Duration(b.RemainingMs) * time.Millisecond).String()
		}
		state := b.State
		if !b.Healthy {
			state += ", unhealthy"
		}
		model := printable(b.Model)
		if len(b.Benches) > 0 && b.Benches[0].Scope == overview.ModelScope {
			model = cmp.Or(model, "(none named)")
		}
		fmt.Fprintln(table, strings.Join([]string{
			printable(b.Pool), printable(b.Name), strconv.Itoa(b.Priority), strconv.Itoa(b.Weight), state,
			cmp.Or(b.Class, "-"), cmp.Or(model, "-"), cmp.Or(remaining, "-"),
			strconv.FormatInt(b.InFlight, 10), strconv.FormatInt(b.Requests, 10), strconv.FormatInt(b.Failures, 10),
		}, "\t"))
	}
	return table.Flush()
}

// printable makes text safe for a terminal. Clients can make up models.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return unicode.ReplacementChar
	}, text)
}
