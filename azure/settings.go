package azure

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/url"
	"os"
	"slices"
	"strings"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore/cloud"
	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"
)

// The kinds of credentials.
const (
	kindDefault          = "default"
	kindManagedIdentity  = "managed_identity"
	kindWorkloadIdentity = "workload_identity"
	kindClientSecret     = "client_secret"
)

var kinds = []string{kindDefault, kindManagedIdentity, kindWorkloadIdentity, kindClientSecret}

// takes lists the options of each kind, in addition to credential.
var takes = map[string][]string{
	kindDefault:          {"tenant_id", "scope", "cloud", "authority_host"},
	kindManagedIdentity:  {"client_id", "object_id", "resource_id", "scope", "cloud"},
	kindWorkloadIdentity: {"tenant_id", "client_id", "token_file", "scope", "cloud", "authority_host"},
	kindClientSecret:     {"tenant_id", "client_id", "client_secret", "scope", "cloud", "authority_host"},
}

// clouds are the clouds of Azure. Their audiences are the same as in the SDKs
// of Azure OpenAI and of the other Cognitive Services, such as
// AzureOpenAIAudience and FormRecognizerAudience of the SDK for .NET.
var clouds = map[string]azureCloud{
	"public":     {cloud.AzurePublic, "https://cognitiveservices.azure.com/.default", "https://ai.azure.com/.default", "https://management.azure.com"},
	"government": {cloud.AzureGovernment, "https://cognitiveservices.azure.us/.default", "", "https://management.usgovcloudapi.net"},
	"china":      {cloud.AzureChina, "https://cognitiveservices.azure.cn/.default", "", "https://management.chinacloudapi.cn"},
}

type azureCloud struct {
	authority cloud.Configuration
	scope     string
	// other is the scope of Foundry, which resources of Azure OpenAI may
	// require, too. It is empty where none is documented.
	other string
	// arm is the URL of Azure Resource Manager.
	arm string
}

var cloudNames = []string{"public", "government", "china"}

// option is an option of the config by its name.
type option struct {
	name  string
	value *string
}

func (c *Credentials) options() []option {
	return []option{
		{"credential", &c.Kind},
		{"tenant_id", &c.TenantID},
		{"client_id", &c.ClientID},
		{"client_secret", &c.ClientSecret},
		{"object_id", &c.ObjectID},
		{"resource_id", &c.ResourceID},
		{"token_file", &c.TokenFile},
		{"scope", &c.Scope},
		{"cloud", &c.Cloud},
		{"authority_host", &c.AuthorityHost},
	}
}

// check returns an error if an option is wrong as it is written.
func (c *Credentials) check() error {
	if !slices.Contains(kinds, c.kind()) {
		return fmt.Errorf("credential '%s' is not one of %s", c.Kind, strings.Join(kinds, ", "))
	}
	if c.Cloud != "" && !slices.Contains(cloudNames, c.Cloud) {
		return fmt.Errorf("cloud '%s' is not one of %s", c.Cloud, strings.Join(cloudNames, ", "))
	}
	kind := c.kind()
	for _, o := range c.options()[1:] {
		given := *o.value != ""
		switch {
		case given && !slices.Contains(takes[kind], o.name):
			return fmt.Errorf("credential %s does not take %s: expected only %s%s",
				kind, o.name, strings.Join(takes[kind], ", "), instead(kind, o.name))
		case !given && kind == kindClientSecret && slices.Contains(takes[kind][:3], o.name):
			return fmt.Errorf("credential %s requires %s: it takes tenant_id, client_id and client_secret",
				kind, o.name)
		}
	}
	named := slices.DeleteFunc([]string{c.ClientID, c.ObjectID, c.ResourceID}, func(id string) bool { return id == "" })
	if kind == kindManagedIdentity && len(named) > 1 {
		return errors.New("client_id, object_id and resource_id each name a managed identity: expected one of them, or none for the system-assigned one")
	}
	if c.Cloud != "" && c.AuthorityHost != "" {
		return errors.New("cloud and authority_host both set where to sign in: expected one of them")
	}
	return c.checkWritten()
}

// instead names the option that probably does the job for which the wrong
// option was written.
func instead(kind, option string) string {
	switch {
	case kind != kindDefault:
		return ""
	case option == "client_secret":
		return " (or credential client_secret)"
	case option == "token_file":
		return " (or credential workload_identity)"
	case option == "object_id" || option == "resource_id":
		return " (or credential managed_identity)"
	default:
		return " (or the environment variable AZURE_CLIENT_ID, or another credential)"
	}
}

func (c *Credentials) kind() string { return cmp.Or(c.Kind, kindDefault) }

// settings are the options with their placeholders resolved and defaults set.
type settings struct {
	kind, tenant, client, object, resource, tokenFile, scope, authority string

	// otherScope is the one to try if the scope is refused. It is empty if the
	// operator chose the scope.
	otherScope string

	// secret is as written: a file is read anew for each token.
	secret string
}

// resolve checks the options and resolves their placeholders.
func (c *Credentials) resolve() (settings, error) {
	if err := c.check(); err != nil {
		return settings{}, err
	}
	s := settings{kind: c.kind(), secret: c.ClientSecret}
	for _, o := range []struct {
		name, raw string
		into      *string
	}{
		{"tenant_id", c.TenantID, &s.tenant},
		{"client_id", c.ClientID, &s.client},
		{"object_id", c.ObjectID, &s.object},
		{"resource_id", c.ResourceID, &s.resource},
		{"token_file", c.TokenFile, &s.tokenFile},
		{"scope", c.Scope, &s.scope},
		{"authority_host", c.AuthorityHost, &s.authority},
	} {
		if o.raw == "" {
			continue
		}
		resolved, err := caddy.NewReplacer().ReplaceOrErr(o.raw, true, true)
		if err != nil {
			return settings{}, fmt.Errorf("%s: %w", o.name, err)
		}
		if *o.into = strings.TrimSpace(resolved); *o.into == "" {
			return settings{}, fmt.Errorf("%s is empty", o.name)
		}
	}
	if err := checkAuthority(s.authority); err != nil {
		return settings{}, err
	}
	if c.Cloud != "" {
		s.authority = clouds[c.Cloud].authority.ActiveDirectoryAuthorityHost
	}
	audience, other := s.audiences()
	if s.scope == "" {
		s.scope, s.otherScope = audience, other
	}
	return s, checkScope(s.scope, audience)
}

// checkWritten checks the values that have no placeholder.
func (c *Credentials) checkWritten() error {
	if !strings.Contains(c.AuthorityHost, "{") {
		if err := checkAuthority(c.AuthorityHost); err != nil {
			return err
		}
	}
	if c.Scope == "" || strings.Contains(c.Scope, "{") {
		return nil
	}
	s := settings{authority: clouds[c.Cloud].authority.ActiveDirectoryAuthorityHost}
	audience, _ := s.audiences()
	return checkScope(strings.TrimSpace(c.Scope), audience)
}

func checkAuthority(host string) error {
	if host == "" {
		return nil
	}
	if u, err := url.Parse(strings.TrimSpace(host)); err != nil || u.Scheme != "https" || u.Host == "" || u.RawQuery != "" {
		return fmt.Errorf("authority_host '%s': expected an https URL, like %s",
			host, cloud.AzurePublic.ActiveDirectoryAuthorityHost)
	}
	return nil
}

// checkScope checks a scope. audience is one that would do.
func checkScope(scope, audience string) error {
	if strings.ContainsAny(scope, " \t\n") || !strings.HasSuffix(scope, "/.default") {
		return fmt.Errorf("scope '%s': expected one that ends with /.default, like %s", scope, audience)
	}
	return nil
}

// authorityHost is the host that tokens come from, where it is not the public
// cloud's.
func (s *settings) authorityHost() string {
	u, err := url.Parse(cmp.Or(s.authority, os.Getenv("AZURE_AUTHORITY_HOST"))) // as azidentity does
	if err != nil {
		return ""
	}
	return strings.ToLower(u.Hostname())
}

// audiences are the default scope, that of the cloud which the authority is of,
// and the cloud's other one.
func (s *settings) audiences() (scope, other string) { return s.cloud().scope, s.cloud().other }

// cloud returns the cloud that the authority is of, or the public one.
func (s *settings) cloud() azureCloud {
	for _, name := range cloudNames {
		if host := s.authorityHost(); host != "" &&
			strings.Contains(clouds[name].authority.ActiveDirectoryAuthorityHost, "//"+host+"/") {
			return clouds[name]
		}
	}
	return clouds[cloudNames[0]]
}

// identity identifies whom tokens are for, and contains no secret. Another
// secret makes another identity, for the one before may have been wrong.
func (s *settings) identity() string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%q", []string{
		s.kind, s.tenant, s.client, s.object, s.resource, s.tokenFile, s.scope, s.authority, s.secret,
	}))
	return hex.EncodeToString(sum[:16])
}

// key is that of the shared sources. An operator's scope does not have the
// other one, though the identity is the same.
func (s *settings) key() string { return s.identity() + " " + s.otherScope }

// logFields distinguish identities in logs, with the scope of the source that
// logs.
func (s *settings) logFields() []zap.Field {
	fields := []zap.Field{zap.String("credential", s.kind)}
	for _, f := range []struct{ name, value string }{
		{"tenant_id", s.tenant}, {"client_id", s.client}, {"object_id", s.object}, {"resource_id", s.resource},
	} {
		if f.value != "" {
			fields = append(fields, zap.String(f.name, f.value))
		}
	}
	return fields
}

// resolveSecret returns the client secret as it is now. Its errors hold nothing
// of it.
func (s *settings) resolveSecret() (string, error) {
	secret, err := caddy.NewReplacer().ReplaceOrErr(s.secret, true, true)
	if err != nil {
		return "", errors.New("client_secret: a placeholder in it is unknown or resolves to nothing")
	}
	if secret = strings.TrimSpace(secret); secret == "" {
		return "", errors.New("client_secret is empty")
	}
	return secret, nil
}

// privateAuthority reports whether tokens come from a host that is none of
// Microsoft's. Theirs know nothing of it, and may be out of reach.
func (s *settings) privateAuthority() bool {
	host := s.authorityHost()
	return host != "" && !slices.Contains(microsoftHosts, host)
}

// microsoftHosts are the authorities of MSAL's list of trusted hosts that are
// in use: with others, it asks login.microsoftonline.com about them.
var microsoftHosts = []string{
	"login.microsoftonline.com", "login.microsoft.com", "login.windows.net", "sts.windows.net",
	"login.microsoftonline.us", "login.usgovcloudapi.net", "login-us.microsoftonline.com",
	"login.partner.microsoftonline.cn", "login.chinacloudapi.cn",
	"login.sovcloud-identity.fr", "login.sovcloud-identity.de", "login.sovcloud-identity.sg",
}
