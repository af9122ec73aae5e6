package verdict

import (
	"math"
	"net/http"
	"slices"
	"strings"
)

// Rates has the rate limits in the header of a reply.
type Rates struct {
	Requests, Tokens Rate
	// Utilization is Azure's utilization of provisioned throughput: `89.3%`,
	// which may be over 100.
	Utilization Values
	// Deployment is the Azure deployment that served the request.
	Deployment Values
}

// Rate has the fields of one limit. Reset is a number of seconds or a duration,
// and Renewal the seconds after which the limit is counted anew.
type Rate struct{ Limit, Remaining, Reset, Renewal Values }

// Values are the values of a header, in Azure's two spellings.
type Values []string

// ReadRates reads the headers of OpenAI and Azure and, for what remains, of
// Anthropic.
func ReadRates(header http.Header) (r Rates) {
	var requests, tokens Values // of Anthropic
	for name, values := range header {
		switch name {
		case "Azure-Openai-Deployment-Utilization":
			r.Utilization = values
		case "X-Ms-Deployment-Name":
			r.Deployment = values
		case "Anthropic-Ratelimit-Requests-Remaining":
			requests = values
		case "Anthropic-Ratelimit-Tokens-Remaining":
			tokens = values
		default:
			if field, ok := strings.CutPrefix(name, "X-Ratelimit-"); ok {
				r.add(field, values, nil)
			} else if field, ok := strings.CutPrefix(name, "X-Rate-Limit-"); ok {
				// Azure has both (openai-python issue #937)
				r.add(field, nil, values)
			}
		}
	}
	r.Requests.orElse(requests)
	r.Tokens.orElse(tokens)
	return r
}

// orElse sets what remains if no other header describes the limit, because a
// gateway may send the headers of two providers.
func (r *Rate) orElse(remaining Values) {
	if r.Limit == nil && r.Remaining == nil {
		r.Remaining = remaining
	}
}

// add adds a field such as Limit-Tokens. first or second has its values,
// depending on the spelling.
func (r *Rates) add(field string, first, second []string) {
	kind, unit, _ := strings.Cut(field, "-")
	rate := &r.Requests
	switch unit {
	case "Requests":
	case "Tokens":
		rate = &r.Tokens
	default:
		return
	}
	var values *Values
	switch kind {
	case "Limit":
		values = &rate.Limit
	case "Remaining":
		values = &rate.Remaining
	case "Reset":
		values = &rate.Reset
	case "Renewalperiod":
		values = &rate.Renewal
	default:
		return
	}
	switch {
	case *values != nil:
		*values = slices.Concat(first, *values, second)
	case first != nil:
		*values = first
	default:
		*values = second
	}
}

// Number returns the first value that is neither negative nor infinite. A
// percent sign is ignored. Azure writes -1 where it does not track a limit
// (openai-dotnet issue #838).
func (v Values) Number() (float64, bool) {
	for _, text := range v {
		if n, ok := parseFloat(strings.TrimSuffix(strings.TrimSpace(text), "%")); ok && !math.IsInf(n, 1) {
			return n, true
		}
	}
	return 0, false
}
