package openaiapi

import (
	"net/url"
	"slices"
	"strings"
	"time"
)

// Queries are edited as text, so that everything else stays byte for byte. Only
// "&" separates parameters (WHATWG URL, section 5.1); a semicolon is part of a
// value. Names are compared unescaped and ignoring case, as Azure does.

// Param returns the value of a query's parameter. If there are several, it
// returns the first, like URLSearchParams.get and url.Values.Get. A badly
// escaped value is returned as it is.
func Param(rawQuery, name string) (value string, ok bool) {
	for pair := range strings.SplitSeq(rawQuery, "&") {
		if hasName(pair, name) {
			_, value, _ = strings.Cut(pair, "=")
			return unescapeOr(value, url.QueryUnescape), true
		}
	}
	return "", false
}

// SetParam sets all parameters of that name to the value, so that it does not
// matter which of them a server reads. A parameter that has the value already
// stays as it is written. If there is no such parameter, SetParam adds one at
// the end.
func SetParam(rawQuery, name, value string) string {
	// A space is written as %20, which servers without support for the plus
	// sign read, too.
	escaped := "=" + strings.ReplaceAll(url.QueryEscape(value), "+", "%20")
	pairs := strings.Split(rawQuery, "&")
	found := false
	for i, pair := range pairs {
		current, ok := Param(pair, name)
		if found = found || ok; ok && current != value {
			written, _, _ := strings.Cut(pair, "=")
			pairs[i] = written + escaped
		}
	}
	switch {
	case found:
		return strings.Join(pairs, "&")
	case rawQuery == "":
		return url.QueryEscape(name) + escaped
	}
	return rawQuery + "&" + url.QueryEscape(name) + escaped
}

// DropParams removes all parameters with one of those names.
func DropParams(rawQuery string, names ...string) string {
	pairs := strings.Split(rawQuery, "&")
	return strings.Join(slices.DeleteFunc(pairs, func(pair string) bool {
		return slices.ContainsFunc(names, func(name string) bool { return hasName(pair, name) })
	}), "&")
}

func hasName(pair, name string) bool {
	written, _, _ := strings.Cut(pair, "=")
	return strings.EqualFold(unescapeOr(written, url.QueryUnescape), name)
}

// unescapeOr unescapes a text, or leaves it as it is if it is badly escaped.
func unescapeOr(s string, unescape func(string) (string, error)) string {
	if unescaped, err := unescape(s); err == nil {
		return unescaped
	}
	return s
}

// streamOptionsSince is the first api-version of Azure that supports
// stream_options. Earlier versions answer 400. Microsoft Learn: "Azure OpenAI
// API preview lifecycle"; of the stable versions, 2024-10-21 is the first with
// it.
const streamOptionsSince = "2024-09-01"

// KnowsStreamOptions reports whether a server supports stream_options in
// requests to this URL of the server. All servers do, except Azure with an
// older api-version, and Foundry's Model Inference API, which rejects members
// that its specification lacks.
func KnowsStreamOptions(u *url.URL) bool {
	version, ok := Param(u.RawQuery, "api-version")
	switch {
	case !ok:
		return true
	case strings.Contains(u.Path, "/models/"):
		return false
	}
	date := version[:min(len(version), len(streamOptionsSince))]
	_, err := time.Parse(time.DateOnly, date)
	return err != nil || date >= streamOptionsSince // others are names, such as preview
}
