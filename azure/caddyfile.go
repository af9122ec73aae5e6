package azure

import (
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/openai-lb/caddy-openai-lb/internal/directive"
)

// UnmarshalCaddyfile sets up the credentials from Caddyfile tokens. Syntax:
//
//	auth azure_identity {
//	    credential     default|managed_identity|workload_identity|client_secret
//	    tenant_id      <id>
//	    client_id      <id>
//	    client_secret  <secret>
//	    object_id      <id>
//	    resource_id    <id>
//	    token_file     <path>
//	    scope          <scope>
//	    cloud          public|government|china
//	    authority_host <url>
//	}
//
// Every option may be given once.
func (c *Credentials) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	err := directive.Unmarshal(d, directive.Options{
		"credential":     directive.OneOf(&c.Kind, kinds...),
		"tenant_id":      directive.Text(&c.TenantID),
		"client_id":      directive.Text(&c.ClientID),
		"client_secret":  directive.Secret(&c.ClientSecret),
		"object_id":      directive.Text(&c.ObjectID),
		"resource_id":    directive.Text(&c.ResourceID),
		"token_file":     directive.Text(&c.TokenFile),
		"scope":          directive.Text(&c.Scope),
		"cloud":          directive.OneOf(&c.Cloud, cloudNames...),
		"authority_host": directive.Text(&c.AuthorityHost),
	})
	if err != nil {
		return err
	}
	if err := c.check(); err != nil {
		return d.WrapErr(err)
	}
	return nil
}
