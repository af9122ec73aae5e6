package metrics

import (
	"slices"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// Fault says who is at fault if a request was not served.
type Fault string

const (
	// NoFault means that the request was served, or was not for a backend.
	NoFault Fault = ""
	// CallersFault means that the caller made a mistake, or left.
	CallersFault Fault = "caller"
	// PerhapsOurs means that the client left while it waited. It may have
	// changed its mind, or lost patience.
	PerhapsOurs Fault = "unknown"
	// ServiceFault means that the balancer and its backends could not serve the
	// request.
	ServiceFault Fault = "service"
)

// callersMistakes are the classes of the balancer's own answers to callers'
// mistakes.
var callersMistakes = []string{apierror.Unauthenticated, apierror.InvalidRequest, apierror.NoSuchModel,
	apierror.CallerLimited}

// FaultOf returns who is at fault for an answer of the class. The alerts use
// the same classes. An unknown class is a fault of the service.
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
