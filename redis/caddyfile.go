package redis

import (
	"fmt"
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/openai-lb/caddy-openai-lb/internal/directive"
)

// UnmarshalCaddyfile sets up the engine from Caddyfile tokens. Syntax:
//
//	state redis {
//	    address           <host:port...>
//	    sentinel          <master>
//	    sentinel_username <name>
//	    sentinel_password <secret>
//	    cluster
//	    username          <name>
//	    password          <secret>
//	    db                <n>
//	    tls               [<server_name>]
//	    key_prefix        <prefix>
//	}
//
// Every option may be given once.
func (e *Engine) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	err := directive.Unmarshal(d, directive.Options{
		"address":           directive.Strings(&e.Address),
		"sentinel":          directive.Text(&e.Sentinel),
		"sentinel_username": directive.Text(&e.SentinelUsername),
		"sentinel_password": directive.Secret(&e.SentinelPassword),
		"cluster":           directive.Flag(&e.Cluster),
		"username":          directive.Text(&e.Username),
		"password":          directive.Secret(&e.Password),
		"db":                directive.Int(&e.DB, 0, directive.MaxInt),
		"tls": directive.Func(func(d *caddyfile.Dispenser) error {
			e.TLS = true
			if d.NextArg() {
				e.ServerName = d.Val()
			}
			if err := directive.CheckPlaceholders(e.ServerName); err != nil {
				return d.Errf("tls: %w", err)
			}
			return nil
		}),
		"key_prefix": directive.Text(&e.KeyPrefix),
	})
	if err != nil {
		return err
	}
	if len(e.Address) == 0 {
		return d.Err("no address: expected 'address <host:port>' in redis")
	}
	if err := e.checkEarly(); err != nil {
		return d.WrapErr(err)
	}
	return nil
}

// checkEarly checks what can be checked before placeholders are resolved.
func (e *Engine) checkEarly() error {
	s := settings{
		Address: e.Address, Master: e.Sentinel, Cluster: e.Cluster, DB: e.DB, TLS: e.TLS, ServerName: e.ServerName,
		Prefix:   e.KeyPrefix,
		Server:   login{User: e.Username, Pass: e.Password},
		Sentinel: login{User: e.SentinelUsername, Pass: e.SentinelPassword},
	}
	if text := strings.Join(e.Address, ""); strings.Contains(text, "{") {
		if err := directive.CheckPlaceholders(text); err != nil {
			return fmt.Errorf("address: %w", err)
		}
		s.Address = []string{"host:1"}
	}
	if strings.Contains(s.Prefix, "{") {
		s.Prefix = ""
	}
	return s.check()
}
