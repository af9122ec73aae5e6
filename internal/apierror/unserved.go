package apierror

import (
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// Unserved returns the error that says why no backend has served a request:
// they refuse it now, or the last attempt has failed. all reports whether all
// refuse it for the same reason, or, if there is an object, all of the account
// that stores it. last is the class of the last attempt after which another
// backend could be tried. It is empty without one.
func Unserved(w pool.Why, all bool, object string, last verdict.Class, wait time.Duration) Error {
	switch {
	case w.Throttled != nil:
		return RateLimited(wait, all, object)
	case w.Busy:
		return Busy(wait, all, object)
	}
	switch last {
	case verdict.Credential, verdict.NotPermitted:
		return CredentialsRejected
	case verdict.NoCredential:
		return NoCredential(wait)
	case verdict.Timeout, verdict.Silent:
		return TimedOut
	case verdict.Unreachable:
		return Unreachable
	case "": // there is room again by now
		return Busy(wait, true, object)
	}
	return BrokenOff
}

// Executed returns the error for a request that is not sent again, because it
// may have been executed by an attempt of this class.
func Executed(class verdict.Class) Error {
	if class == verdict.Timeout {
		return PerhapsStillExecuted
	}
	return PerhapsExecuted
}
