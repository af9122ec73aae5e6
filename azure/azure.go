// Package azure authenticates openai_lb to Azure OpenAI with Entra ID, the
// former Azure Active Directory: with a managed identity, a workload identity
// of Kubernetes, a client secret, or the account of the Azure CLI.
//
// Microsoft's SDK gets the tokens. This package decides when. A token is used
// by all backends with the same options (TestTheSameOptionsShareASource). It is
// replaced in the background some minutes before it expires, so that no request
// waits while there is a valid token (TestNobodyWaitsWhileATokenIsValid). Only
// the first requests after a start, and requests while Entra fails for longer
// than a token lives, wait for a few seconds. Then they fail over to backends
// with other credentials (TestADeadTokenEndpointCoolsOnlyItsBackendDown).
//
// A backend may refuse a token, because a role was removed, or because it
// expects another audience. Then the token is renewed once for all requests,
// and the request is sent to the same backend again
// (TestARefusedTokenIsRenewedOnceAndTriedAtTheSameBackend,
// TestATokenThatIsRefusedForItsAudienceIsReplacedByOneOfTheOtherScope).
// Requests at a high rate never become requests for tokens at a high rate
// (TestABackendThatRefusesAllTokensDoesNotHammerTheEndpoint).
//
// No error and no log line contains a token or a secret
// (TestErrorsSayWhatMattersAndNoSecret).
//
// The package also adds `caddy openai-lb discover`, which writes a Caddyfile of
// the deployments in a subscription
// (TestDiscoverPrintsACaddyfileOfTheDeployments).
package azure

import (
	"context"
	"fmt"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	openailb "github.com/openai-lb/caddy-openai-lb"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
)

func init() {
	caddy.RegisterModule(new(Credentials))
}

// Credentials authenticates requests with access tokens of an identity in Entra
// ID. A token is renewed before it expires, or when a backend refuses it,
// without stopping requests. All backends with the same options share one
// token, which survives reloads of the config.
//
// The values may contain placeholders, such as {env.NAME} and {file./path}.
type Credentials struct {
	// Kind is the kind of the identity: `managed_identity`, which Azure gives
	// to a virtual machine, an app or a container; `workload_identity`, a
	// service account of Kubernetes; `client_secret`, a password of an app
	// registration; or `default`, the first of these and the Azure CLI's that
	// is set up in the environment and works. Default: `default`.
	Kind string `json:"credential,omitempty"`

	// TenantID is the directory that the identity is in. Default: the value
	// of AZURE_TENANT_ID, but none for `client_secret`.
	TenantID string `json:"tenant_id,omitempty"`

	// ClientID is the application (client) ID of the identity. With
	// `managed_identity` it chooses a user-assigned one. Default: the value of
	// AZURE_CLIENT_ID for `workload_identity`, the system-assigned identity
	// for `managed_identity`, none for `client_secret`.
	ClientID string `json:"client_id,omitempty"`

	// ClientSecret is the secret of a `client_secret`. A {file./path} is
	// reloaded for each token. Default: none.
	ClientSecret string `json:"client_secret,omitempty"`

	// ObjectID chooses a user-assigned managed identity by its object
	// (principal) ID. Default: none.
	ObjectID string `json:"object_id,omitempty"`

	// ResourceID chooses a user-assigned managed identity by its resource ID.
	// Default: none.
	ResourceID string `json:"resource_id,omitempty"`

	// TokenFile is the file with the token of the Kubernetes service account.
	// It is reloaded for each token. Default: the value of
	// AZURE_FEDERATED_TOKEN_FILE.
	TokenFile string `json:"token_file,omitempty"`

	// Scope is the scope of the tokens. Default: the scope of Azure OpenAI in
	// the cloud, which is `https://cognitiveservices.azure.com/.default` in the
	// public cloud, or `https://ai.azure.com/.default` if a backend refuses the
	// audience of that one.
	Scope string `json:"scope,omitempty"`

	// Cloud is the cloud of the identity: `public`, `government` or `china`.
	// Default: the cloud of AZURE_AUTHORITY_HOST, else `public`.
	Cloud string `json:"cloud,omitempty"`

	// AuthorityHost is the URL of Entra ID in any other cloud. Default: the
	// cloud's URL of Entra ID.
	AuthorityHost string `json:"authority_host,omitempty"`

	settings settings
	logger   *zap.Logger
	shared   *shared
	choice   *choice
}

// CaddyModule returns the Caddy module information.
func (*Credentials) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.openai_lb.credentials.azure_identity",
		New: func() caddy.Module { return new(Credentials) },
	}
}

// sources are the sources of tokens of all loaded configs.
var sources = caddy.NewUsagePool()

// Provision sets up the credentials. It requests no token yet.
func (c *Credentials) Provision(ctx caddy.Context) error {
	var err error
	if c.settings, err = c.resolve(); err != nil {
		return err
	}
	if _, _, err := newIdentity(c.settings).newCredential(); err != nil { // complains about what is missing
		return fmt.Errorf("credential %s: %w", c.settings.kind, err)
	}
	value, _, err := sources.LoadOrNew(c.settings.key(), func() (caddy.Destructor, error) {
		return newShared(c.settings), nil
	})
	if err != nil {
		return err
	}
	c.shared = value.(*shared)
	c.choice = &choice{shared: value.(*shared), order: value.(*shared).inOrder()}
	c.logger = ctx.Logger().With(c.settings.logFields()...)
	c.shared.use(c.logger)
	return nil
}

// Cleanup releases the source.
func (c *Credentials) Cleanup() error {
	if c.shared == nil {
		return nil
	}
	c.shared.disuse(c.logger)
	_, err := sources.Delete(c.settings.key())
	return err
}

// Credential implements openailb.CredentialSource.
func (c *Credentials) Credential(ctx context.Context) (openailb.Credential, error) {
	return c.choice.used().credential(ctx)
}

// Renew implements openailb.CredentialSource.
func (c *Credentials) Renew(ctx context.Context, refused openailb.Credential) (openailb.Credential, error) {
	return c.choice.used().renew(ctx, refused)
}

// RenewFor implements keys.AudienceSource.
func (c *Credentials) RenewFor(ctx context.Context, refused openailb.Credential,
	text string) (openailb.Credential, error) {
	return c.choice.renew(ctx, refused, text, c.logger)
}

// Identity implements openailb.CredentialSource.
func (c *Credentials) Identity() string { return c.settings.identity() }

// Interface guards
var (
	_ caddy.Provisioner         = (*Credentials)(nil)
	_ caddy.CleanerUpper        = (*Credentials)(nil)
	_ caddyfile.Unmarshaler     = (*Credentials)(nil)
	_ openailb.CredentialSource = (*Credentials)(nil)
	_ keys.AudienceSource       = (*Credentials)(nil)
)
