// Package openaiapi reads what a request to the OpenAI API asks for: which dialect its path
// speaks, and which model its path, its body or its query names. It can put another model in its
// place without touching a byte besides: re-encoding a body would reorder its keys and round its
// numbers.
package openaiapi

import (
	"net/url"
	"strings"
)

// Dialect is the shape of an API's paths, and with it the place of the model's name.
type Dialect int

const (
	// Other is any path that is none of the below.
	Other Dialect = iota
	// OpenAI is /v1/<operation>; the model is in the body.
	OpenAI
	// AzureV1 is /openai/v1/<operation>; the model in the body is the name of a deployment.
	// Microsoft Learn: "Azure OpenAI in Microsoft Foundry Models v1 API".
	AzureV1
	// AzureClassic is /openai/deployments/<deployment>/<operation>?api-version=<date>, and, for
	// what needs no deployment or has it in the query, /openai/<operation>?api-version=<date>.
	// Microsoft Learn: "Azure OpenAI in Microsoft Foundry Models REST API reference".
	AzureClassic
)

func (d Dialect) String() string {
	switch d {
	case OpenAI:
		return "openai"
	case AzureV1:
		return "azure_v1"
	case AzureClassic:
		return "azure_classic"
	}
	return "other"
}

const (
	openAIPrefix      = "/v1"
	azureV1Prefix     = "/openai/v1"
	classicPrefix     = "/openai"
	deploymentsPrefix = classicPrefix + "/deployments"
)

// Route is a path taken apart.
type Route struct {
	Dialect Dialect

	// Deployment is the path segment that names it, percent-encoded as it came. Only AzureClassic
	// may have one.
	Deployment string

	// Operation is the rest of the path, percent-encoded as it came, with its leading slash:
	// "/chat/completions". It is empty if nothing follows, and the whole path if the dialect is
	// Other.
	Operation string
}

// ParsePath takes apart a path as url.URL.EscapedPath returns it. Nothing is unescaped, cleaned or
// folded: the segments are exactly those before the slashes that the client wrote, so that a
// deployment named "a%2Fb" stays one segment, and a trailing slash stays where it is.
//
// Where a name has to be, nothing is none, and neither is a literal "." or "..": servers resolve
// it (RFC 3986 section 5.2.4) and would see another path than we did.
func ParsePath(escapedPath string) Route {
	if operation, ok := cutSegments(escapedPath, openAIPrefix); ok {
		return Route{Dialect: OpenAI, Operation: operation}
	}
	if operation, ok := cutSegments(escapedPath, azureV1Prefix); ok {
		return Route{Dialect: AzureV1, Operation: operation}
	}
	if rest, ok := cutSegments(escapedPath, deploymentsPrefix); ok && len(rest) > 1 {
		if deployment, operation, ok := cutName(rest); ok {
			return Route{AzureClassic, deployment, operation}
		}
	} else if operation, ok := cutSegments(escapedPath, classicPrefix); ok {
		if _, _, ok := cutName(operation); ok {
			return Route{Dialect: AzureClassic, Operation: operation}
		}
	}
	return Route{Operation: escapedPath}
}

// Name is the deployment unescaped: a model's name, or nothing if the path has none.
func (r Route) Name() string {
	return unescapeOr(r.Deployment, url.PathUnescape)
}

// cutSegments cuts a prefix that ends where a segment does.
func cutSegments(path, prefix string) (rest string, ok bool) {
	rest, ok = strings.CutPrefix(path, prefix)
	return rest, ok && (rest == "" || rest[0] == '/')
}

// cutName cuts the first segment, and the slash before it, if it is a name.
func cutName(path string) (name, rest string, ok bool) {
	if path == "" {
		return "", "", false
	}
	name, _, _ = strings.Cut(path[1:], "/")
	rest = path[1+len(name):]
	return name, rest, name != "" && name != "." && name != ".."
}

// ClassicPath builds the escaped path of an operation, itself as Route has it, on a deployment,
// whose name is escaped here.
func ClassicPath(deployment, operation string) string {
	return deploymentsPrefix + "/" + escapeSegment(deployment) + operation
}

func escapeSegment(s string) string {
	switch s {
	case ".", "..":
		// url.PathEscape leaves dots alone, yet these two alone would not be a name.
		return strings.ReplaceAll(s, ".", "%2E")
	}
	return url.PathEscape(s)
}
