package observe

import (
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/logging"
	"go.uber.org/zap"
	"go.uber.org/zap/buffer"
	"go.uber.org/zap/zapcore"

	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
)

func init() {
	caddy.RegisterModule(new(LogEncoder))
}

// LogEncoder hides the keys of callers in a log, wherever SDKs put them:
// headers, the query, WebSocket subprotocols. Caddy by itself hides
// Authorization and cookies.
type LogEncoder struct {
	// WrappedRaw is the encoder that writes the log. Default: `json`, or
	// `console` where the log goes to a terminal.
	WrappedRaw json.RawMessage `json:"wrap,omitempty" caddy:"namespace=caddy.logging.encoders inline_key=format"`

	// redactor gets the fields that all lines of a logger have, and encoder the
	// lines.
	redactor `json:"-"`
	encoder  zapcore.Encoder
}

// CaddyModule returns the Caddy module information.
func (*LogEncoder) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "caddy.logging.encoders.openai_lb",
		New: func() caddy.Module { return new(LogEncoder) },
	}
}

// UnmarshalCaddyfile sets up the encoder from Caddyfile tokens. Syntax:
//
//	format openai_lb {
//	    wrap <encoder> [...]
//	}
func (e *LogEncoder) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	return directive.Unmarshal(d, directive.Options{
		"wrap": directive.Module[zapcore.Encoder](&e.WrappedRaw, "caddy.logging.encoders", "format"),
	})
}

// Provision sets up the encoder.
func (e *LogEncoder) Provision(ctx caddy.Context) error {
	if e.WrappedRaw == nil {
		plain := new(logging.AppendEncoder) // which knows Caddy's defaults
		e.wrap(plain)
		return plain.Provision(ctx)
	}
	module, err := ctx.LoadModule(e, "WrappedRaw")
	if err != nil {
		return fmt.Errorf("wrap: %w", err)
	}
	e.wrap(module.(zapcore.Encoder))
	return nil
}

func (e *LogEncoder) wrap(encoder zapcore.Encoder) {
	e.redactor, e.encoder = redactor{encoder}, encoder
}

// ConfigureDefaultFormat implements caddy.ConfiguresFormatterDefault.
func (e *LogEncoder) ConfigureDefaultFormat(to caddy.WriterOpener) error {
	if wrapped, ok := e.encoder.(caddy.ConfiguresFormatterDefault); ok {
		return wrapped.ConfigureDefaultFormat(to)
	}
	return nil
}

// Clone implements zapcore.Encoder.
func (e *LogEncoder) Clone() zapcore.Encoder {
	clone := new(LogEncoder)
	clone.wrap(e.encoder.Clone())
	return clone
}

// EncodeEntry implements zapcore.Encoder.
func (e *LogEncoder) EncodeEntry(entry zapcore.Entry, fields []zapcore.Field) (*buffer.Buffer, error) {
	redacted := zapcore.ObjectMarshalerFunc(func(to zapcore.ObjectEncoder) error {
		for _, f := range fields {
			if f.Type == zapcore.ReflectType && entry.Message == configMessage {
				f.Interface = redactConfig(f.Interface)
			}
			f.AddTo(redactor{to})
		}
		return nil
	})
	return e.encoder.EncodeEntry(entry, []zapcore.Field{zap.Inline(redacted)})
}

// redactor hides keys in the fields of an object.
type redactor struct{ zapcore.ObjectEncoder }

func (r redactor) AddString(key, value string) {
	r.ObjectEncoder.AddString(key, redactValue(key, value))
}

func (r redactor) AddByteString(key string, value []byte) { r.AddString(key, string(value)) }

func (r redactor) AddArray(key string, array zapcore.ArrayMarshaler) error {
	return r.ObjectEncoder.AddArray(key, redactArray(key, array))
}

func (r redactor) AddObject(key string, object zapcore.ObjectMarshaler) error {
	return r.ObjectEncoder.AddObject(key, redactedObject{object})
}

type redactedObject struct{ zapcore.ObjectMarshaler }

func (o redactedObject) MarshalLogObject(to zapcore.ObjectEncoder) error {
	return o.ObjectMarshaler.MarshalLogObject(redactor{to})
}

// redactArray hides keys in an array of this name. It keeps the type of a
// header's values, by which Caddy's log filters know it.
func redactArray(key string, array zapcore.ArrayMarshaler) zapcore.ArrayMarshaler {
	values, ok := array.(caddyhttp.LoggableStringArray)
	if !ok {
		return redactedArray{array, key}
	}
	safe := make(caddyhttp.LoggableStringArray, len(values))
	for i, value := range values {
		safe[i] = redactListed(key, value)
	}
	return safe
}

// redactedArray is the array of this name, such as the values of a header.
type redactedArray struct {
	zapcore.ArrayMarshaler
	key string
}

func (a redactedArray) MarshalLogArray(to zapcore.ArrayEncoder) error {
	return a.ArrayMarshaler.MarshalLogArray(valueRedactor{to, a.key})
}

type valueRedactor struct {
	zapcore.ArrayEncoder
	key string
}

func (r valueRedactor) AppendString(value string) {
	r.ArrayEncoder.AppendString(redactListed(r.key, value))
}

// redactListed hides the key in a value of an array, as all headers are.
func redactListed(name, value string) string {
	if keys.HoldsKey(name) {
		return keys.Redacted
	}
	return redactValue(name, value)
}

// redactValue hides the key in the value of a field. Its name alone says
// little: the field "key" may be that of a storage, and "secret" the name of
// one.
func redactValue(name, value string) string {
	switch {
	case slices.ContainsFunc(keys.CallerHeaders, func(header string) bool { return strings.EqualFold(header, name) }):
		return keys.Redacted
	case strings.EqualFold(name, "Sec-WebSocket-Protocol"):
		return redactProtocols(value)
	}
	return redactURI(value)
}

func redactProtocols(value string) string {
	protocols := strings.Split(value, ",")
	for i, protocol := range protocols {
		if key := strings.TrimSpace(protocol); keys.IsCredentialProtocol(key) {
			prefix, _, _ := strings.Cut(key, ".")
			protocols[i] = strings.Replace(protocol, key, prefix+"."+keys.Redacted, 1)
		}
	}
	return strings.Join(protocols, ",")
}

// redactURI hides the keys in a URI, or in what may be the query of one.
func redactURI(uri string) string {
	path, query, ok := strings.Cut(uri, "?")
	if !ok {
		return keys.MaskQuery(uri)
	}
	return path + "?" + keys.MaskQuery(query)
}

// configMessage is that of Caddy's debug line with the config of all servers.
const configMessage = "adjusted config"

// secretFields are those of a config that hold a key or a password. A
// placeholder in its place is none.
var secretFields = []string{"api_key", "key", "password", "sentinel_password"}

// holdsSecret reports whether what is in such a field of a config is secret.
func holdsSecret(name string, field any) bool {
	_, list := field.([]any)
	switch {
	case name == "header" || name == "auth_options":
		return true // of a backend: any of them may hold a key
	case list && keys.MayHoldKey(name), slices.Contains(keys.CallerHeaders, http.CanonicalHeaderKey(name)):
		return true // a header, of which reverse_proxy has lists
	case slices.Contains(secretFields, name):
		text, ok := field.(string)
		return !ok || !placeholder.MatchString(text)
	}
	return false
}

// placeholder matches a placeholder, which stands for a key in a config and is
// not a key.
var placeholder = regexp.MustCompile(`^\{(env|file)\.[^{}]*\}$`)

func redactConfig(config any) any {
	text, err := json.Marshal(config)
	if err != nil {
		return keys.Redacted
	}
	var copied any
	if json.Unmarshal(text, &copied) != nil {
		return keys.Redacted
	}
	redactFields(copied)
	return copied
}

func redactFields(value any) {
	switch value := value.(type) {
	case []any:
		for _, element := range value {
			redactFields(element)
		}
	case map[string]any:
		for name, field := range value {
			if holdsSecret(name, field) {
				value[name] = keys.Redacted
			} else {
				redactFields(field)
			}
		}
	}
}

// Interface guards
var (
	_ zapcore.Encoder                  = (*LogEncoder)(nil)
	_ caddyfile.Unmarshaler            = (*LogEncoder)(nil)
	_ caddy.Provisioner                = (*LogEncoder)(nil)
	_ caddy.ConfiguresFormatterDefault = (*LogEncoder)(nil)
)
