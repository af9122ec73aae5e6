package verdict

import (
	"math"
	"net/http"
	"slices"
	"strings"
)

// Rates are what the header of a reply tells of rate limits.
type Rates struct {
	Requests, Tokens Rate
	// Utilization is Azure's for provisioned throughput: `89.3%`, which may be
	// over 100.
	Utilization Values
	// Deployment is that of Azure's which has served the request.
	Deployment Values
}

// Rate is what it tells of one limit. Reset is a number of seconds or a
// duration, and Renewal the seconds after which the limit is counted anew.
type Rate struct{ Limit, Remaining, Reset, Renewal Values }

// Values are those of a header, in Azure's two spellings.
type Values []string

// ReadRates reads the headers of OpenAI, Azure and, of what remains, Anthropic.
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
			} else if field, ok := strings.CutPrefix(name, "X-Rate-Limit-"); ok { // Azure has both (openai-python issue #937)
				r.add(field, nil, values)
			}
		}
	}
	r.Requests.orElse(requests)
	r.Tokens.orElse(tokens)
	return r
}

// orElse sets what remains, if nothing else tells of the limit: a gateway may
// send two providers' headers.
func (r *Rate) orElse(remaining Values) {
	if r.Limit == nil && r.Remaining == nil {
		r.Remaining = remaining
	}
}

// add adds a field like Limit-Tokens, of which one of the spellings has values.
func (r *Rates) add(field string, first, second []string) {
	what, of, _ := strings.Cut(field, "-")
	rate := &r.Requests
	switch of {
	case "Requests":
	case "Tokens":
		rate = &r.Tokens
	default:
		return
	}
	var into *Values
	switch what {
	case "Limit":
		into = &rate.Limit
	case "Remaining":
		into = &rate.Remaining
	case "Reset":
		into = &rate.Reset
	case "Renewalperiod":
		into = &rate.Renewal
	default:
		return
	}
	switch {
	case *into != nil:
		*into = slices.Concat(first, *into, second)
	case first != nil:
		*into = first
	default:
		*into = second
	}
}

// Number returns the first number that is neither negative nor infinite. It may
// be one of percent. Azure writes -1 where it does not track a limit
// (openai-dotnet issue #838).
func (v Values) Number() (float64, bool) {
	for _, text := range v {
		if n, ok := parseFloat(strings.TrimSuffix(strings.TrimSpace(text), "%")); ok && !math.IsInf(n, 1) {
			return n, true
		}
	}
	return 0, false
}
