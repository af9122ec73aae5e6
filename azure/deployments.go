package azure

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// account is an Azure OpenAI or Foundry resource, as ARM describes it.
type account struct {
	ID, Name, Kind, Location string
	Properties               struct {
		Endpoint            string
		Endpoints           map[string]string
		CustomSubDomainName string
	}
	deployments []*deployment
}

// deployment is a deployment of an account, as ARM describes it.
type deployment struct {
	Name string
	SKU  struct {
		Name     string
		Capacity int
	}
	Properties struct {
		Model             modelVersion
		ProvisioningState string
		RateLimits        []rateLimit
	}
	account *account
	// retires is when the model is no longer served. It is zero if no date is
	// known.
	retires time.Time
}

type modelVersion struct{ Format, Name, Version string }

// rateLimit is a limit: so many requests or tokens in so many seconds.
type rateLimit struct {
	Key           string
	Count         float64
	RenewalPeriod float64
}

// offered is a model that an account could deploy.
type offered struct {
	modelVersion
	Deprecation struct{ Inference string }
	SKUs        []struct{ Name, DeprecationDate string }
}

// kinds of accounts that have deployments.
var accountKinds = []string{"OpenAI", "AIServices"}

// accountID matches the id of an account. Its parts are written into paths.
var accountID = regexp.MustCompile(`(?i)^/subscriptions/([^/?#]+)/resourceGroups/([^/?#]+)/providers/Microsoft\.CognitiveServices/accounts/([^/?#]+)$`)

// discover reads the accounts of a subscription, or of one of its resource
// groups, with their deployments.
func (a *arm) discover(ctx context.Context, subscription, group string) ([]*account, error) {
	path := "/subscriptions/" + url.PathEscape(subscription)
	if group != "" {
		path += "/resourceGroups/" + url.PathEscape(group)
	}
	accounts, err := list[*account](ctx, a, path+"/providers/Microsoft.CognitiveServices/accounts")
	if err != nil {
		return nil, err
	}
	accounts = slices.DeleteFunc(accounts,
		func(a *account) bool { return a == nil || !slices.Contains(accountKinds, a.Kind) })
	slices.SortFunc(accounts,
		func(a, b *account) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID)) })
	for _, account := range accounts {
		if err := a.readDeployments(ctx, account); err != nil {
			return nil, err
		}
	}
	return accounts, nil
}

// readDeployments reads the deployments of an account, and when their models
// retire.
func (a *arm) readDeployments(ctx context.Context, account *account) error {
	parts := accountID.FindStringSubmatch(account.ID)
	if parts == nil {
		return fmt.Errorf("the account %s has an id that is not one: %s",
			printable(account.Name), printable(account.ID))
	}
	path := "/subscriptions/" + url.PathEscape(parts[1]) + "/resourceGroups/" + url.PathEscape(parts[2]) +
		"/providers/Microsoft.CognitiveServices/accounts/" + url.PathEscape(parts[3])
	all, err := list[*deployment](ctx, a, path+"/deployments")
	if err != nil {
		return err
	}
	account.deployments = slices.DeleteFunc(all, func(d *deployment) bool { return d == nil })
	if len(account.deployments) == 0 {
		return nil
	}
	models, err := list[offered](ctx, a, path+"/models")
	if err != nil {
		return err
	}
	slices.SortStableFunc(account.deployments, func(a, b *deployment) int { return cmp.Compare(a.Name, b.Name) })
	for _, d := range account.deployments {
		d.account = account
		for _, m := range models {
			if m.modelVersion == d.Properties.Model {
				d.retires = m.retires(d.SKU.Name)
			}
		}
	}
	return nil
}

// retires returns when a model retires for deployments of a SKU. That may be
// another day than for those of others.
func (m *offered) retires(sku string) time.Time {
	date := m.Deprecation.Inference
	for _, s := range m.SKUs {
		if strings.EqualFold(s.Name, sku) {
			date = cmp.Or(s.DeprecationDate, date)
		}
	}
	for _, layout := range []string{time.RFC3339, "2006-01-02T15:04:05", time.DateOnly} {
		if at, err := time.Parse(layout, date); err == nil {
			return at.UTC()
		}
	}
	return time.Time{}
}

// host returns the host of the account's API for a backend: that of Azure
// OpenAI if it has several. It is empty if the account has only a regional one,
// which accepts no tokens.
func (a *account) host() string {
	hosts := a.hosts()
	for _, host := range hosts {
		if strings.Contains(host, ".openai.azure.") {
			return host
		}
	}
	if a.Properties.CustomSubDomainName == "" || len(hosts) == 0 {
		return ""
	}
	return hosts[0]
}

// regional matches the hosts that all accounts of a region share.
var regional = regexp.MustCompile(`\.(api|tts|stt)\.|\.api\.cognitive\.`)

// hosts returns the hosts of the account, first that of its endpoint.
func (a *account) hosts() (hosts []string) {
	endpoints := []string{a.Properties.Endpoint}
	for _, name := range slices.Sorted(maps.Keys(a.Properties.Endpoints)) {
		endpoints = append(endpoints, a.Properties.Endpoints[name])
	}
	for _, endpoint := range endpoints {
		u, err := url.Parse(endpoint)
		if err != nil || u.Scheme != "https" || u.Host == "" || regional.MatchString(u.Host) {
			continue
		}
		if host := strings.ToLower(strings.TrimSuffix(u.Host, ":443")); !slices.Contains(hosts, host) {
			hosts = append(hosts, host)
		}
	}
	return hosts
}

// has reports whether a backend with this host is of the account. Accounts with
// a subdomain have it in several domains.
func (a *account) has(host string) bool {
	host = strings.ToLower(host)
	first, _, _ := strings.Cut(host, ".")
	return slices.Contains(a.hosts(), host) ||
		first == strings.ToLower(a.Properties.CustomSubDomainName) && openaiapi.IsAzure(host)
}

// provisioned reports whether the deployment has reserved throughput (PTUs).
func (d *deployment) provisioned() bool { return strings.HasSuffix(d.SKU.Name, "ProvisionedManaged") }

// unusable returns why the deployment cannot serve requests of a balancer, if
// it cannot.
func (d *deployment) unusable() string {
	switch state := d.Properties.ProvisioningState; {
	case strings.HasSuffix(d.SKU.Name, "Batch"):
		return "it serves batches only"
	case state != "" && state != "Succeeded":
		return "its state is " + state
	case d.Properties.Model.Name == "":
		return "it has no model"
	}
	return ""
}

// String names the deployment for people.
func (d *deployment) String() string {
	m := d.Properties.Model
	return printable(fmt.Sprintf("%s/%s (%s)", d.account.Name, d.Name, strings.Join(slices.DeleteFunc(
		[]string{m.Name + " " + m.Version, d.SKU.Name}, func(s string) bool { return strings.TrimSpace(s) == "" }), ", ")))
}

// printable makes a text of Azure's safe for a terminal.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return unicode.ReplacementChar
	}, text)
}
