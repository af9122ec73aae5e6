package keys

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"github.com/caddyserver/caddy/v2/modules/caddytls"
	"github.com/caddyserver/certmagic"
	"golang.org/x/net/publicsuffix"
)

// PublicSites returns the public host names by which requests reach a handler
// without any check of who sent them. An unknown handler or matcher counts as a
// check.
func PublicSites(app *caddyhttp.App, handler caddyhttp.MiddlewareHandler) []string {
	s := search{handler: handler}
	for _, server := range app.Servers {
		certificates := slices.ContainsFunc(server.TLSConnPolicies,
			func(p *caddytls.ConnectionPolicy) bool { return p.ClientAuthentication != nil })
		if !certificates && slices.ContainsFunc(server.Listen, isPublic) {
			s.walk(server.Routes, nil, false)
		}
	}
	slices.Sort(s.sites)
	return slices.Compact(s.sites)
}

// isPublic reports whether hosts of other networks may reach a listener.
func isPublic(listener string) bool {
	address, err := caddy.ParseNetworkAddress(listener)
	if err != nil || address.IsUnixNetwork() || address.Host == "localhost" {
		return false
	}
	ip, err := netip.ParseAddr(address.Host)
	return err != nil || !ip.IsLoopback() && !ip.IsPrivate()
}

// search finds a handler in routes.
type search struct {
	handler caddyhttp.MiddlewareHandler
	sites   []string
}

// walk follows requests for these hosts through routes. guarded reports whether
// an earlier handler may have refused a request because of its sender. answers
// reports whether a handler in the routes answers, and guards whether one may
// refuse a request because of its sender.
func (s *search) walk(routes caddyhttp.RouteList, hosts []string, guarded bool) (answers, guards bool) {
	for _, route := range routes {
		routeHosts, choosy := hosts, !ignoreCaller(route.MatcherSets)
		ofSite := hostsOf(route)
		if ofSite != nil {
			routeHosts = ofSite
		}
		answersHere, guardsHere := false, false
		for _, h := range route.Handlers {
			before := guarded || guards || choosy || guardsHere
			if h == s.handler && !before {
				s.sites = append(s.sites, slices.DeleteFunc(slices.Clone(routeHosts),
					func(host string) bool { return !isPublicName(host) })...)
			}
			if subroute, ok := h.(*caddyhttp.Subroute); ok {
				a, g := s.walk(subroute.Routes, routeHosts, before)
				answersHere, guardsHere = answersHere || a, guardsHere || g
			} else if !slices.Contains(passive, nameOf(h)) {
				answersHere, guardsHere = true, guardsHere || !answersAnybody(h)
			}
		}
		answers = answers || answersHere
		if ofSite == nil { // what follows may be for another site
			guards = guards || guardsHere || choosy && answersHere
		}
	}
	return answers, guards
}

// isPublicName reports whether a host name may be known on the internet. Names
// such as llm and llm.corp are not; they may belong to a private network.
func isPublicName(host string) bool {
	suffix, icann := publicsuffix.PublicSuffix(strings.ToLower(host))
	return (icann || strings.Contains(suffix, ".")) && certmagic.SubjectQualifiesForPublicCert(host) &&
		!certmagic.SubjectIsIP(host)
}

func hostsOf(route caddyhttp.Route) (hosts []string) {
	for _, set := range route.MatcherSets {
		for _, matcher := range set {
			if host, ok := matcher.(*caddyhttp.MatchHost); ok {
				hosts = append(hosts, *host...)
			}
		}
	}
	return hosts
}

// ignoreCaller reports whether matchers look only at what a request asks for,
// and not at who sent it.
func ignoreCaller(sets []caddyhttp.MatcherSet) bool {
	for _, set := range sets {
		for _, matcher := range set {
			if not, ok := matcher.(*caddyhttp.MatchNot); ok && ignoreCaller(not.MatcherSets) {
				continue
			}
			if !slices.Contains([]string{"host", "method", "path", "path_regexp", "protocol"}, nameOf(matcher)) {
				return false
			}
		}
	}
	return true
}

// passive are handlers that neither answer nor refuse requests.
var passive = []string{"encode", "headers", "intercept", "log_append", "map", "push", "request_body", "rewrite",
	"templates", "timeouts", "tracing", "vars"}

// answersAnybody reports whether a handler answers all requests, regardless of
// who sent them.
func answersAnybody(h any) bool {
	if proxy, ok := h.(*reverseproxy.Handler); ok {
		return len(proxy.HandleResponse) == 0 // forward_auth has some
	}
	return slices.Contains([]string{
		"acme_server", "error", "file_server", "metrics", "openai_lb", "openai_lb_status", "openai_simulator", "static_response",
	}, nameOf(h))
}

func nameOf(module any) string {
	if m, ok := module.(caddy.Module); ok {
		return m.CaddyModule().ID.Name()
	}
	return ""
}
