package tools

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/openai-lb/caddy-openai-lb/internal/cli"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
)

// maxCheckTimeout is the longest time limit of a request of a check.
const maxCheckTimeout = 5 * time.Second

// checkCommand returns the command check.
func checkCommand() *cobra.Command {
	var from checkedConfig
	var c checker
	var inJSON bool
	command := &cobra.Command{
		Use:   "check",
		Short: "Checks the backends of a configuration before it is live",
		Long: `
Sets up a configuration without starting it, and asks each backend of each
openai_lb for its models. This checks name resolution, connection, TLS, credential
and models, and shows the latency and what is left of the rate limit. No port is
opened, no replica hears of it, no cooldown starts, and no key is shown. Upstreams
of a plain reverse_proxy are not checked.

The status is 1 if the configuration is not valid, or if a backend cannot serve:
the host cannot be resolved or reached, TLS fails, there is no reply in time, the
credential is missing or refused, the budget is used up, the reply is a 5xx, or a
model that the options name is missing. Warnings do not change the status. There is
a warning for a throttle, a certificate that expires within 14 days, a model that the
provider shuts down within 60 days, a backend without a list of models, and a backend
whose list needs no credential, so that it does not prove that the key is valid.

Azure lists no deployments. So each deployment that the options name gets a request
without messages. It costs nothing, and shows whether the deployment is missing or
refuses the credential. With --spend, each model that the options name gets a request
for one token, at any kind of backend.

With --offline, nothing is sent, and a stand-in replaces each {env.X} and {file.X}
that is not set. This validates the structure and the options, for instance in CI.
Caddy itself replaces {$X}, which needs a value or a default.
`,
		Example: "  caddy openai-lb check --config /etc/caddy/Caddyfile\n  caddy openai-lb check --offline",
		Args:    cobra.NoArgs, SilenceUsage: true,
	}
	flags := command.Flags()
	flags.StringVarP(&from.file, "config", "c", "", "Configuration file (default: Caddyfile)")
	flags.StringVarP(&from.adapter, "adapter", "a", "", "Name of the config adapter to apply to it")
	flags.StringSliceVar(&from.envFiles, "envfile", nil, "Environment file(s) to load")
	flags.BoolVar(&from.offline, "offline", false, "Only validates the configuration, without secrets and variables")
	flags.BoolVar(&c.spend, "spend", false, "Asks each model that the options name for one token, which costs money")
	flags.BoolVar(&inJSON, "json", false, "Prints JSON instead of a table")
	flags.DurationVar(&c.timeout, "timeout", maxCheckTimeout, "Time limit of each request, 5s at most")
	command.RunE = func(command *cobra.Command, _ []string) error {
		switch {
		case c.timeout <= 0 || c.timeout > maxCheckTimeout:
			return fmt.Errorf("timeout '%s' is not a duration above 0 of %s at most", c.timeout, maxCheckTimeout)
		case from.offline && c.spend:
			return errors.New("offline and spend cannot be combined")
		}
		out := command.OutOrStdout()
		return from.provision(func(entries []*pools.Entry) error {
			none := errors.New("the configuration has no openai_lb")
			if name := command.Flag("pool"); name != nil && name.Changed {
				entries = slices.DeleteFunc(entries, func(e *pools.Entry) bool { return e.Name != name.Value.String() })
				none = fmt.Errorf("the configuration has no pool '%s'", name.Value)
			}
			if from.offline {
				_, err := fmt.Fprintln(out, "Valid configuration")
				return err
			}
			if len(entries) == 0 {
				return none
			}
			return reportChecks(out, c.check(command.Context(), entries), inJSON)
		})
	}
	return command
}

// reportChecks prints what a check found. It returns an error if a backend
// cannot serve.
func reportChecks(out io.Writer, all []*Checked, inJSON bool) error {
	if inJSON {
		encoder := json.NewEncoder(out)
		encoder.SetIndent("", "  ")
		if err := encoder.Encode(all); err != nil {
			return err
		}
	} else if err := showChecks(out, all, inColor(out)); err != nil {
		return err
	}
	if failed := slices.DeleteFunc(slices.Clone(all),
		func(c *Checked) bool { return c.Status != CheckFailed }); len(failed) > 0 {
		return fmt.Errorf("%d of %s cannot serve", len(failed), cli.Number(len(all), "backend"))
	}
	return nil
}

// inColor reports whether the output is a terminal whose user wants colors. See
// no-color.org.
func inColor(out io.Writer) bool {
	file, ok := out.(*os.File)
	if !ok || os.Getenv("NO_COLOR") != "" || os.Getenv("TERM") == "dumb" {
		return false
	}
	info, err := file.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// The colors are of one length, because a table aligns its columns by the
// length of their text.
var colors = map[CheckStatus]string{"STATUS": "\x1b[39m", CheckOK: "\x1b[32m", CheckWarning: "\x1b[33m", CheckFailed: "\x1b[31m"}

// showChecks prints a table of backends, and below it the problems.
func showChecks(out io.Writer, all []*Checked, inColor bool) error {
	paint := func(status CheckStatus) string {
		if !inColor {
			return string(status)
		}
		return colors[status] + string(status) + "\x1b[0m"
	}
	table := cli.NewTable(out, "POOL", "BACKEND", paint("STATUS"), "ADDRESS", "CERTIFICATE UNTIL", "CREDENTIAL",
		"MODELS", "LATENCY", "REMAINING")
	for _, c := range all {
		until := "-"
		if c.CertificateUntil != nil {
			until = c.CertificateUntil.UTC().Format(time.DateOnly)
		}
		table.Row(cli.Printable(c.Pool), cli.Printable(c.Backend), paint(c.Status), c.Address, until, c.Credential,
			modelsOf(c), latencyOf(c), remainingOf(c))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	for _, c := range all {
		for _, p := range c.Problems {
			fmt.Fprintf(out, "%s %s: %s: %s\n", cli.Printable(c.Pool), cli.Printable(c.Backend),
				paint(p.Status), p.Text)
		}
	}
	return nil
}

// modelsOf counts the models of a backend that the options name, or those that
// it lists.
func modelsOf(c *Checked) string {
	counts := make(map[string]int)
	for _, m := range c.Models {
		counts[m.State]++
	}
	var texts []string
	for _, state := range []string{served, found, refused, missing, unknown} {
		if n := counts[state]; n > 0 {
			texts = append(texts, strconv.Itoa(n)+" "+state)
		}
	}
	switch {
	case texts != nil:
		return strings.Join(texts, ", ")
	case c.Listed != nil:
		return strconv.Itoa(*c.Listed) + " listed"
	}
	return "-"
}

func latencyOf(c *Checked) string {
	if ms, ok := c.Milliseconds["reply"]; ok {
		return (time.Duration(ms) * time.Millisecond).String()
	}
	return "-"
}

func remainingOf(c *Checked) string {
	var texts []string
	for _, name := range []string{"requests", "tokens"} {
		if n, ok := c.Remaining[name]; ok {
			texts = append(texts, strconv.FormatInt(n, 10)+" "+name)
		}
	}
	return cmp.Or(strings.Join(texts, ", "), "-")
}
