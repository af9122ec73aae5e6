package openailb

import (
	"net/http"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
)

// The values of ratelimit_headers: whose limits a reply names.
const (
	rateLimitsOfCaller  = "caller"
	rateLimitsOfPool    = "pool"
	rateLimitsOfBackend = "backend"
	rateLimitsOff       = "off"
)

var rateLimitsOf = []string{rateLimitsOfCaller, rateLimitsOfPool, rateLimitsOfBackend, rateLimitsOff}

// setRateLimits makes the header of a reply say what ratelimit_headers wants.
func (ex *exchange) setRateLimits(header http.Header) {
	switch ex.balancer.rateLimits {
	case rateLimitsOff:
		quota.RemoveFields(header)
	case rateLimitsOfBackend: // what came from it stays
	case rateLimitsOfPool:
		ex.balancer.Pool.Limits(ex, time.Now()).Set(header, ex.isAzure())
	default:
		if ex.admission.Limited() {
			ex.admission.Limits(time.Now()).Set(header, ex.isAzure())
		}
	}
}

// isAzure reports whether the client speaks Azure's dialect.
func (ex *exchange) isAzure() bool {
	return ex.api.Route.Dialect == openaiapi.AzureV1 || ex.api.Route.Dialect == openaiapi.AzureClassic
}
