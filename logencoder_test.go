package openailb_test

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// encoderOf takes the Caddyfile's words for a log's format the way Caddy does.
func encoderOf(t *testing.T, format string) zapcore.Encoder {
	t.Helper()
	config, err := lbtest.Adapt("{\nlog {\nformat " + format + "\n}\n}")
	if err != nil {
		t.Fatal(err)
	}
	var adapted caddy.Config
	if err := json.Unmarshal([]byte(config), &adapted); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
	t.Cleanup(cancel)
	module, err := ctx.LoadModule(&adapted.Logging.Logs["default"].BaseLog, "EncoderRaw")
	if err != nil {
		t.Fatal(err)
	}
	return module.(zapcore.Encoder)
}

func TestALogHoldsNoKeyWhereverItWasPut(t *testing.T) {
	const key = "key-of-the-caller"
	r := lbtest.NewRequest(t, http.MethodGet, "https://lb/v1/realtime?model=x&API-Key="+key+"&subscription%2Dkey="+key+"&y=%20&access_token="+key+"&after=tokens", http.NoBody)
	r.RequestURI = r.URL.RequestURI()
	r.Header = http.Header{
		"Authorization": {"Bearer " + key}, "Api-Key": {key}, "X-Api-Key": {key}, "Ocp-Apim-Subscription-Key": {key},
		"Cookie": {key}, "Proxy-Authorization": {key},
		"Sec-Websocket-Protocol": {"realtime, openai-insecure-api-key." + key + ", openai-beta.realtime-v1", "OpenAI-insecure-api-key." + key},
		"Sec-WebSocket-Protocol": {"openai-insecure-api-key." + key},
		"Referer":                {"https://lb/?api-key=" + key},
		"X-Forwarded-Uri":        {"/v1/models?api-key=" + key},
		"User-Agent":             {"curl"},
		"X-Masked":               {"203.0.113.77"},
		"X-Portkey-Api-Key":      {key}, "Helicone-Auth": {"Bearer " + key}, "Cf-Aig-Authorization": {key}, "X-Session-Cookie": {key}, "X_Token": {key},
		"Idempotency-Key": {"stainless-1"}, "Sec-Websocket-Key": {"nonce"}, "X-Max-Tokens": {"77"},
	}
	for _, format := range []string{
		"openai_lb",
		"openai_lb {\nwrap json\n}",
		"openai_lb {\nwrap filter {\nrequest>remote_ip delete\n}\n}",
		"openai_lb {\nwrap filter {\nrequest>headers>X-Masked ip_mask 16 32\n}\n}",
		"filter {\nrequest>headers>X-Masked ip_mask 16 32\nwrap openai_lb\n}",
		"append {\nx y\nwrap openai_lb\n}",
	} {
		encoder := encoderOf(t, format)
		// some fields come before the others, as with a logger's With
		encoder = encoder.Clone()
		zap.Object("request", caddyhttp.LoggableHTTPRequest{Request: r}).AddTo(encoder)
		zap.String("before", "/v1?api-key="+key).AddTo(encoder)
		zap.Strings("list", []string{"/v1?api-key=" + key}).AddTo(encoder)
		text, err := encoder.EncodeEntry(zapcore.Entry{Message: "handled request"}, []zapcore.Field{
			zap.Object("again", caddyhttp.LoggableHTTPRequest{Request: r}),
			zap.Object("resp_headers", caddyhttp.LoggableHTTPHeader{Header: http.Header{"Location": {"https://lb/?api-key=" + key}}}),
			zap.String("uri", r.RequestURI), zap.String("api-key", key), zap.Strings("api-key", []string{key}),
			zap.String("query", "x=1&api-key="+key), zap.ByteString("bytes", []byte("/v1?api-key="+key)),
			zap.Int("n", 1), zap.String("plain", "text?"),
			zap.Object("more", caddyhttp.LoggableHTTPHeader{Header: http.Header{"X-Refresh-Token": {key}, "X-Ratelimit-Limit-Tokens": {"900"}}}),
			zap.String("secret", "client keys"), zap.Int64("token", 3), zap.Strings("tokens", []string{"a"}), zap.String("key", "certificates/lb.key"),
			zap.String("error", "dial tcp: the key=x; token = y is not there"), zap.String("model", "key"),
		})
		if err != nil {
			t.Fatal(err)
		}
		logged := text.String()
		if strings.Contains(logged, key) {
			t.Errorf("format %s: the log holds the key: %s", format, logged)
		}
		if masks := strings.Contains(format, "ip_mask"); masks != strings.Contains(logged, "203.0.0.0") {
			t.Errorf("format %s: an address is masked: %v: %s", format, !masks, logged)
		}
		for _, want := range []string{
			`"uri":"/v1/realtime?model=x&API-Key=REDACTED&subscription%2Dkey=REDACTED&y=%20&access_token=REDACTED&after=tokens"`, `https://lb/?api-key=REDACTED`,
			`"realtime, openai-insecure-api-key.REDACTED, openai-beta.realtime-v1"`, `"curl"`, `"Api-Key":["REDACTED"]`, `"n":1`, `"plain":"text?"`,
			`"X-Portkey-Api-Key":["REDACTED"]`, `"Helicone-Auth":["REDACTED"]`, `"Idempotency-Key":["stainless-1"]`, `"Sec-Websocket-Key":["nonce"]`,
			`"X-Max-Tokens":["77"]`, `"X-Refresh-Token":["REDACTED"]`, `"X-Ratelimit-Limit-Tokens":["900"]`,
			`"secret":"client keys"`, `"token":3`, `"tokens":["a"]`, `"key":"certificates/lb.key"`, `"model":"key"`,
			`"error":"dial tcp: the key=x; token = y is not there"`,
		} {
			if !strings.Contains(logged, want) {
				t.Errorf("format %s: the log lacks %s: %s", format, want, logged)
			}
		}
	}
	if r.Header.Get("Api-Key") != key || !strings.Contains(r.RequestURI, key) {
		t.Error("the request itself was changed")
	}
}

func TestAWrongLogFormatIsRefused(t *testing.T) {
	for format, want := range map[string]string{
		"openai_lb json":                     "unexpected argument 'json'",
		"openai_lb {\nwrap\n}":               "wrap requires an argument",
		"openai_lb {\nwrap nothing\n}":       "nothing",
		"openai_lb {\nfields\n}":             "expected one of wrap",
		"openai_lb {\nwrap json\nwrap json}": "",
	} {
		if _, err := lbtest.Adapt("{\nlog {\nformat " + format + "\n}\n}"); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("format %s gives %v, want %q", format, err, want)
		}
	}
}
