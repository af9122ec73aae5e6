package directive

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// gone are options of earlier versions, or values of options, with what applies instead.
var gone = map[string]string{
	"all_throttled":           "while all backends throttle, clients get a 429 with the shortest wait",
	"unhealthy_status":        "docs/replies.md says what each status means",
	"max_fails":               "one failure makes a backend a suspect, for fail_duration",
	"retry_after_min":         "a backend that throttles is benched for at least 50ms",
	"retry_after_default":     "a backend that throttles and names no time is benched for fail_duration",
	"stream_require_end":      "a backend that has sent an end mark for an operation must send it in each of its streams",
	"handshake_timeout":       "a backend has 5s to answer the handshake of a WebSocket",
	"silence <number>":        "four times the usual wait is too long; 'silence off' turns that off",
	"ceiling":                 "'reserve <percent>%' in the block of a tier keeps a share of the backends for it",
	"ids":                     "1000000 ids of stored objects are remembered",
	"ids_ttl":                 "ids of stored objects are remembered for 30 days",
	"lookup_timeout":          "other replicas have 50ms to say where an object is stored",
	"save":                    "ids are always saved: by state, or else in Caddy's storage",
	"stream_usage":            "streams of a caller with a limit of tokens report their usage; a backend may have 'stream_usage off'",
	"lb_policy first_byte":    "silence and quota_steering pass over slow and full backends, and 'lb_policy least_conn' over busy ones",
	"reverse_proxy":           "'transport http' has the options of connections, 'header' in a backend replaces header_up, Caddy's directives 'header' and 'intercept' replace header_down and handle_response, and 'health_uri' in a backend replaces active health checks",
	"openai-lb import aca-lb": "the option backends_from_env reads the same variables",

	// of the simulator
	"region":                 "replies of a simulator always have 'x-ms-region: Simulated'",
	"request_window":         "a simulator enforces requests_per_minute over windows of 10s",
	"status_path":            "the status of a simulator is at /_simulator/status",
	"input_tpm_per_ptu":      "a unit of ptu is for 2500 input tokens per minute",
	"output_ratio":           "an output token counts for four input tokens of ptu",
	"hints garbage":          "'hints azure_none' also has no hint that clients read",
	"hints negative":         "'hints azure_neg1' also has negative numbers",
	"fault early_429":        "'fault status:429' answers after the body is read",
	"fault no_done":          "'fault truncate_eof:<n>' leaves out the end mark",
	"fault null_error_chunk": "only 'fault sse_error_first:<type>:<code>' begins a stream with an error",
	"fault comments":         "a simulator sends events only",
}

// UnmarshalJSON reads the options of a module from JSON as strictly as Caddy does. A module whose earlier versions
// had other options uses it, so that the error says what applies instead of them.
func UnmarshalJSON(data []byte, into any) error {
	err := caddy.StrictUnmarshalJSON(data, into)
	if err == nil {
		return nil
	}
	quoted, _ := strings.CutPrefix(err.Error(), "json: unknown field ")
	name := strings.Trim(quoted, `"`)
	if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		name = wrong.Field[strings.LastIndex(wrong.Field, ".")+1:] + " <" + wrong.Value + ">"
	}
	if gone := Gone(name); gone != nil {
		return gone
	}
	return err
}

// Gone returns the error for an option, or a value of one, that earlier versions had. It returns nil for others.
func Gone(name string) error {
	if instead := gone[name]; instead != "" {
		return fmt.Errorf("%s is no longer an option: %s", name, instead)
	}
	return nil
}

// goneValue returns the error for an option with an argument that earlier versions had. It starts at the option's name.
func goneValue(d caddyfile.Dispenser) error {
	name := d.Val()
	d.NextArg()
	if _, err := strconv.ParseFloat(d.Val(), 64); err == nil {
		return Gone(name + " <number>")
	}
	return Gone(name + " " + d.Val())
}
