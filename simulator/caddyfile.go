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
	"github.com/openai-lb/caddy-openai-lb/simulator/internal/wire"
)

func init() {
	httpcaddyfile.RegisterHandlerDirective("openai_simulator", parseCaddyfile)
	httpcaddyfile.RegisterDirectiveOrder("openai_simulator", httpcaddyfile.Before, "reverse_proxy")
}

func parseCaddyfile(helper httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	h := new(Handler)
	return h, h.UnmarshalCaddyfile(helper.Dispenser)
}

// UnmarshalCaddyfile sets up the handler from Caddyfile tokens. Syntax:
//
//	openai_simulator [<matcher>] {
//	    name                <name>
//	    api_key             <key...>           # repeatable
//	    deployments         <name...>
//	    region              <text>
//
//	    requests_per_minute <n>
//	    request_window      1s|10s
//	    tokens_per_minute   <n>
//
//	    ptu                 <units>            # instead of the three above
//	    input_tpm_per_ptu   <n>
//	    output_ratio        <n>
//	    bucket_seconds      <seconds>
//
//	    hints               azure_ms|azure_both|azure_s|azure_none|azure_neg1|azure_day|
//	                        date|openai_dur|garbage|negative|zero
//	    error_body          azure_classic|azure_new|azure_capacity|azure_ptu|openai_tokens|
//	                        insufficient_quota|mistral_flat|openrouter_num|html|empty|string_error
//
//	    first_token_latency <duration>
//	    first_token_latency_p95 <duration>
//	    token_latency       <duration>
//	    output_tokens       <n>
//	    prompt_cache        <n>
//
//	    fault               <action> [<every>] # repeatable
//	    fault               silent for <duration> every <duration>
//	    allow_fault_header
//	    early_grace         <duration>
//	    status_path         <path>
//	}
//
// The fields of Handler say what each option means and what its default is. The
// fields of Fault list the actions.
func (h *Handler) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	return directive.Unmarshal(d, directive.Options{
		"name":        directive.String(&h.Name),
		"api_key":     directive.Strings(&h.APIKey).Repeatable(),
		"deployments": directive.Strings(&h.Deployments),
		"region":      directive.String(&h.Region),

		"requests_per_minute": directive.Int(&h.RequestsPerMinute, 1, directive.MaxInt),
		"request_window":      directive.Duration(&h.RequestWindow).Check(func() error { return checkWindow(h.RequestWindow) }),
		"tokens_per_minute":   directive.Int(&h.TokensPerMinute, 1, directive.MaxInt),

		"ptu":               directive.Int(&h.PTU, 1, directive.MaxInt),
		"input_tpm_per_ptu": directive.Int(&h.InputTPMPerPTU, 1, directive.MaxInt),
		"output_ratio":      directive.Float(&h.OutputRatio),
		"bucket_seconds":    directive.Float(&h.BucketSeconds),

		"hints":      directive.OneOf(&h.Hints, limits.HintStyles...),
		"error_body": directive.OneOf(&h.ErrorBody, limits.BodyStyles...),

		"first_token_latency":     directive.DurationOrZero(&h.FirstTokenLatency),
		"first_token_latency_p95": directive.DurationOrZero(&h.FirstTokenLatencyP95),
		"token_latency":           directive.DurationOrZero(&h.TokenLatency),
		"output_tokens":           directive.Int(&h.OutputTokens, 1, directive.MaxInt),
		"prompt_cache":            directive.Int(&h.PromptCache, 1, directive.MaxInt),

		"fault":              directive.Args("an action and, optionally, how often", 1, 5, h.addFault).Repeatable(),
		"allow_fault_header": directive.Flag(&h.AllowFaultHeader),
		"early_grace":        directive.DurationOrZero(&h.EarlyGrace),
		"status_path":        directive.String(&h.StatusPath),
	})
}

func (h *Handler) addFault(args []string) error {
	f, times := Fault{Action: args[0]}, args[1:]
	if f.Action == silent {
		return h.addSilence(times)
	}
	if _, err := wire.ParseAction(f.Action); err != nil {
		return err
	}
	if len(times) > 1 {
		return fmt.Errorf("fault '%s' requires at most one number, got '%s'", f.Action, strings.Join(times, " "))
	}
	if len(times) == 1 {
		var err error
		if f.Every, err = strconv.Atoi(times[0]); err != nil || f.Every < 1 {
			return fmt.Errorf("fault '%s': '%s' is not a whole number of 1 or more", f.Action, times[0])
		}
	}
	h.Fault = append(h.Fault, f)
	return nil
}

// addSilence adds a fault silent, with its times as the Caddyfile has them.
func (h *Handler) addSilence(times []string) error {
	if len(times) != 4 || times[0] != "for" || times[2] != "every" {
		return fmt.Errorf("fault '%s' requires 'for <duration> every <duration>', got '%s'", silent, strings.Join(times, " "))
	}
	f := Fault{Action: silent}
	for i, d := range []*caddy.Duration{&f.For, &f.Period} {
		text := times[2*i+1]
		parsed, err := caddy.ParseDuration(text)
		if err != nil {
			return fmt.Errorf("fault '%s': '%s' is not a duration", silent, text)
		}
		*d = caddy.Duration(parsed)
	}
	h.Fault = append(h.Fault, f)
	return f.checkTimes()
}

// Interface guard
var _ caddyfile.Unmarshaler = (*Handler)(nil)
