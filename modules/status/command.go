package status

import (
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
	"time"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"

	"github.com/openai-lb/caddy-openai-lb/internal/admin"
	"github.com/openai-lb/caddy-openai-lb/internal/cli"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

func init() { cli.Add(commands) }

// commands returns the subcommands that ask the admin API.
func commands() []*cobra.Command {
	drain := newCommand("drain <backend>", "Takes a backend out of use: it gets requests only when no other backend is left",
		call{method: http.MethodPost, path: backendsPath + "/%s/drain", show: showBackends, everywhere: drained})
	drain.Flags().Bool("wait", false, "Waits until the backend serves no request of any replica")
	resume := newCommand("resume <backend>", "Puts a drained backend back into use",
		call{method: http.MethodPost, path: backendsPath + "/%s/resume", show: showBackends, everywhere: resumed})
	reset := newCommand("reset <backend>", "Ends the cooldowns of a backend",
		call{method: http.MethodPost, path: backendsPath + "/%s/reset", show: showBackends})
	callers := newCommand("callers", "Shows what callers have used of their limits, the busiest first",
		call{method: http.MethodGet, path: callersPath, show: showCallers})
	resetCaller := newCommand("reset <caller>", "Resets the use of a caller at all replicas, so that its limits and estimates begin anew",
		call{method: http.MethodPost, path: callersPath + "/%s/reset", show: showCallers})
	callers.AddCommand(resetCaller)
	status := newCommand("status", "Shows all backends, and what is wrong",
		call{method: http.MethodGet, path: backendsPath, show: showBackends, problems: true})
	for _, command := range []*cobra.Command{status, callers} {
		command.Flags().String("replica", admin.EveryReplica, "Shows only what one replica knows: its host, or the beginning of its id")
	}
	for _, command := range []*cobra.Command{drain, resume, reset, resetCaller} {
		command.Flags().String("reason", "", "Why, for the log and for other operators")
		command.Flags().String("by", "", "Who gives the order, for the log and for other operators (default: user@host)")
	}
	replicas := newCommand("replicas", "Shows the replicas that share state, when each was last heard from, and whose configuration differs",
		call{method: http.MethodGet, path: replicasPath, show: showReplicas})
	version := newCommand("version", "Shows the version of this binary; with --address or --config, the version of the running Caddy",
		call{method: http.MethodGet, path: versionPath, show: showBuild})
	for command, example := range map[*cobra.Command]string{
		status: "status --pool openai_lb", callers: "callers --json", resetCaller: `callers reset alice --reason "a wrong report"`,
		replicas: "replicas", version: "version --address localhost:2019",
		drain: `drain ptu --reason "new deployment, back at noon" --wait`, resume: "resume ptu", reset: "reset ptu --pool openai_lb",
	} {
		command.Example = "  caddy openai-lb " + example
	}
	return []*cobra.Command{status, callers, replicas, drain, resume, reset, version}
}

// operator returns the user and the host of this process, in the form that the
// admin API accepts.
func operator() string {
	name := os.Getenv("SUDO_USER")
	if u, err := user.Current(); name == "" && err == nil {
		name = u.Username
	}
	name = cmp.Or(name, strconv.Itoa(os.Getuid())) // not each user has a name
	if host, err := os.Hostname(); err == nil {
		name += "@" + host
	}
	return pool.CutText(cli.Printable(name), pool.MaxBy)
}

// call is a command's request to the admin API, and the function that shows the
// answer. The path has %s for the command's argument.
type call struct {
	method, path string
	show         func(io.Writer, []byte) error
	// problems reports whether the command also shows the problems of pools.
	problems bool
	// everywhere is the state that the command wants for a backend at all
	// replicas. It is nil for commands that want none.
	everywhere *wanted
}

// newCommand returns a command that calls the admin API. Cobra prints its
// errors as plain text, while Caddy's wrapper of commands would log them as
// JSON.
func newCommand(use, short string, c call) *cobra.Command {
	args := cobra.PositionalArgs(cobra.NoArgs)
	if strings.Contains(c.path, "%s") {
		args = cobra.ExactArgs(1)
	}
	run := func(command *cobra.Command, args []string) error {
		to := c
		if len(args) > 0 {
			to.path = fmt.Sprintf(c.path, openaiapi.EscapeSegment(args[0]))
		}
		return to.run(command, caddycmd.Flags{FlagSet: command.Flags()}, args)
	}
	return &cobra.Command{Use: use, Short: short, Args: args, SilenceUsage: true, RunE: run}
}

// run sends the request to the admin API, and prints the answer.
func (c call) run(command *cobra.Command, flags caddycmd.Flags, args []string) error {
	if command.Name() == "version" && !flags.Changed("address") && !flags.Changed("config") {
		answer, err := json.Marshal(thisBuild())
		if err != nil {
			return err
		}
		return showing(c.show, flags)(command.OutOrStdout(), answer)
	}
	address, err := admin.Address(flags)
	if err != nil {
		return err
	}
	query := make(url.Values)
	if flags.Changed("pool") {
		query.Set("pool", flags.String("pool"))
	}
	hasReplica := flags.Lookup("replica") != nil
	order := maps.Clone(query)
	if flags.Lookup("by") != nil {
		order.Set("by", cmp.Or(flags.String("by"), operator()))
		order.Set("reason", flags.String("reason"))
	}
	if hasReplica {
		order.Set("replica", flags.String("replica"))
	}
	answer, err := admin.Ask(address, c.method, c.path, order)
	if err == nil && hasReplica {
		show, failed := c.show, error(nil)
		if c.problems && !flags.Bool("json") && flags.String("replica") == admin.EveryReplica {
			var problems []byte
			if problems, failed = admin.Ask(address, http.MethodGet, problemsPath, query); failed == nil {
				show = func(to io.Writer, answer []byte) error { return showStatus(to, answer, problems) }
			}
		}
		return errors.Join(admin.ShowAll(command, showing(show, flags), flags.Bool("json"), answer), failed)
	}
	if err == nil && c.everywhere != nil {
		return c.followOrder(command, flags, address, args[0], query)
	}
	if err != nil {
		return err
	}
	return showing(c.show, flags)(command.OutOrStdout(), answer)
}

// showing returns show, or admin.ShowJSON if the flag --json is set.
func showing(show func(io.Writer, []byte) error, flags caddycmd.Flags) func(io.Writer, []byte) error {
	if flags.Bool("json") {
		return admin.ShowJSON
	}
	return show
}

// showBuild prints versions on one line.
func showBuild(to io.Writer, answer []byte) error {
	var b Build
	if err := admin.Decode(answer, &b); err != nil {
		return err
	}
	commit := ""
	if b.Commit != "" {
		commit = fmt.Sprintf(" (commit %s)", cli.Printable(b.Commit))
	}
	_, err := fmt.Fprintf(to, "openai_lb %s%s, Caddy %s\n",
		cli.Printable(b.Version), commit, cli.Printable(b.CaddyVersion))
	return err
}

// showReplicas prints replicas as a table. Below it, it prints which of several
// servers is near, and how many messages wait while the store cannot be
// reached.
func showReplicas(to io.Writer, answer []byte) error {
	var statuses []seam.EngineStatus
	if err := admin.Decode(answer, &statuses); err != nil {
		return err
	}
	table := cli.NewTable(to, "HOST", "ID", "SINCE", "HEARD", "CONFIGURATION")
	for _, s := range statuses {
		for _, p := range s.Peers {
			table.Row(cli.Printable(p.Host), p.ID, cli.UTC(p.Since), cli.UTC(p.Heard), configsOf(p))
		}
	}
	if err := table.Flush(); err != nil {
		return err
	}
	for _, s := range statuses {
		if s.Near != "" {
			fmt.Fprintf(to, "near: %s\n", cli.Printable(s.Near))
		}
		if !s.InTouch {
			fmt.Fprintf(to, "not connected: %s to be sent\n", cli.Number(s.Queue, "message"))
		}
	}
	return nil
}

// configsOf returns the digests of a replica's configs.
func configsOf(p seam.Peer) string {
	var configs []string
	for _, c := range p.Configs {
		text := cli.Printable(c.Pool) + " " + c.Digest
		if c.DiffersSince != nil {
			text += ", differs since " + cli.UTC(*c.DiffersSince)
		}
		configs = append(configs, text)
	}
	return cmp.Or(strings.Join(configs, "; "), "-")
}

// showBackends prints backends, and their problems.
func showBackends(to io.Writer, answer []byte) error { return showStatus(to, answer, []byte("[]")) }

// showStatus prints what needs action, of the backends and of these problems of
// pools. Below it, it prints the backends as a table, and then the other
// problems, who drained backends, and since when they are silent or slow.
func showStatus(to io.Writer, answer, problems []byte) error {
	var backends []Backend
	var ofPools []PoolProblem
	if err := errors.Join(admin.Decode(answer, &backends), admin.Decode(problems, &ofPools)); err != nil {
		return err
	}
	var lines problemLines
	for _, p := range ofPools {
		if p.Backend == "" {
			lines.add(lineOf(p.Pool, p.about(), p.Problem), p.NeedsOperator)
		}
	}
	for _, b := range backends {
		lines.addBackend(b)
	}
	for _, line := range lines.acute {
		fmt.Fprintln(to, line)
	}
	if len(lines.acute) > 0 {
		fmt.Fprintln(to)
	}
	if err := showTable(to, backends); err != nil {
		return err
	}
	for _, line := range lines.others {
		fmt.Fprintln(to, line)
	}
	return nil
}

// showTable prints backends as a table.
func showTable(to io.Writer, backends []Backend) error {
	table := cli.NewTable(to, "POOL", "NAME", "PRIORITY", "WEIGHT", "STATE", "CLASS", "MODEL", "REMAINING", "IN FLIGHT",
		"REQUESTS", "FAILURES")
	for _, b := range backends {
		remaining := ""
		if b.RemainingMs > 0 {
			remaining = (time.Duration(b.RemainingMs) * time.Millisecond).String()
		}
		state := b.stateText()
		if !b.Healthy {
			state += ", unhealthy"
		}
		model := cli.Printable(b.Model)
		if len(b.Cooldowns) > 0 && b.Cooldowns[0].Scope == ModelScope {
			model = cmp.Or(model, cli.Printable(b.Deployment), "(none named)")
		}
		table.Row(cli.Printable(b.Pool), cli.Printable(b.Name), strconv.Itoa(b.Priority), b.WeightText(),
			cli.Printable(state),
			cmp.Or(cli.Printable(b.Class), "-"), cmp.Or(model, "-"), cmp.Or(remaining, "-"),
			strconv.FormatInt(b.InFlight, 10), strconv.FormatInt(b.Requests, 10), strconv.FormatInt(b.Failures, 10))
	}
	return table.Flush()
}

// problemLines are lines about problems, without duplicates: those that need
// action, and others.
type problemLines struct{ acute, others []string }

func (l *problemLines) add(line string, needsOperator bool) {
	to := &l.others
	if needsOperator {
		to = &l.acute
	}
	if !slices.Contains(*to, line) {
		*to = append(*to, line)
	}
}

// addBackend adds the problems of a backend, each with what happens or must be
// done next, and who drained it. The problems may be from several replicas.
func (l *problemLines) addBackend(b Backend) {
	var problems problemList
	problems.addBackend(b)
	backend := cli.Printable(b.Pool) + " " + cli.Printable(b.Name)
	if b.Drain != nil {
		l.add(backend+" was drained"+drainOf(*b.Drain), false)
	}
	for _, p := range problems {
		l.add(lineOf(b.Pool, b.Name, p), p.NeedsOperator)
	}
	silences, untried := b.Current()
	for _, u := range untried {
		l.add(fmt.Sprintf("%s was silent, and has not been tried since %s: %s",
			backend, cli.UTC(u.Since), modelText(u.Model, u.Deployment)), false)
	}
	for _, s := range silences {
		l.add(fmt.Sprintf("%s is %s since %s: %s", backend, s.Class(), cli.UTC(s.Since),
			modelText(s.Model, s.Deployment)), false)
	}
}

// modelText returns the name of a model, or else of its deployment.
func modelText(model, deployment string) string {
	return cmp.Or(cli.Printable(model), cli.Printable(deployment), "(none named)")
}

// lineOf returns a problem as a line. about is the backend or the models that
// it is about.
func lineOf(pool, about string, p Problem) string {
	prefix := "meanwhile: "
	if p.NeedsOperator {
		prefix = "needs action: "
	}
	if about != "" {
		about = cli.Printable(about) + " "
	}
	return fmt.Sprintf("%s %s%s. %s%s", cli.Printable(pool), about, cli.Printable(p.Meaning), prefix,
		cli.Printable(p.Next))
}

// drainOf returns when a backend was drained, by whom and why, as far as known.
func drainOf(d Drain) (text string) {
	if d.Since != nil {
		text += " at " + cli.UTC(*d.Since)
	}
	if d.By != "" {
		text += " by " + cli.Printable(d.By)
	}
	if d.Reason != "" {
		text += ": " + cli.Printable(d.Reason)
	}
	return text
}
