package waiting

import (
	"fmt"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2"
)

// Options are the option wait.
type Options struct {
	// Duration is how long a request waits at most, while all of its backends
	// throttle, or a limit of its caller by the second or minute is reached. It
	// is at most 10s. Required.
	Duration caddy.Duration `json:"duration,omitempty"`

	// Places is how many requests wait at a time for each model (of each tier,
	// if tiers keep shares), and for the limits of each caller. It is at most
	// 1000. Default: 10.
	Places *int `json:"places,omitempty"`
}

const (
	longest     = 10 * time.Second
	mostPlaces  = 1000
	usualPlaces = 10
)

// UnmarshalArgs sets the options to the arguments of a Caddyfile.
func (o *Options) UnmarshalArgs(args []string) error {
	duration, err := caddy.ParseDuration(args[0])
	if err != nil {
		return errDuration(args[0])
	}
	o.Duration = caddy.Duration(duration)
	if len(args) > 1 {
		places, err := strconv.Atoi(args[1])
		if err != nil {
			return errPlaces(args[1])
		}
		o.Places = &places
	}
	return o.Check()
}

// Check returns what is wrong with the options, if anything is. nil: they are
// not set.
func (o *Options) Check() error {
	switch {
	case o == nil:
		return nil
	case o.Duration <= 0 || time.Duration(o.Duration) > longest:
		return errDuration(time.Duration(o.Duration).String())
	case o.Places != nil && (*o.Places < 1 || *o.Places > mostPlaces):
		return errPlaces(strconv.Itoa(*o.Places))
	}
	return nil
}

func errDuration(text string) error {
	return fmt.Errorf("wait '%s' is not a duration above 0, of at most %s", text, longest)
}

func errPlaces(text string) error {
	return fmt.Errorf("wait: places '%s' is not a whole number from 1 to %d", text, mostPlaces)
}
