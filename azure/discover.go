package azure

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"time"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"

	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/modules/tools"
)

func init() {
	tools.More = append(tools.More, discoverCommand)
}

// statusFailed is the exit status after an error. A timer can tell it from 1,
// which any other error of a command has, and which discover has only for
// differences.
const statusFailed = 2

// discovery holds the flags of the command.
type discovery struct {
	Credentials
	subscriptions []string
	group         string
	file          string
	endpoint      string
	timeout       time.Duration
	read          tools.ReadBackends
}

// discoverCommand returns the command discover.
func discoverCommand(read tools.ReadBackends) *cobra.Command {
	d := &discovery{read: read}
	command := &cobra.Command{
		Use:   "discover",
		Short: "Prints a Caddyfile for the deployments of an Azure subscription, or compares a Caddyfile with them",
		Example: "  caddy openai-lb discover --subscription <id> >Caddyfile\n" +
			"  caddy openai-lb discover --subscription <id> --check /etc/caddy/Caddyfile",
		Long: `
Asks Azure Resource Manager for the deployments of all Azure OpenAI and Foundry
resources in a subscription, or in one of its resource groups, and prints a
Caddyfile. Provisioned deployments (PTUs) are in priority 1, the others in priority 2
with weights by capacity. Each has its model, and a comment with its SKU, version,
limits and retirement date.

  caddy openai-lb discover --subscription <id> >Caddyfile

With --check, the command compares a Caddyfile with the deployments, and prints each
deployment without a backend, each backend without a deployment, and each model that
retires within 60 days. The status is 1 if it prints any, 0 if it prints none, and 2
after an error.

  caddy openai-lb discover --subscription <id> --check /etc/caddy/Caddyfile

The flags choose the identity. By default, the command uses the first identity that
works, of the environment and the Azure CLI. The role Cognitive Services OpenAI User of the subscription or the
resource group is enough. Nothing is changed at Azure, and no key is read or shown.
`,
		SilenceUsage: true,
		Args: func(command *cobra.Command, args []string) error {
			if err := cobra.NoArgs(command, args); err != nil {
				return failed(command, err)
			}
			return nil
		},
	}
	command.SetFlagErrorFunc(failed)
	flags := command.Flags()
	flags.StringSliceVar(&d.subscriptions, "subscription", nil, "ID(s) of subscriptions (default: $AZURE_SUBSCRIPTION_ID)")
	flags.StringVar(&d.group, "resource-group", "", "Only the resources of this resource group")
	flags.StringVar(&d.file, "check", "", "Compares this Caddyfile with the deployments")
	flags.StringVar(&d.endpoint, "arm-endpoint", "", "URL of Azure Resource Manager (default: that of the cloud)")
	flags.DurationVar(&d.timeout, "timeout", 5*time.Minute, "Time limit of the whole command")
	for _, o := range d.options() {
		flags.StringVar(o.value, strings.ReplaceAll(o.name, "_", "-"), "", "As the option "+o.name+" of azure_identity")
	}
	command.RunE = func(command *cobra.Command, _ []string) error {
		ctx, cancel := context.WithTimeout(cmp.Or(command.Context(), context.Background()), d.timeout)
		defer cancel()
		text, differs, err := d.run(ctx)
		if err == nil {
			_, err = fmt.Fprint(command.OutOrStdout(), text)
		}
		switch {
		case err != nil && errors.Is(context.Cause(ctx), context.DeadlineExceeded):
			return failed(command, fmt.Errorf("not done within %s: %w", d.timeout, err))
		case err != nil:
			return failed(command, err)
		case differs > 0:
			return fmt.Errorf("differences: %d", differs)
		}
		return nil
	}
	return command
}

// failed ends the command with the status of an error.
func failed(command *cobra.Command, err error) error {
	command.PrintErrln("Error:", err)
	command.SilenceErrors = true
	fails := func(caddycmd.Flags) (int, error) { return statusFailed, nil }
	return caddycmd.WrapCommandFuncForCobra(fails)(command, nil)
}

// run returns the output of the command, and the number of differences.
func (d *discovery) run(ctx context.Context) (text string, differs int, err error) {
	if err := d.checkFlags(); err != nil {
		return "", 0, err
	}
	var configured []tools.Configured
	if d.file != "" { // a mistake in it needs no request
		if configured, err = d.read(d.file); err != nil {
			return "", 0, err
		}
	}
	settings, endpoint, err := d.target()
	if err != nil {
		return "", 0, err
	}
	identity := newIdentity(settings)
	defer identity.client.CloseIdleConnections()
	token, err := d.signIn(ctx, identity)
	if err != nil {
		return "", 0, err
	}
	deadline, _ := ctx.Deadline()
	reader := newARM(endpoint, identity.client.Transport, token, deadline)
	var accounts []*account
	for _, subscription := range d.subscriptions {
		more, err := reader.discover(ctx, subscription, d.group)
		if err != nil {
			return "", 0, err
		}
		accounts = append(accounts, more...)
	}
	if d.file == "" {
		return site(d.from(), accounts, d.auth()), 0, nil
	}
	found, err := differences(configured, accounts, time.Now())
	if err != nil {
		return "", 0, err
	}
	if len(found) == 0 {
		return "No difference\n", 0, nil
	}
	return strings.Join(found, "\n") + "\n", len(found), nil
}

// checkFlags checks the flags, and sets the subscription if the environment has
// it.
func (d *discovery) checkFlags() error {
	if subscription := os.Getenv("AZURE_SUBSCRIPTION_ID"); len(d.subscriptions) == 0 && subscription != "" {
		d.subscriptions = []string{subscription}
	}
	switch {
	case len(d.subscriptions) == 0:
		return errors.New("subscription is required: expected --subscription <id>")
	case d.group != "" && len(d.subscriptions) > 1:
		return errors.New("resource-group requires exactly one subscription")
	case d.timeout <= 0:
		return fmt.Errorf("timeout '%s' is not a duration above 0", d.timeout)
	case d.ClientSecret != "" && !strings.Contains(d.ClientSecret, "{"):
		return errors.New("client-secret must be {env.X} or {file./path}: other users can see the arguments of a command")
	}
	return nil
}

// target returns the settings of the identity, and the URL of ARM.
func (d *discovery) target() (settings, *url.URL, error) {
	s, err := d.resolve()
	if err != nil {
		return s, nil, err
	}
	text := cmp.Or(d.endpoint, s.cloud().arm)
	endpoint, err := url.Parse(text)
	if err != nil || endpoint.Scheme != "https" || endpoint.Host == "" || strings.Trim(endpoint.Path, "/") != "" ||
		endpoint.RawQuery != "" || endpoint.User != nil {
		return s, nil, fmt.Errorf("arm-endpoint '%s': expected an https URL without a path, like %s",
			text, s.cloud().arm)
	}
	s.otherScope = ""
	if d.Scope == "" {
		s.scope = "https://" + endpoint.Host + "/.default"
	}
	return s, endpoint, nil
}

// signIn gets a token for ARM.
func (d *discovery) signIn(ctx context.Context, i *identity) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	received, err := i.token(ctx, "", false)
	if err != nil {
		return "", fmt.Errorf("could not get a token for %s: %w", i.scope, err)
	}
	return received.Token, nil
}

// from says of what a Caddyfile was made.
func (d *discovery) from() string {
	if d.group != "" {
		return "resource group " + d.group + " of subscription " + d.subscriptions[0]
	}
	return "subscription " + strings.Join(d.subscriptions, ", ")
}

// auth returns the lines of a backend about its credential. The balancer's
// identity is not that of the command: only the cloud is the same.
func (d *discovery) auth() []string {
	if d.Cloud == "" {
		return []string{"auth azure_identity"}
	}
	return []string{"auth azure_identity {", "\t" + directive.Line("cloud", d.Cloud), "}"}
}
