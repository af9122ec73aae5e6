package backend

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"
	"golang.org/x/net/http/httpguts"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// Provision checks the backends, resolves their placeholders and names those
// without a name.
func Provision(ctx caddy.Context, backends []*Backend) error {
	if len(backends) == 0 {
		return errors.New("no backend: expected at least one `backend <url>`")
	}
	names := make(map[string]bool)
	for i, b := range backends {
		if b == nil {
			return fmt.Errorf("backend %d is null", i+1)
		}
		if err := b.provision(ctx); err != nil {
			return fmt.Errorf("%s: %w", b.label(i), err)
		}
		if b.Name != "" && names[b.Name] {
			return fmt.Errorf("%s: %w", b.label(i), errTakenName)
		}
		names[b.Name] = true
	}
	for i, name := range NamesOf(backends) {
		backends[i].Name = name
	}
	return checkQuotas(backends)
}

// checkQuotas returns an error if two backends with the same URL and credential
// have different quotas.
func checkQuotas(backends []*Backend) error {
	first := make(map[string]*Backend)
	for i, b := range backends {
		other := first[b.HealthKey]
		if other == nil {
			first[b.HealthKey] = b
		} else if !slices.Equal(other.Quotas, b.Quotas) {
			return fmt.Errorf("%s: requests and tokens are not the same as those of '%s', which has the same URL and credential: expected the same in both",
				b.label(i), other.Name)
		}
	}
	return nil
}

// NamesOf returns the names of the backends as far as they are known before
// load. Unknown names are empty.
func NamesOf(backends []*Backend) []string {
	names, known := make([]string, len(backends)), true
	for i, b := range backends {
		names[i] = b.Name
		known = known && !hasPlaceholder(b.Name) && (b.Name != "" || b.Origin != nil)
	}
	for i, b := range backends {
		if hasPlaceholder(b.Name) {
			names[i] = ""
		}
		for n := 1; known && names[i] == ""; n++ {
			name := b.Origin.Host
			if n > 1 {
				name += "-" + strconv.Itoa(n)
			}
			if !slices.Contains(names, name) {
				names[i] = name
			}
		}
	}
	return names
}

// errTakenName means that two backends have the same name.
var errTakenName = errors.New("another backend has this name")

// label returns the name for errors of the backend, which is the ith of the
// config. It contains no part of an invalid URL, because that may contain a
// password.
func (b *Backend) label(i int) string {
	switch {
	case b.Name != "":
		return fmt.Sprintf("backend %d %q", i+1, b.Name)
	case b.Origin != nil:
		return fmt.Sprintf("backend %d (%s)", i+1, b.Origin.Host)
	}
	return fmt.Sprintf("backend %d", i+1)
}

// provision checks the config of the backend and resolves its placeholders. Its
// errors contain no secret.
func (b *Backend) provision(ctx caddy.Context) error {
	repl := caddy.NewReplacer()
	rawURL, err := repl.ReplaceOrErr(b.URL, true, true)
	if err != nil {
		return fmt.Errorf("url: %w", err)
	}
	if b.Origin, err = openaiapi.ParseBaseURL(rawURL); err != nil {
		return err
	}
	for _, field := range []struct {
		name  string
		value *string
	}{{"name", &b.Name}, {"deployment", &b.Deployment}, {"account", &b.Account}} {
		if *field.value, err = repl.ReplaceOrErr(*field.value, true, true); err != nil {
			return fmt.Errorf("%s: %w", field.name, err)
		}
	}
	base := strings.TrimRight(b.Origin.EscapedPath(), "/")
	b.Origin = &url.URL{Scheme: b.Origin.Scheme, Host: b.Origin.Host}
	auth := b.authConfig()
	if err := b.Credentials.Provision(ctx, auth); err != nil {
		return err
	}
	b.Azure = auth.Azure || b.Credentials.Scheme == keys.SchemeAPIKey ||
		b.Credentials.Scheme == keys.SchemeAzureIdentity
	b.Provider = openaiapi.IsProvider(b.Origin.Hostname())
	b.paths = openaiapi.PathsAt(base, b.Azure)
	if err := b.provisionModels(); err != nil {
		return err
	}
	b.Priority = cmp.Or(b.Priority, 1)
	if b.followsLimits = b.Weight == nil; b.followsLimits {
		b.Weight = new(1)
	}
	if b.MaxRequests < 0 { // in JSON
		return fmt.Errorf("max_requests '%d' is not a whole number of 1 or more", b.MaxRequests)
	}
	if b.Quotas, err = b.parseQuotas(); err != nil {
		return err
	}
	if err := CheckRank(b.Priority, *b.Weight); err != nil {
		return err
	}
	if err := b.checkHealthOptions(); err != nil {
		return err
	}
	if b.HealthURI != "" {
		b.HealthInterval, b.HealthStatus = cmp.Or(b.HealthInterval, defaultHealthInterval),
			cmp.Or(b.HealthStatus, defaultHealthStatus)
	}
	b.header = make(http.Header, len(b.Header))
	for name, values := range b.Header {
		for _, value := range values {
			if value, err = repl.ReplaceOrErr(value, true, true); err != nil {
				return fmt.Errorf("header %s: %w", name, err)
			}
			if err := checkHeader(name, value); err != nil {
				return err
			}
			b.header.Add(name, value)
			if keys.MayHoldKey(name) {
				b.Credentials.InHeaders = append(b.Credentials.InHeaders, value)
			}
		}
	}
	for name, values := range b.Header {
		if len(values) > 0 {
			continue
		}
		if err := CheckRemoved(name); err != nil {
			return err
		}
		if b.header.Values(name) != nil {
			return errSetAndRemoved(name) // in JSON, in two spellings
		}
		b.header[http.CanonicalHeaderKey(name)] = nil
	}
	b.host = b.header.Get("Host")
	identity := ""
	if b.Credentials.Source != nil {
		identity = b.Credentials.Source.Identity()
		if b.Origin.Scheme == "http" && (auth.Azure || auth.OpenAI) {
			ctx.Logger().Warn("the backend's key is sent without encryption: use https",
				zap.String("url", b.Origin.String()))
		}
	}
	fingerprint := b.Credentials.Fingerprint(identity, b.header)
	b.base = b.Origin.String() + base
	if err := b.provisionTier(); err != nil {
		return err
	}
	b.HealthKey = b.base + " " + fingerprint
	b.AccountKey = openaiapi.AccountOf(b.Account, b.Origin, fingerprint)
	return nil
}

// provisionTier sets how the service tier is sent to the backend. The tier may
// also be configured as Azure's header.
func (b *Backend) provisionTier() error {
	inHeader := b.header.Get(openaiapi.TierHeader)
	b.tierInHeader = b.Azure || inHeader != ""
	switch {
	case inHeader == "":
		return checkTier(b.ServiceTier)
	case b.ServiceTier != "":
		return fmt.Errorf("service_tier and header %s exclude each other", openaiapi.TierHeader)
	}
	b.ServiceTier = inHeader
	return nil
}

func checkTier(tier string) error {
	if tier != "" && !openaiapi.IsServiceTier(tier) {
		return fmt.Errorf("service_tier '%s' is not one of %s", tier, openaiapi.ServiceTierNames())
	}
	return nil
}

func (b *Backend) authConfig() keys.AuthConfig {
	host := b.Origin.Hostname()
	return keys.AuthConfig{
		Scheme: b.Auth, APIKey: b.APIKey, Options: b.AuthOptions, Header: b.Header,
		Azure: openaiapi.IsAzure(host), OpenAI: openaiapi.IsOpenAI(host),
	}
}

func checkHeader(name, value string) error {
	if !httpguts.ValidHeaderFieldName(name) {
		return fmt.Errorf("header name %q is not valid", name)
	}
	if !httpguts.ValidHeaderFieldValue(value) {
		return fmt.Errorf("header %s: the value must not contain control characters", name)
	}
	return nil
}

// CheckRemoved returns an error if the header of this name must not be removed
// from requests to a backend.
func CheckRemoved(name string) error {
	switch {
	case !httpguts.ValidHeaderFieldName(name), strings.Contains(name, "*"):
		return fmt.Errorf("header -%s: expected - and the name of one header", name)
	case strings.EqualFold(name, "Host"):
		return errors.New("header -Host is not allowed: every request has a host")
	case strings.EqualFold(name, openaiapi.TierHeader):
		return fmt.Errorf("header -%s is not allowed: use service_tier", name)
	case keys.MayHoldKey(name):
		return fmt.Errorf("header -%s is not allowed: auth says which key the backend gets", name)
	}
	return nil
}

func errSetAndRemoved(name string) error {
	return fmt.Errorf("header %s is both set and removed", name)
}

func (b *Backend) provisionModels() error {
	repl := caddy.NewReplacer()
	for _, m := range b.Model {
		for _, name := range []*string{&m.Name, &m.Deployment} {
			var err error
			if *name, err = repl.ReplaceOrErr(*name, true, true); err != nil {
				return fmt.Errorf("model: %w", err)
			}
		}
		if m.Name == "" {
			return errors.New("model requires a name")
		}
		if err := m.check(); err != nil {
			return err
		}
		if _, ok := b.Models[m.Name]; ok {
			return fmt.Errorf("model '%s' is given twice", m.Name)
		}
		if b.Models == nil {
			b.Models = make(map[string]string)
		}
		b.Models[m.Name] = cmp.Or(m.Deployment, b.Deployment, m.Name)
	}
	return nil
}

func (m Model) check() error {
	if strings.Contains(m.Name, "*") {
		return fmt.Errorf("model '%s' must not contain *: leave out model to serve any model", m.Name)
	}
	for _, name := range []string{m.Name, m.Deployment} {
		if strings.Contains(name, ",") {
			return fmt.Errorf("model '%s' must not contain a comma: expected one model of each line", name)
		}
	}
	return nil
}

// MaxWeight is the maximum weight. It keeps the sum of all weights far from an
// overflow.
const MaxWeight = 1_000_000

// CheckRank returns an error if a priority or a weight is out of range.
func CheckRank(priority, weight int) error {
	if priority < 1 {
		return fmt.Errorf("priority '%d' is not a whole number of 1 or more", priority)
	}
	if weight < 0 || weight > MaxWeight {
		return fmt.Errorf("weight '%d' is not a whole number from 0 to %d", weight, MaxWeight)
	}
	return nil
}
