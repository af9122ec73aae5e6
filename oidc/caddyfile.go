package oidc

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/openai-lb/caddy-openai-lb/internal/directive"
)

// UnmarshalCaddyfile sets up the module from Caddyfile tokens. Syntax:
//
//	caller_identity oidc {
//	    issuer   <url>
//	    audience <audience>
//	    caller   <claim>
//	    tier     <claim> {
//	        <value> <tier>
//	    }
//	}
//
// Every option may be given once.
func (o *Identity) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	return directive.Unmarshal(d, directive.Options{
		"issuer":   directive.String(&o.Issuer),
		"audience": directive.String(&o.Audience),
		"caller":   directive.String(&o.Caller),
		"tier":     directive.Func(o.unmarshalTier),
	}.Check(o.check))
}

func (o *Identity) unmarshalTier(d *caddyfile.Dispenser) error {
	o.Tier = new(Tier)
	if err := directive.Argument(d, &o.Tier.Claim); err != nil {
		return err
	}
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		v := Value{Value: d.Val()}
		if err := directive.Argument(d, &v.Tier); err != nil {
			return err
		}
		if d.NextArg() {
			return d.Errf("unexpected argument '%s' after the tier of '%s'", d.Val(), v.Value)
		}
		o.Tier.Values = append(o.Tier.Values, v)
	}
	return nil
}

// check returns an error if an option is wrong.
func (o *Identity) check() error {
	for _, option := range []struct{ name, value string }{
		{"issuer", o.Issuer}, {"audience", o.Audience}, {"caller", o.Caller},
	} {
		if option.value == "" {
			return fmt.Errorf("%s is required in caller_identity oidc", option.name)
		}
	}
	if !strings.Contains(o.Issuer, "{") {
		if err := checkIssuer(o.Issuer); err != nil {
			return err
		}
	}
	if o.Tier == nil {
		return nil
	}
	if o.Tier.Claim == "" || len(o.Tier.Values) == 0 {
		return errors.New("tier requires a claim, and a block of its values and their tiers")
	}
	for i, v := range o.Tier.Values {
		switch {
		case v.Value == "" || v.Tier == "":
			return fmt.Errorf("tier %s: expected a value and a tier", o.Tier.Claim)
		case slices.ContainsFunc(o.Tier.Values[:i], func(other Value) bool { return other.Value == v.Value }):
			return fmt.Errorf("tier %s: '%s' is given twice", o.Tier.Claim, v.Value)
		}
	}
	return nil
}

// checkIssuer returns an error if the URL of an issuer is wrong.
func checkIssuer(text string) error {
	u, err := url.Parse(text)
	switch {
	case err != nil || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "":
		return fmt.Errorf("issuer '%s' is not a URL such as https://login.microsoftonline.com/<tenant>/v2.0, without user, query and fragment",
			withoutUser(text))
	case !isSecure(u, true):
		return fmt.Errorf("issuer '%s' must begin with https://: anyone between it and Caddy could replace its keys",
			text)
	}
	return nil
}

// withoutUser hides a password, which no URL of an issuer may have.
func withoutUser(text string) string {
	if strings.Contains(text, "@") {
		return "…"
	}
	return text
}

// isSecure reports whether a URL is protected on its way: by https, or, if
// loopback is true, because it stays on this machine.
func isSecure(u *url.URL, loopback bool) bool {
	ip := net.ParseIP(u.Hostname())
	return u.Scheme == "https" || loopback && u.Scheme == "http" &&
		(u.Hostname() == "localhost" || ip != nil && ip.IsLoopback())
}
