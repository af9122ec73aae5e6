package simulator

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/simulator/internal/limits"
)

func init() {
	httpcaddyfile.RegisterHandlerDirective("openai_simulator", parseCaddyfile)
	httpcaddyfile.RegisterDirectiveOrder("openai_simulator", httpcaddyfile.Before, "reverse_proxy")
}

func parseCaddyfile(helper httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	h := new(Handler)
	return h, h.UnmarshalCaddyfile(helper.Dispenser)
}

// UnmarshalCaddyfile sets up the handler from a block with these options, each
// followed by its values. The fields of Handler say what each option means and
// what its default is. A fault is
//
//	fault <action> [<every>]
//	fault silent for <duration> every <duration>
func (h *Handler) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	return directive.Unmarshal(d, directive.Options{
		"name":        directive.String(&h.Name),
		"api_key":     directive.Strings(&h.APIKey).Repeatable(),
		"deployments": directive.Strings(&h.Deployments),

		"requests_per_minute": directive.Int(&h.RequestsPerMinute, 1, directive.MaxInt),
		"tokens_per_minute":   directive.Int(&h.TokensPerMinute, 1, directive.MaxInt),
		"ptu":                 directive.Int(&h.PTU, 1, directive.MaxInt),
		"bucket_seconds":      directive.Float(&h.BucketSeconds),

		"hints":      directive.OneOf(&h.Hints, limits.HintStyles...),
		"error_body": directive.OneOf(&h.ErrorBody, limits.BodyStyles...),

		"first_token_latency":     directive.DurationOrZero(&h.FirstTokenLatency),
		"first_token_latency_p95": directive.DurationOrZero(&h.FirstTokenLatencyP95),
		"token_latency":           directive.DurationOrZero(&h.TokenLatency),
		"output_tokens":           directive.Int(&h.OutputTokens, 1, directive.MaxInt),
		"prompt_cache":            directive.Int(&h.PromptCache, 1, directive.MaxInt),

		"flex_capacity":     directive.IntPointer(&h.FlexCapacity, 100),
		"priority_capacity": directive.IntPointer(&h.PriorityCapacity, 100),
		"no_flex":           directive.Flag(&h.NoFlex),
		"flex_latency":      directive.DurationOrZero(&h.FlexLatency),

		"fault":              directive.Args("an action and, optionally, how often", 1, 5, h.addFault).Repeatable(),
		"allow_fault_header": directive.Flag(&h.AllowFaultHeader),
		"early_grace":        directive.DurationOrZero(&h.EarlyGrace),
	})
}

// addFault adds a fault as the Caddyfile has it.
func (h *Handler) addFault(args []string) (err error) {
	f, times := Fault{Action: args[0]}, args[1:]
	switch {
	case f.Action == silent:
		err = f.parseTimes(times)
	case len(times) > 1:
		err = fmt.Errorf("fault '%s' requires at most one number, got '%s'", f.Action, strings.Join(times, " "))
	case len(times) == 1:
		if f.Every, err = strconv.Atoi(times[0]); err != nil || f.Every < 1 {
			err = fmt.Errorf("fault '%s': '%s' is not a whole number of 1 or more", f.Action, times[0])
		}
	}
	if err != nil {
		return err
	}
	h.Fault = append(h.Fault, f)
	return f.provision()
}

func (f *Fault) parseTimes(times []string) error {
	if len(times) != 4 || times[0] != "for" || times[2] != "every" {
		return fmt.Errorf("fault '%s' requires 'for <duration> every <duration>', got '%s'",
			silent, strings.Join(times, " "))
	}
	for i, d := range []*caddy.Duration{&f.For, &f.Period} {
		parsed, err := caddy.ParseDuration(times[2*i+1])
		if err != nil {
			return fmt.Errorf("fault '%s': '%s' is not a duration", silent, times[2*i+1])
		}
		*d = caddy.Duration(parsed)
	}
	return nil
}

// Interface guard
var _ caddyfile.Unmarshaler = (*Handler)(nil)
