package verdict

import (
	"net/http"
	"reflect"
	"testing"
)

func TestRatesAreReadWhateverTheOrderOfTheHeader(t *testing.T) {
	for name, row := range map[string]struct {
		header http.Header
		want   Rates
	}{
		"nothing":   {http.Header{"X-Ratelimit-Limit-Images": {"1"}, "X-Ratelimit-Tokens": {"2"}, "X-Request-Id": {"3"}}, Rates{}},
		"Azure's":   {http.Header{"X-Rate-Limit-Limit-Tokens": {"2"}, "X-Ratelimit-Renewalperiod-Tokens": {"10"}}, Rates{Tokens: Rate{Limit: Values{"2"}, Renewal: Values{"10"}}}},
		"both":      {http.Header{"X-Ratelimit-Limit-Tokens": {"-1", "5"}, "X-Rate-Limit-Limit-Tokens": {"2"}}, Rates{Tokens: Rate{Limit: Values{"-1", "5", "2"}}}},
		"a PTU's":   {http.Header{"Azure-Openai-Deployment-Utilization": {"89.3%"}, "X-Ms-Deployment-Name": {"ptu"}}, Rates{Utilization: Values{"89.3%"}, Deployment: Values{"ptu"}}},
		"Anthropic": {http.Header{"Anthropic-Ratelimit-Requests-Remaining": {"7"}}, Rates{Requests: Rate{Remaining: Values{"7"}}}},
		"a gateway's": {http.Header{"Anthropic-Ratelimit-Tokens-Remaining": {"7"}, "X-Ratelimit-Remaining-Tokens": {"8"}, "Anthropic-Ratelimit-Requests-Remaining": {"7"}, "X-Ratelimit-Limit-Requests": {"9"}},
			Rates{Tokens: Rate{Remaining: Values{"8"}}, Requests: Rate{Limit: Values{"9"}}}},
	} {
		for range 20 { // a map's order is random
			if got := ReadRates(row.header); !reflect.DeepEqual(got, row.want) {
				t.Errorf("%s: got %+v, want %+v", name, got, row.want)
			}
		}
	}
}
