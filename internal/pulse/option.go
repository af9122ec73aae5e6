package pulse

import (
	"fmt"
	"math"
	"strconv"
)

// Factor is how many times the usual wait is too long. 0: no wait is. It is the option silence.
type Factor float64

// leastFactor is the lowest factor: half of all waits are longer than usual.
const leastFactor, mostFactor = 2, math.MaxInt32

func (f Factor) valid() bool { return f >= leastFactor && f <= mostFactor }

// Parse sets *into to the factor of a Caddyfile.
func Parse(into **Factor) func(args []string) error {
	return func(args []string) error {
		number, err := strconv.ParseFloat(args[0], 64)
		f := Factor(number)
		if args[0] == "off" {
			f = 0
		} else if err != nil || !f.valid() {
			return fmt.Errorf("silence '%s' is not a number of %d or more, or off", args[0], leastFactor)
		}
		*into = &f
		return nil
	}
}

// Provision checks the factor. Without one, it sets the default.
func Provision(f **Factor) error {
	if *f == nil {
		*f = new(Factor(4))
	}
	if **f != 0 && !(*f).valid() {
		return fmt.Errorf("silence '%g' is not a number of %d or more, nor 0 for off", **f, leastFactor)
	}
	return nil
}
