package traffic

import (
	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// Fault is whose fault it is that a request was not served.
type Fault string

const (
	// NoFault: the request was served, or asked nothing of a backend.
	NoFault Fault = ""
	// CallersFault: the caller made a mistake, or left.
	CallersFault Fault = "caller"
	// ServiceFault: the balancer and its backends could not serve the request.
	ServiceFault Fault = "service"
)

// FaultOf returns whose fault an answer of the class is, as the alerts have it. A class
// that is not known is a fault of the service.
func FaultOf(class string) Fault {
	switch class {
	case string(verdict.Served), apierror.Ready, apierror.Unready, apierror.Models:
		return NoFault
	case string(verdict.ClientError), string(verdict.TooLarge), string(verdict.ClientLeft),
		apierror.Unauthenticated, apierror.InvalidRequest, apierror.NoSuchModel:
		return CallersFault
	}
	return ServiceFault
}
