package admin

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"os"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/replicas"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

func init() {
	caddycmd.RegisterCommand(caddycmd.Command{
		Name:  "openai-lb",
		Usage: "status|drain|resume|reset|callers|usage|replicas|check|import|version",
		Short: "Shows the backends of openai_lb, and takes them out of use",
		Long: `
Shows the backends of the running Caddy's load balancers, takes a backend out
of use, puts it back, or ends its benches. A drain survives a reload of the
configuration, and ends with the process. With the option state, it applies to
all replicas, also to those that start later. The command also shows callers,
gives them their use back, adds up what was used, and shows replicas. With the
option state, status, callers and usage show the sum over all replicas, or with
--replica one of them.

It calls Caddy's admin API at --address, if that is given. Otherwise, the
address comes from the --config file, or is Caddy's default. The command reads
only the option admin of a Caddyfile, so no other variable has to be set.
`,
		CobraFunc: addCommands,
	})
}

// Configured is a backend of a configuration.
type Configured struct {
	Pool, Name, Host string
	// Models are the backend's own names of the models that its options name.
	Models []string
}

// ReadBackends sets up a Caddyfile as `check --offline` does, and returns its backends.
type ReadBackends func(file string) ([]Configured, error)

// More makes the commands of modules that are built separately.
var More []func(ReadBackends) *cobra.Command

func addCommands(parent *cobra.Command) {
	flags := parent.PersistentFlags()
	flags.StringP("config", "c", "", "Configuration file, for the address of the admin API")
	flags.StringP("adapter", "a", "", "Name of the config adapter to apply to it")
	flags.String("address", "", "Address of the admin API, if it differs from the config")
	flags.String("pool", "", "Only the backends or callers of this pool")
	flags.Bool("json", false, "Prints the admin API's answer instead of a table")
	parent.Args = cobra.NoArgs
	parent.RunE = func(command *cobra.Command, _ []string) error { return command.Help() }
	drain := newCommand("drain <backend>", "Takes a backend out of use: it gets requests only when no other backend is left",
		call{method: http.MethodPost, path: backendsPath + "/%s/drain", show: showBackends, everywhere: drained})
	drain.Flags().Bool("wait", false, "Waits until the backend serves no request of any replica")
	resume := newCommand("resume <backend>", "Puts a drained backend back into use",
		call{method: http.MethodPost, path: backendsPath + "/%s/resume", show: showBackends, everywhere: resumed})
	reset := newCommand("reset <backend>", "Ends the benches of a backend",
		call{method: http.MethodPost, path: backendsPath + "/%s/reset", show: showBackends})
	callers := newCommand("callers", "Shows what callers have used of their limits, the busiest first",
		call{method: http.MethodGet, path: callersPath, show: showCallers})
	resetCaller := newCommand("reset <caller>", "Gives a caller its use back, at all replicas: its limits and estimates begin anew",
		call{method: http.MethodPost, path: callersPath + "/%s/reset", show: showCallers})
	callers.AddCommand(resetCaller)
	status, usage := newCommand("status", "Shows all backends", call{method: http.MethodGet, path: backendsPath, show: showBackends}), usageCommand()
	for _, command := range []*cobra.Command{status, callers, usage} {
		command.Flags().String("replica", everyReplica, "Only what this replica knows: its host, or the beginning of its id")
	}
	for _, command := range []*cobra.Command{drain, resume, reset, resetCaller} {
		command.Flags().String("reason", "", "Why, for the log and for other operators")
		command.Flags().String("by", "", "Who gives the order, for the log and for other operators (default: you, as user@host)")
	}
	usage.MarkFlagsMutuallyExclusive("config", "replica")
	parent.AddCommand(
		status, callers, usage,
		newCommand("replicas", "Shows the replicas that share state, when each was last heard from, and whose configuration differs",
			call{method: http.MethodGet, path: replicasPath, show: showReplicas}),
		drain, resume, reset,
		checkCommand(),
		importCommand(),
		newCommand("version", "Shows the version of this binary, or with --address or --config that of the running Caddy",
			call{method: http.MethodGet, path: versionPath, show: showBuild}),
	)
	for _, more := range More {
		parent.AddCommand(more(readBackends))
	}
}

// operator returns the user of this process and its host, as the admin API accepts it.
func operator() string {
	name := os.Getenv("SUDO_USER")
	if u, err := user.Current(); name == "" && err == nil {
		name = u.Username
	}
	name = cmp.Or(name, strconv.Itoa(os.Getuid())) // not each user has a name
	if host, err := os.Hostname(); err == nil {
		name += "@" + host
	}
	return pool.CutText(printable(name), pool.MaxBy)
}

// call is what a command asks the admin API, and how it shows the answer. The path has %s where the command's argument goes.
type call struct {
	method, path string
	show         func(io.Writer, []byte) error
	// everywhere is the state of a backend that the command wants at all replicas. It is nil for commands that want none.
	everywhere *wanted
}

// newCommand makes a command that calls the admin API. Cobra prints its errors as plain text; Caddy's wrapper of commands would log
// them as JSON.
func newCommand(use, short string, c call) *cobra.Command {
	args := cobra.PositionalArgs(cobra.NoArgs)
	if strings.Contains(c.path, "%s") {
		args = cobra.ExactArgs(1)
	}
	return &cobra.Command{Use: use, Short: short, Args: args, SilenceUsage: true, RunE: func(command *cobra.Command, args []string) error {
		to := c
		if len(args) > 0 {
			to.path = fmt.Sprintf(c.path, openaiapi.EscapeSegment(args[0]))
		}
		return to.run(command, caddycmd.Flags{FlagSet: command.Flags()}, args)
	}}
}

// run calls the admin API for the status or with an order, and prints the answer.
func (c call) run(command *cobra.Command, flags caddycmd.Flags, args []string) error {
	if command.Name() == "version" && !flags.Changed("address") && !flags.Changed("config") {
		answer, err := json.Marshal(thisBuild())
		if err != nil {
			return err
		}
		return showing(c.show, flags)(command.OutOrStdout(), answer)
	}
	address, err := adminAddress(flags)
	if err != nil {
		return err
	}
	query := make(url.Values)
	if flags.Changed("pool") {
		query.Set("pool", flags.String("pool"))
	}
	whose := flags.Lookup("replica") != nil
	order := maps.Clone(query)
	if flags.Lookup("by") != nil {
		order.Set("by", cmp.Or(flags.String("by"), operator()))
		order.Set("reason", flags.String("reason"))
	}
	if whose {
		order.Set("replica", flags.String("replica"))
	}
	answer, err := ask(address, c.method, c.path, order)
	if err == nil && whose {
		return showAll(command, showing(c.show, flags), flags.Bool("json"), answer)
	}
	if err == nil && c.everywhere != nil {
		return c.followOrder(command, flags, address, args[0], query)
	}
	if err != nil {
		return err
	}
	return showing(c.show, flags)(command.OutOrStdout(), answer)
}

// showing returns show, or showJSON if the flag --json is set.
func showing(show func(io.Writer, []byte) error, flags caddycmd.Flags) func(io.Writer, []byte) error {
	if flags.Bool("json") {
		return showJSON
	}
	return show
}

// ask returns the admin API's answer. Its errors are plain text, also if something else answers.
func ask(address, method, path string, query url.Values) ([]byte, error) {
	if len(query) > 0 {
		path += "?" + query.Encode()
	}
	res, err := caddycmd.AdminAPIRequest(address, method, path, nil, nil)
	if err != nil {
		var said struct{ Error string }
		if _, body, ok := strings.Cut(err.Error(), ": {"); ok && json.Unmarshal([]byte("{"+body), &said) == nil && said.Error != "" {
			return nil, errors.New(printable(said.Error))
		}
		return nil, fmt.Errorf("the admin API at %s: %s", printable(address), printable(err.Error()))
	}
	defer res.Body.Close()
	return readUpTo(res.Body, maxAnswers)
}

// decode reads an answer of the admin API.
func decode(answer []byte, into any) error {
	if err := json.Unmarshal(answer, into); err != nil {
		return fmt.Errorf("could not read the admin API's answer: %w", err)
	}
	return nil
}

// showJSON prints the answer as it is, if it is JSON.
func showJSON(to io.Writer, answer []byte) error {
	if err := decode(answer, new(json.RawMessage)); err != nil {
		return err
	}
	_, err := fmt.Fprintf(to, "%s\n", escaped(bytes.TrimSpace(answer)))
	return err
}

// escaped escapes the characters in JSON that are not printable, which only its strings can have.
func escaped(text []byte) []byte {
	if !bytes.ContainsFunc(text, isHidden) {
		return text
	}
	var b []byte
	for _, r := range string(text) {
		if !isHidden(r) {
			b = utf8.AppendRune(b, r)
			continue
		}
		for _, unit := range utf16.AppendRune(nil, r) {
			b = fmt.Appendf(b, `\u%04x`, unit)
		}
	}
	return b
}

func isHidden(r rune) bool { return r >= 0x7f && !unicode.IsPrint(r) }

// showBuild prints versions as a line.
func showBuild(to io.Writer, answer []byte) error {
	var b Build
	if err := decode(answer, &b); err != nil {
		return err
	}
	commit := ""
	if b.Commit != "" {
		commit = fmt.Sprintf(" (commit %s)", printable(b.Commit))
	}
	_, err := fmt.Fprintf(to, "openai_lb %s%s, Caddy %s\n", printable(b.Version), commit, printable(b.CaddyVersion))
	return err
}

// showReplicas prints replicas as a table, and below it how many messages wait while the store cannot be reached.
func showReplicas(to io.Writer, answer []byte) error {
	var statuses []replicas.Status
	if err := decode(answer, &statuses); err != nil {
		return err
	}
	table := newTable(to, "HOST", "ID", "SINCE", "HEARD", "CONFIGURATION")
	for _, s := range statuses {
		for _, p := range s.Peers {
			table.row(printable(p.Host), p.ID, utc(p.Since), utc(p.Heard), configsOf(p))
		}
	}
	if err := table.Flush(); err != nil {
		return err
	}
	for _, s := range statuses {
		if !s.InTouch {
			fmt.Fprintf(to, "not connected: %d messages wait\n", s.Queue)
		}
	}
	return nil
}

// configsOf returns the digests of what a replica has configured.
func configsOf(p replicas.Peer) string {
	var configs []string
	for _, c := range p.Configs {
		text := printable(c.Pool) + " " + c.Digest
		if c.DiffersSince != nil {
			text += ", differs since " + utc(*c.DiffersSince)
		}
		configs = append(configs, text)
	}
	return cmp.Or(strings.Join(configs, "; "), "-")
}

func utc(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// showBackends prints backends as a table, and below it by whom they were drained
// and since when they are silent or slow.
func showBackends(to io.Writer, answer []byte) error {
	var backends []Backend
	if err := decode(answer, &backends); err != nil {
		return err
	}
	table := newTable(to, "POOL", "NAME", "PRIORITY", "WEIGHT", "STATE", "CLASS", "MODEL", "REMAINING", "IN FLIGHT", "REQUESTS", "FAILURES")
	for _, b := range backends {
		remaining := ""
		if b.RemainingMs > 0 {
			remaining = (time.Duration(b.RemainingMs) * time.Millisecond).String()
		}
		state := b.stateText()
		if !b.Healthy {
			state += ", unhealthy"
		}
		model := printable(b.Model)
		if len(b.Benches) > 0 && b.Benches[0].Scope == ModelScope {
			model = cmp.Or(model, printable(b.Deployment), "(none named)")
		}
		table.row(printable(b.Pool), printable(b.Name), strconv.Itoa(b.Priority), strconv.Itoa(b.Weight), printable(state),
			cmp.Or(printable(b.Class), "-"), cmp.Or(model, "-"), cmp.Or(remaining, "-"),
			strconv.FormatInt(b.InFlight, 10), strconv.FormatInt(b.Requests, 10), strconv.FormatInt(b.Failures, 10))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	for _, b := range backends {
		if b.Drain != nil {
			fmt.Fprintf(to, "%s %s was drained%s\n", printable(b.Pool), printable(b.Name), drainOf(*b.Drain))
		}
		for _, line := range problemsOf(b) {
			fmt.Fprintln(to, line)
		}
		for _, u := range b.Untried {
			fmt.Fprintf(to, "%s %s was silent, and has not been tried since %s: %s\n", printable(b.Pool), printable(b.Name), utc(u.Since),
				cmp.Or(printable(u.Model), printable(u.Deployment), "(none named)"))
		}
		for _, s := range b.Silences {
			fmt.Fprintf(to, "%s %s is %s since %s: %s\n", printable(b.Pool), printable(b.Name), s.Class(), utc(s.Since),
				cmp.Or(printable(s.Model), printable(s.Deployment), "(none named)"))
		}
	}
	return nil
}

// problemsOf returns the reasons for which a backend is benched, each with what is next. A throttle is no problem.
func problemsOf(b Backend) (lines []string) {
	for _, bench := range b.Benches {
		its := verdict.RemedyOf(verdict.Class(bench.Class), bench.Cause)
		if its.Class == verdict.Throttled {
			continue
		}
		prefix := "meanwhile: "
		if bench.NeedsOperator {
			prefix = "needs action: "
		}
		line := fmt.Sprintf("%s %s %s. %s%s", printable(b.Pool), printable(b.Name), its.Meaning, prefix, its.Next)
		if !slices.Contains(lines, line) {
			lines = append(lines, line)
		}
	}
	return lines
}

// drainOf returns when a backend was drained, by whom and why, as far as that is known.
func drainOf(d Drain) (text string) {
	if d.Since != nil {
		text += " at " + utc(*d.Since)
	}
	if d.By != "" {
		text += " by " + printable(d.By)
	}
	if d.Reason != "" {
		text += ": " + printable(d.Reason)
	}
	return text
}

// table prints rows in columns.
type table struct{ *tabwriter.Writer }

func newTable(to io.Writer, header ...string) table {
	t := table{tabwriter.NewWriter(to, 0, 0, 2, ' ', 0)}
	t.row(header...)
	return t
}

func (t table) row(cells ...string) { fmt.Fprintln(t, strings.Join(cells, "\t")) }

// printable makes text safe for a terminal. Clients can make up models.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return unicode.ReplacementChar
	}, text)
}
