package azure

import (
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
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
	d.Next() // the module's name
	if d.NextArg() {
		return d.Errf("auth azure_identity takes no argument but a block: unexpected '%s'", d.Val())
	}
	known := c.options()
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		word := d.Val()
		i := slices.IndexFunc(known, func(o option) bool { return o.name == word })
		if i < 0 {
			var names []string
			for _, o := range known {
				names = append(names, o.name)
			}
			slices.Sort(names)
			return d.Errf("unrecognized option '%s': expected one of %s", word, strings.Join(names, ", "))
		}
		into := known[i].value
		if *into != "" {
			return d.Errf("%s is given twice", word)
		}
		switch args := d.RemainingArgs(); {
		case len(args) != 1 && word == "client_secret":
			return d.Errf("%s takes one argument, and has %d", word, len(args)) // not a word of a secret
		case len(args) > 1:
			return d.Errf("%s takes one argument: unexpected '%s'", word, args[1])
		case len(args) == 0 || args[0] == "":
			return d.Errf("%s takes an argument, and has none", word)
		default:
			*into = args[0]
		}
		// what is wrong with a word is said at its line
		if err := c.checkWords(); err != nil {
			return d.WrapErr(err)
		}
	}
	if err := c.check(); err != nil {
		return d.WrapErr(err)
	}
	return nil
}
