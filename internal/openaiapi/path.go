// Package openaiapi reads what a request to the OpenAI API asks for: which dialect its path
// speaks, and which model its body names. It can put another model in its place without touching
// a byte besides: re-encoding a body would reorder its keys and round its numbers.
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
	// AzureClassic is /openai/deployments/<deployment>/<operation>?api-version=<date>.
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
	openAIPrefix  = "/v1"
	azureV1Prefix = "/openai/v1"
	classicPrefix = "/openai/deployments/"
)

// Route is a path taken apart.
type Route struct {
	Dialect Dialect

	// Deployment is the path segment that names it, percent-encoded as it came. Only AzureClassic
	// has one.
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
// A literal "." or ".." is no deployment: servers resolve it (RFC 3986 section 5.2.4) and would
// see another path than we did.
func ParsePath(escapedPath string) Route {
	if operation, ok := cutSegments(escapedPath, openAIPrefix); ok {
		return Route{Dialect: OpenAI, Operation: operation}
	}
	if operation, ok := cutSegments(escapedPath, azureV1Prefix); ok {
		return Route{Dialect: AzureV1, Operation: operation}
	}
	if rest, ok := strings.CutPrefix(escapedPath, classicPrefix); ok {
		end := strings.IndexByte(rest, '/')
		if end < 0 {
			end = len(rest)
		}
		if deployment := rest[:end]; deployment != "" && deployment != "." && deployment != ".." {
			return Route{Dialect: AzureClassic, Deployment: deployment, Operation: rest[end:]}
		}
	}
	return Route{Operation: escapedPath}
}

// cutSegments cuts a prefix that ends where a segment does.
func cutSegments(path, prefix string) (rest string, ok bool) {
	rest, ok = strings.CutPrefix(path, prefix)
	return rest, ok && (rest == "" || rest[0] == '/')
}

// ClassicPath builds the escaped path of an operation, itself as Route has it, on a deployment,
// whose name is escaped here.
func ClassicPath(deployment, operation string) string {
	return classicPrefix + escapeSegment(deployment) + operation
}

func escapeSegment(s string) string {
	switch s {
	case ".", "..":
		// url.PathEscape leaves dots alone, yet these two alone would not be a name.
		return strings.ReplaceAll(s, ".", "%2E")
	}
	return url.PathEscape(s)
}
