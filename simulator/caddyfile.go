package simulator

import (
	"fmt"
	"strconv"

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
//	    token_latency       <duration>
//	    output_tokens       <n>
//	    prompt_cache        <n>
//
//	    fault               <action> [<every>] # repeatable
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

		"first_token_latency": directive.DurationOrZero(&h.FirstTokenLatency),
		"token_latency":       directive.DurationOrZero(&h.TokenLatency),
		"output_tokens":       directive.Int(&h.OutputTokens, 1, directive.MaxInt),
		"prompt_cache":        directive.Int(&h.PromptCache, 1, directive.MaxInt),

		"fault":              directive.Args("an action and, optionally, a number", 1, 2, h.addFault).Repeatable(),
		"allow_fault_header": directive.Flag(&h.AllowFaultHeader),
		"early_grace":        directive.DurationOrZero(&h.EarlyGrace),
		"status_path":        directive.String(&h.StatusPath),
	})
}

func (h *Handler) addFault(args []string) error {
	f := Fault{Action: args[0]}
	if _, err := wire.ParseAction(f.Action); err != nil {
		return err
	}
	if len(args) == 2 {
		var err error
		if f.Every, err = strconv.Atoi(args[1]); err != nil || f.Every < 1 {
			return fmt.Errorf("fault '%s': '%s' is not a whole number of 1 or more", f.Action, args[1])
		}
	}
	h.Fault = append(h.Fault, f)
	return nil
}

// Interface guard
var _ caddyfile.Unmarshaler = (*Handler)(nil)
