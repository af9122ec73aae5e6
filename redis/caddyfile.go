package redis

import (
	"errors"
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
		"sentinel":          directive.String(&e.Sentinel),
		"sentinel_username": directive.String(&e.SentinelUsername),
		"sentinel_password": directive.Secret(&e.SentinelPassword),
		"cluster":           directive.Flag(&e.Cluster),
		"username":          directive.String(&e.Username),
		"password":          directive.Secret(&e.Password),
		"db":                directive.Int(&e.DB, 0, directive.MaxInt),
		"tls": directive.Func(func(d *caddyfile.Dispenser) error {
			e.TLS = true
			if d.NextArg() {
				e.ServerName = d.Val()
			}
			return nil
		}),
		"key_prefix": directive.String(&e.KeyPrefix),
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
	if e.Sentinel != "" && e.Cluster {
		return errors.New("sentinel and cluster cannot be combined")
	}
	if e.Username != "" && e.Password == "" {
		return errors.New("username requires a password")
	}
	if e.SentinelUsername != "" && e.SentinelPassword == "" {
		return errors.New("sentinel_username requires a sentinel_password")
	}
	if strings.Contains(strings.Join(e.Address, ""), "{") {
		return nil
	}
	s := settings{Address: e.Address, Master: e.Sentinel, Cluster: e.Cluster}
	return s.check()
}
