package metrics

import (
	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// Fault says whose fault it is that a request was not served.
type Fault string

const (
	// NoFault: the request was served, or was not for a backend.
	NoFault Fault = ""
	// CallersFault: the caller made a mistake, or left.
	CallersFault Fault = "caller"
	// PerhapsOurs: the client left while it waited. It may have changed its mind, or lost its patience.
	PerhapsOurs Fault = "unknown"
	// ServiceFault: the balancer and its backends could not serve the request.
	ServiceFault Fault = "service"
)

// FaultOf returns whose fault an answer of the class is. The alerts use the same classes.
// An unknown class is a fault of the service.
func FaultOf(class string) Fault {
	switch class {
	case string(verdict.Served), apierror.Ready, apierror.Unready, apierror.Models, apierror.Usage:
		return NoFault
	case string(verdict.ClientError), string(verdict.TooLarge), string(verdict.NotHere), string(verdict.Blocked), string(verdict.ClientLeft),
		apierror.Unauthenticated, apierror.InvalidRequest, apierror.NoSuchModel, apierror.CallerLimited:
		return CallersFault
	case string(verdict.ClientLeftWaiting):
		return PerhapsOurs
	}
	return ServiceFault
}
