package openaiapi

import (
	"cmp"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// azureDomains are the domains of Azure OpenAI resources: in the public cloud,
// in Azure Government, and in Azure operated by 21Vianet.
var azureDomains = []string{
	"openai.azure.com", "cognitiveservices.azure.com", "services.ai.azure.com",
	"openai.azure.us", "cognitiveservices.azure.us",
	"openai.azure.cn", "cognitiveservices.azure.cn",
}

// IsAzure reports whether a host belongs to an Azure OpenAI resource.
func IsAzure(host string) bool {
	host = strings.ToLower(host)
	return slices.ContainsFunc(azureDomains, func(domain string) bool { return strings.HasSuffix(host, "."+domain) })
}

// IsOpenAI reports whether a host is OpenAI's.
func IsOpenAI(host string) bool { return strings.EqualFold(host, "api.openai.com") }

// providerDomains are the domains of providers other than Azure.
var providerDomains = []string{"api.openai.com", "api.anthropic.com"}

// IsProvider reports whether a host is a known provider's. A provider never
// sends a request back to the balancer.
func IsProvider(host string) bool {
	host = strings.ToLower(host)
	return IsAzure(host) || slices.ContainsFunc(providerDomains, func(domain string) bool {
		return host == domain || strings.HasSuffix(host, "."+domain)
	})
}

// ParseBaseURL parses and checks the URL of a backend. Its errors do not repeat
// a part that may be a secret.
func ParseBaseURL(rawURL string) (*url.URL, error) {
	shown := "'" + strings.Trim(strconv.Quote(withoutSecret(rawURL)), `"`) + "'"
	u, err := url.Parse(rawURL)
	switch {
	case strings.Contains(rawURL, "@"):
		return nil, fmt.Errorf("url %s must not contain a user or a password: use api_key or header instead", shown)
	case err != nil:
		return nil, fmt.Errorf("url %s is not a valid URL", shown)
	case u.Scheme != "http" && u.Scheme != "https":
		return nil, fmt.Errorf("url %s must begin with http:// or https://", shown)
	case u.Hostname() == "":
		return nil, fmt.Errorf("url %s has no host", shown)
	case strings.ContainsAny(u.Hostname(), "<>\"{}"):
		return nil, fmt.Errorf("url %s is an example: replace the part in brackets with your own", shown)
	case strings.Contains(u.Path+"/", "/openai/deployments/"):
		return nil, fmt.Errorf("url %s must not contain /openai/deployments/: the client or the option deployment adds it",
			shown)
	case endsInOperation(u.EscapedPath()):
		return nil, fmt.Errorf("url %s must not contain an operation: expected a base URL, such as https://api.openai.com/v1",
			shown)
	case isProject(u.EscapedPath()):
		return nil, fmt.Errorf("url %s is that of a Foundry project: expected /openai/v1 after it", shown)
	case u.RawQuery != "" || u.ForceQuery || u.Fragment != "":
		return nil, fmt.Errorf("url %s must not contain a query or a fragment", shown)
	}
	if port := u.Port(); port != "" {
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return nil, fmt.Errorf("url %s has an invalid port: expected 1 to 65535", shown)
		}
	}
	return u, nil
}

// withoutSecret returns a text that should be a URL, without the parts that may
// be a secret: a password, a query, or a key that is there by mistake.
func withoutSecret(text string) string {
	shown := text
	if at := strings.IndexAny(text, "?#"); at >= 0 {
		shown = text[:at+1] + "…"
	}
	scheme, rest, hasScheme := strings.Cut(shown, "://")
	switch user := strings.LastIndex(rest, "@"); {
	case !hasScheme && len(text) >= shortestKey && !looksLikeHost.MatchString(shown),
		!hasScheme && strings.Contains(text, "@"):
		return "…"
	case strings.Count(text, "@") > strings.Count(shown, "@"):
		return scheme + "://…" // the ? may be in a password
	case user >= 0:
		return scheme + "://…" + rest[user:]
	}
	return shown
}

// looksLikeHost matches a host name, perhaps with a port and a path. Keys have
// upper case, or no dot.
var looksLikeHost = regexp.MustCompile(`^(localhost|[a-z][a-z0-9-]*(\.[a-z][a-z0-9-]*)*\.[a-z]{2,12})(:\d+)?(/.*)?$`)

// shortestKey is the length from which a text counts as a possible key.
const shortestKey = 16

// isProject reports whether a path is the path of a Foundry project itself,
// below which the API's prefix is missing.
func isProject(path string) bool {
	rest, ok := cutProject(strings.TrimSuffix(path, "/") + "/openai/v1")
	return ok && rest == ""
}

// endsInOperation reports whether a path ends in an operation of a model, such
// as /chat/completions.
func endsInOperation(path string) bool {
	for i := range path {
		if path[i] == '/' && IsInference(http.MethodPost, path[i:]) {
			return true
		}
	}
	return false
}

// DialAddress returns the network address for a URL.
func DialAddress(u *url.URL) string {
	return net.JoinHostPort(u.Hostname(), cmp.Or(u.Port(), map[string]string{"http": "80", "https": "443"}[u.Scheme]))
}
