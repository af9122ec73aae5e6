package metrics

import (
	"slices"

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
	// PerhapsOurs: the client left while it waited. It may have changed its
	// mind, or lost its patience.
	PerhapsOurs Fault = "unknown"
	// ServiceFault: the balancer and its backends could not serve the request.
	ServiceFault Fault = "service"
)

// callersMistakes are the classes of the balancer's own answers to mistakes of
// callers.
var callersMistakes = []string{apierror.Unauthenticated, apierror.InvalidRequest, apierror.NoSuchModel, apierror.CallerLimited}

// FaultOf returns whose fault an answer of the class is. The alerts use the
// same classes. An unknown class is a fault of the service.
func FaultOf(class string) Fault {
	switch c := verdict.Class(class); {
	case c == verdict.Served:
		return NoFault
	case c == verdict.ClientLeftWaiting:
		return PerhapsOurs
	case c.OfClient():
		return CallersFault
	}
	switch {
	case class == apierror.Ready, class == apierror.Unready, class == apierror.Models, class == apierror.Usage:
		return NoFault
	case slices.Contains(callersMistakes, class):
		return CallersFault
	}
	return ServiceFault
}
