// Package openaiapi reads requests to the OpenAI API, and to Anthropic's
// /v1/messages, which some backends offer next to it. [Parse] returns a
// [Request].
//
// # Paths
//
// [ParsePath] splits the path into a [Route]: its [Dialect], its deployment and
// its operation. The operation determines whether the request is for inference,
// whether it may be repeated, and how it uses stored objects. [Paths] belongs
// to a backend: it rewrites the path and query of a request in any dialect to
// those of the backend.
//
// # Bodies
//
// A [Body] has the values in a body: the model, whether to stream, how much
// output the request may cost, and the ids of the stored objects that it names.
// A body is JSON ([ParseJSON]) or a form. It is scanned once: a Body remembers
// places in it, and copies nothing. The place of a member decides what it
// means, so a "model" inside of a prompt is text. [Body.With] replaces the
// model and leaves every other byte unchanged: encoding a body again would
// reorder its keys and round its numbers. A [Prompt] identifies the session
// that a request belongs to. [EachIDInReply] finds the ids in a reply.
//
// # Headers
//
// The headers of a request or reply give the type of its body (RFC 9110 section
// 8.3) and its coding (section 8.4). [Decompress] decodes a body that is in
// memory, and a [Decoder] one that passes by, because the meaning of an error
// and the number of tokens are in the body.
package openaiapi

import (
	"net/http"
	"net/url"
	"slices"
	"strings"
	"unicode/utf8"
)

// Dialect is the form of an API's paths, which also determines where the
// model's name is.
type Dialect int

const (
	// Other is any path that is not in one of the dialects below.
	Other Dialect = iota
	// OpenAI is /v1/<operation>; the model is in the body.
	OpenAI
	// AzureV1 is /openai/v1/<operation>, or the same below
	// /api/projects/<project>, which Foundry's SDK sends; the model in the body
	// is the name of a deployment. Microsoft Learn: "Azure OpenAI in Microsoft
	// Foundry Models v1 API", "Microsoft Foundry SDKs and Endpoints".
	AzureV1
	// AzureClassic is
	// /openai/deployments/<deployment>/<operation>?api-version=<date>, and, for
	// what needs no deployment or has it in the query,
	// /openai/<operation>?api-version=<date>. Microsoft Learn: "Azure OpenAI in
	// Microsoft Foundry Models REST API reference".
	AzureClassic
	// Anthropic is /anthropic/v1/<operation>, Foundry's path of Anthropic's
	// API; the model in the body is the name of a deployment. Anthropic's docs:
	// "Claude in Microsoft Foundry".
	Anthropic
	// Bare is /<operation> without any prefix, as OpenAI's SDKs send it if the
	// base URL is the address alone, or Foundry's
	// /models/<operation>?api-version=<date>; the model is in the body.
	// Microsoft Learn: "Azure AI Model Inference REST API reference".
	Bare
)

const (
	openAIPrefix    = "/v1"
	azureV1Prefix   = "/openai/v1"
	classicPrefix   = "/openai"
	anthropicPrefix = "/anthropic/v1"
	deployments     = "/deployments"
)

// Route is a parsed path.
type Route struct {
	Dialect Dialect

	// Deployment is the path segment that names the deployment, percent-encoded
	// as received. Only AzureClassic has one.
	Deployment string

	// Operation is the rest of the path, percent-encoded as received, with its
	// leading slash: "/chat/completions". It is empty if there is no rest. It
	// is the whole path if the dialect is Other, or Bare without Foundry's
	// prefix.
	Operation string
}

// ParsePath parses a path as url.URL.EscapedPath returns it.
//
// The segments that identify the dialect may be in any case, and
// percent-encoded: Azure treats "/OpenAI/Deployments/x" like
// "/openai/deployments/x", so ParsePath must find the deployment in both. No
// other part of the path is unescaped, cleaned or folded. A deployment named
// "a%2Fb" stays one segment, and a trailing slash stays where it is.
//
// A deployment or an operation is not empty, and not a literal "." or "..",
// which servers resolve (RFC 3986 section 5.2.4). A path with one of these
// there has the dialect Other.
func ParsePath(escapedPath string) Route {
	if operation, ok := cutSegment(escapedPath, "v1"); ok {
		return Route{Dialect: OpenAI, Operation: operation}
	}
	if rest, ok := cutSegment(escapedPath, "anthropic"); ok {
		if operation, ok := cutSegment(rest, "v1"); ok {
			return Route{Dialect: Anthropic, Operation: operation}
		}
	}
	rest, ok := cutSegment(escapedPath, "openai")
	if !ok {
		if operation, ok := cutProject(escapedPath); ok {
			return Route{Dialect: AzureV1, Operation: operation}
		}
		return parseBare(escapedPath)
	}
	if operation, ok := cutSegment(rest, "v1"); ok {
		return Route{Dialect: AzureV1, Operation: operation}
	}
	if names, ok := cutSegment(rest, "deployments"); ok && len(names) > 1 {
		if deployment, operation, ok := cutName(names); ok {
			return Route{AzureClassic, deployment, operation}
		}
	} else if _, _, ok := cutName(rest); ok {
		return Route{Dialect: AzureClassic, Operation: rest}
	}
	return Route{Operation: escapedPath}
}

// cutProject cuts the prefix of Azure's v1 paths in a Foundry project. The
// project's name is dropped, because each backend has its own project, or none.
func cutProject(path string) (operation string, ok bool) {
	for _, word := range []string{"api", "projects"} {
		if path, ok = cutSegment(path, word); !ok {
			return "", false
		}
	}
	if _, path, ok = cutName(path); !ok {
		return "", false
	}
	if path, ok = cutSegment(path, "openai"); !ok {
		return "", false
	}
	return cutSegment(path, "v1")
}

// parseBare parses a path without a prefix. It recognizes operations only as
// the API's documentation writes them.
func parseBare(path string) Route {
	if operation, ok := strings.CutPrefix(path, "/models"); ok && IsInference(http.MethodPost, operation) {
		return Route{Dialect: Bare, Operation: operation}
	}
	first := firstSegment(path)
	if _, stores := collections[first]; stores || inferenceSegments[first] || first == "models" {
		return Route{Dialect: Bare, Operation: path}
	}
	return Route{Operation: path}
}

// Name returns the unescaped deployment, which is the name of a model. It is
// empty if the path has none.
func (r Route) Name() string {
	return unescapeOr(r.Deployment, url.PathUnescape)
}

// cutSegment cuts the first segment, and the slash before it, if the segment is
// the word.
func cutSegment(path, word string) (rest string, ok bool) {
	if path == "" || path[0] != '/' {
		return "", false
	}
	segment, _, _ := strings.Cut(path[1:], "/")
	if !strings.EqualFold(unescapeOr(segment, url.PathUnescape), word) {
		return "", false
	}
	return path[1+len(segment):], true
}

// cutName cuts the first segment, and the slash before it, if the segment is a
// name.
func cutName(path string) (name, rest string, ok bool) {
	if path == "" {
		return "", "", false
	}
	name, _, _ = strings.Cut(path[1:], "/")
	rest = path[1+len(name):]
	return name, rest, name != "" && name != "." && name != ".."
}

// CheckPath returns the reason, in words for the client, why a path must not be
// passed on. It returns an empty string if the path may be passed on. The path
// is as url.URL.EscapedPath returns it.
//
// CheckPath rejects paths that some servers read differently from other servers
// and ParsePath. Such a path could lead out of a backend's base path, or to a
// deployment or an object that was not checked. No SDK sends them.
func CheckPath(escapedPath string) (problem string) {
	if !strings.ContainsAny(escapedPath, `.;%\`) && !strings.Contains(escapedPath, "//") {
		return "" // every server reads it in the same way
	}
	path := unescapeOr(escapedPath, url.PathUnescape)
	if path != escapedPath && hasBlank(path) {
		return "The path must not contain white space or control characters."
	}
	for segment := range strings.FieldsFuncSeq(path, isSlash) {
		// some servers take off what follows a semicolon (RFC 3986 section 3.3)
		if segment, _, _ = strings.Cut(segment, ";"); segment == "." || segment == ".." {
			return "The path must not contain '.' or '..' segments."
		}
	}
	if strings.Contains(escapedPath, "//") {
		return "The path must not contain empty segments."
	}
	// An encoded slash or a semicolon may be part of a name, but not of the
	// segments before it.
	if path != escapedPath || strings.ContainsAny(path, `\;`) {
		route, other := ParsePath(escapedPath), ParsePath(asOthersRead(path))
		if route.Dialect != other.Dialect || (route.Deployment == "") != (other.Deployment == "") {
			return "The path must not contain an encoded slash or a semicolon before the operation or the deployment."
		}
	}
	return ""
}

func isSlash(r rune) bool { return r == '/' || r == '\\' }

// asOthersRead returns an unescaped path as some servers read it: a backslash
// is a slash, several slashes are one, and a semicolon and what follows it are
// not part of the segment.
func asOthersRead(path string) string {
	var b strings.Builder
	for segment := range strings.FieldsFuncSeq(path, isSlash) {
		segment, _, _ = strings.Cut(segment, ";")
		b.WriteByte('/')
		b.WriteString(segment)
	}
	return b.String()
}

// EscapeSegment escapes a name to be one segment of a path.
func EscapeSegment(s string) string {
	switch s {
	case ".", "..":
		// url.PathEscape does not escape dots, and servers would resolve these
		// segments.
		return strings.ReplaceAll(s, ".", "%2E")
	}
	return url.PathEscape(s)
}

// OddlySpelled reports whether some servers read an operation, written as in
// Route, as one on stored objects that ReadStored does not find, or reads
// differently. Ids below a collection may be percent-encoded.
func OddlySpelled(operation string) bool {
	if isPlain(operation) { // nearly all
		return false
	}
	read, differs := operation, false
	if strings.ContainsAny(operation, `%;\`) {
		plain := unescapeOr(operation, url.PathUnescape)
		read = asOthersRead(plain)
		differs = strings.TrimSuffix(plain, "/") != read || strings.Count(plain, "/") != strings.Count(operation, "/")
	}
	first, rest, _ := strings.Cut(strings.TrimPrefix(read, "/"), "/")
	second, _, _ := strings.Cut(rest, "/")
	first, second = strings.ToLower(first), strings.ToLower(second)
	seconds, stored := collections[first]
	prefix := "/" + first
	if slices.Contains(seconds, second) {
		prefix += "/" + second
	}
	return stored && (differs || !strings.HasPrefix(operation, prefix))
}

// isPlain reports whether an operation begins with a slash, and all servers
// read it alike.
func isPlain(operation string) bool {
	for i := range len(operation) {
		if c := operation[i]; c >= utf8.RuneSelf || 'A' <= c && c <= 'Z' || c == '%' || c == ';' || c == '\\' {
			return false
		}
	}
	return strings.HasPrefix(operation, "/")
}
