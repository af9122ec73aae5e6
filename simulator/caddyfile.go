package simulator

import (
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

func init() {
	httpcaddyfile.RegisterHandlerDirective("openai_simulator", parseCaddyfile)
	httpcaddyfile.RegisterDirectiveOrder("openai_simulator", httpcaddyfile.Before, "reverse_proxy")
}

func parseCaddyfile(helper httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	h := new(Handler)
	if err := h.UnmarshalCaddyfile(helper.Dispenser); err != nil {
		return nil, err
	}
	return h, nil
}

// optionNames are the words a block may have, in the order of the reference.
var optionNames = []string{
	"name", "api_key", "deployments", "region", "requests_per_minute", "request_window", "tokens_per_minute",
	"ptu", "input_tpm_per_ptu", "output_ratio", "bucket_seconds", "hints", "error_body",
	"first_token_latency", "token_latency", "output_tokens", "fault", "allow_fault_header", "status_path",
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
//	    ptu                 <units>            # in place of the three above
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
//
//	    fault               <action> [<every>] # repeatable
//	    allow_fault_header
//	    status_path         <path>
//	}
//
// The fields of Handler say what each one means and what holds without it, and
// those of Fault list the actions.
func (h *Handler) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume the directive's name
	if d.NextArg() {
		return d.Errf("unexpected argument '%s': the options of openai_simulator go into a block", d.Val())
	}
	seen := make(map[string]bool)
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		name := d.Val()
		if seen[name] && name != "api_key" && name != "fault" {
			return d.Errf("option '%s' is given twice", name)
		}
		seen[name] = true
		if err := h.unmarshalOption(d, name); err != nil {
			return err
		}
		if d.NextArg() {
			return d.Errf("spare argument '%s' after option '%s'", d.Val(), name)
		}
		if d.NextBlock(d.Nesting()) {
			return d.Errf("option '%s' takes no block", name)
		}
	}
	return nil
}

func (h *Handler) unmarshalOption(d *caddyfile.Dispenser, name string) error {
	switch name {
	case "name":
		return parseWord(d, &h.Name)
	case "api_key":
		return parseWords(d, &h.APIKey)
	case "deployments":
		return parseWords(d, &h.Deployments)
	case "region":
		return parseWord(d, &h.Region)
	case "requests_per_minute":
		return parseCount(d, &h.RequestsPerMinute)
	case "request_window":
		return h.unmarshalWindow(d)
	case "tokens_per_minute":
		return parseCount(d, &h.TokensPerMinute)
	case "ptu":
		return parseCount(d, &h.PTU)
	case "input_tpm_per_ptu":
		return parseCount(d, &h.InputTPMPerPTU)
	case "output_ratio":
		return parseFloat(d, &h.OutputRatio)
	case "bucket_seconds":
		return parseFloat(d, &h.BucketSeconds)
	case "hints":
		return parseChoice(d, hintStyles, &h.Hints)
	case "error_body":
		return parseChoice(d, bodyStyles, &h.ErrorBody)
	case "first_token_latency":
		return parseDuration(d, &h.FirstTokenLatency)
	case "token_latency":
		return parseDuration(d, &h.TokenLatency)
	case "output_tokens":
		return parseCount(d, &h.OutputTokens)
	case "fault":
		return h.unmarshalFault(d)
	case "allow_fault_header":
		h.AllowFaultHeader = true
		return nil
	case "status_path":
		return parseWord(d, &h.StatusPath)
	default:
		return d.Errf("unknown option '%s': want one of %s", name, strings.Join(optionNames, ", "))
	}
}

func (h *Handler) unmarshalWindow(d *caddyfile.Dispenser) error {
	if err := parseDuration(d, &h.RequestWindow); err != nil {
		return err
	}
	if err := checkWindow(h.RequestWindow); err != nil {
		return d.WrapErr(err)
	}
	return nil
}

func (h *Handler) unmarshalFault(d *caddyfile.Dispenser) error {
	var f Fault
	if err := parseWord(d, &f.Action); err != nil {
		return err
	}
	if _, err := parseAction(f.Action); err != nil {
		return d.WrapErr(err)
	}
	if d.NextArg() {
		var err error
		if f.Every, err = strconv.Atoi(d.Val()); err != nil || f.Every < 1 {
			return d.Errf("fault '%s' wants to know on which requests: a whole number above 0, not '%s'", f.Action, d.Val())
		}
	}
	h.Fault = append(h.Fault, f)
	return nil
}

// The parsers below start at an option's name and read its one argument.

func parseWord(d *caddyfile.Dispenser, field *string) error {
	name := d.Val()
	if !d.NextArg() || d.Val() == "" {
		return d.Errf("option '%s' wants a value", name)
	}
	*field = d.Val()
	return nil
}

// parseWords reads all arguments. It does not show them: they may be keys.
func parseWords(d *caddyfile.Dispenser, field *[]string) error {
	name, args := d.Val(), d.RemainingArgs()
	if len(args) == 0 || slices.Contains(args, "") {
		return d.Errf("option '%s' wants one value or more, none of them empty", name)
	}
	*field = append(*field, args...)
	return nil
}

func parseChoice(d *caddyfile.Dispenser, choices []string, field *string) error {
	name := d.Val()
	if err := parseWord(d, field); err != nil {
		return err
	}
	if !slices.Contains(choices, *field) {
		return d.Errf("option '%s' is '%s': want one of %s", name, *field, strings.Join(choices, ", "))
	}
	return nil
}

func parseCount(d *caddyfile.Dispenser, field *int) error {
	name, value := d.Val(), ""
	if err := parseWord(d, &value); err != nil {
		return err
	}
	n, err := strconv.Atoi(value)
	if err != nil || n < 1 {
		return d.Errf("option '%s' wants a whole number above 0, not '%s'", name, value)
	}
	*field = n
	return nil
}

func parseFloat(d *caddyfile.Dispenser, field *float64) error {
	name, value := d.Val(), ""
	if err := parseWord(d, &value); err != nil {
		return err
	}
	n, err := strconv.ParseFloat(value, 64)
	if err != nil || !(n > 0) || math.IsInf(n, 1) {
		return d.Errf("option '%s' wants a number above 0, not '%s'", name, value)
	}
	*field = n
	return nil
}

func parseDuration(d *caddyfile.Dispenser, field *caddy.Duration) error {
	name, value := d.Val(), ""
	if err := parseWord(d, &value); err != nil {
		return err
	}
	duration, err := caddy.ParseDuration(value)
	if err != nil || duration < 0 {
		return d.Errf("option '%s' wants a duration such as 250ms, not '%s'", name, value)
	}
	*field = caddy.Duration(duration)
	return nil
}

// Interface guard
var _ caddyfile.Unmarshaler = (*Handler)(nil)
