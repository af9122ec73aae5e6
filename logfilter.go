package openailb

import (
	"net/http"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/logging"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

func init() {
	caddy.RegisterModule(LogFilter{})
}

// LogFilter hides the keys of callers in logged requests, wherever SDKs put
// them: headers, the query, WebSocket subprotocols. Caddy by itself hides
// Authorization and cookies. It belongs on the field `request` of a `filter`
// encoder, and works on a header or a URI of it as well.
type LogFilter struct{}

// CaddyModule returns the Caddy module information.
func (LogFilter) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "caddy.logging.encoders.filter.openai_lb",
		New: func() caddy.Module { return new(LogFilter) },
	}
}

// UnmarshalCaddyfile sets up the filter from Caddyfile tokens. Syntax:
//
//	request openai_lb
func (*LogFilter) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the filter's name
	if d.NextArg() {
		return d.Errf("filter openai_lb takes no argument: unexpected '%s'", d.Val())
	}
	return parseBlock(d, options{})
}

// redacted stands for a secret. It is Caddy's own word.
const redacted = "REDACTED"

// Filter implements logging.LogFieldFilter.
func (LogFilter) Filter(field zapcore.Field) zapcore.Field {
	switch value := field.Interface.(type) {
	case caddyhttp.LoggableHTTPRequest:
		r := *value.Request
		r.Header = redactHeader(r.Header)
		r.RequestURI = redactURI(r.RequestURI)
		value.Request = &r
		return zap.Object(field.Key, value)
	case caddyhttp.LoggableHTTPHeader:
		value.Header = redactHeader(value.Header)
		return zap.Object(field.Key, value)
	}
	if field.Type == zapcore.StringType {
		field.String = redactURI(field.String)
	}
	return field
}

func redactHeader(header http.Header) http.Header {
	header = header.Clone()
	for name, values := range header {
		switch name {
		case "Authorization", "Api-Key", "X-Api-Key", "Ocp-Apim-Subscription-Key":
			header[name] = []string{redacted}
		case "Sec-Websocket-Protocol":
			for i := range values {
				values[i] = redactProtocols(values[i])
			}
		case "Referer":
			for i := range values {
				values[i] = redactURI(values[i])
			}
		}
	}
	return header
}

func redactProtocols(value string) string {
	protocols := strings.Split(value, ",")
	for i, protocol := range protocols {
		if key := strings.TrimSpace(protocol); isKeyProtocol(key) {
			prefix, _, _ := strings.Cut(key, ".")
			protocols[i] = strings.Replace(protocol, key, prefix+"."+redacted, 1)
		}
	}
	return strings.Join(protocols, ",")
}

func redactURI(uri string) string {
	path, query, ok := strings.Cut(uri, "?")
	if !ok {
		return uri
	}
	for _, param := range credentialParams {
		if _, ok := openaiapi.Param(query, param); ok {
			query = openaiapi.SetParam(query, param, redacted)
		}
	}
	return path + "?" + query
}

// Interface guards
var (
	_ logging.LogFieldFilter = (*LogFilter)(nil)
	_ caddyfile.Unmarshaler  = (*LogFilter)(nil)
)
