package statuspage

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// detail returns the reason of a cooldown, in addition to the class. more is
// what else is known of the cause.
func detail(status int, cause, more string) (text string) {
	if status != 0 {
		text = fmt.Sprintf(" (%d)", status)
	}
	if cause != "" && cause != strconv.Itoa(status) {
		text += ": " + words(cause)
	}
	if more != "" {
		text += ", " + cut(more)
	}
	return text
}

// several returns a number of things, with their name for one of them.
func several[T int | int64](n T, thing string) string {
	if n != 1 {
		thing += "s"
	}
	return strconv.FormatInt(int64(n), 10) + " " + thing
}

// words makes a class or a state readable.
func words(class string) string { return strings.ReplaceAll(class, "_", " ") }

// firstOf lists the first of some names, and how many more there are.
func firstOf(most int, names []string, shown func(string) string) string {
	var texts []string
	for _, name := range names[:min(most, len(names))] {
		texts = append(texts, shown(name))
	}
	if more := len(names) - len(texts); more > 0 {
		texts = append(texts, fmt.Sprintf("%d more", more))
	}
	return strings.Join(texts, ", ")
}

// percent writes a share. It writes 0 % only for exactly 0, and 100 % only for
// exactly 1.
func percent(ratio *float64) string {
	if ratio == nil {
		return "–"
	}
	switch r := *ratio; {
	case r > 0 && r < .0005:
		return "< 0.1 %"
	case r < .0995 && r != 0:
		return fmt.Sprintf("%.1f %%", 100*r)
	case r < 1 && r >= .995:
		return "> 99 %"
	default:
		return fmt.Sprintf("%.0f %%", 100*r)
	}
}

// seconds writes a duration with two digits.
func seconds(s *float64) string {
	switch {
	case s == nil:
		return "–"
	case *s <= .01: // the first bucket of the histogram, nothing more is known in it
		return "< 10 ms"
	case *s < .0995:
		return fmt.Sprintf("%.0f ms", 1000**s)
	case *s < 1:
		return fmt.Sprintf("%.0f ms", math.Round(100**s)*10)
	case *s < 9.95:
		return fmt.Sprintf("%.1f s", *s)
	}
	return fmt.Sprintf("%.0f s", *s)
}

// short writes a number with three digits at most.
func short(n float64) string {
	for _, scale := range []struct {
		size float64
		unit string
	}{{1e9, " G"}, {1e6, " M"}, {1e3, " k"}} {
		if n >= scale.size {
			return digits(n/scale.size) + scale.unit
		}
	}
	return digits(n)
}

func digits(n float64) string {
	switch {
	case n == math.Trunc(n) || n >= 99.95:
		return fmt.Sprintf("%.0f", n)
	case n >= 9.995:
		return fmt.Sprintf("%.1f", n)
	}
	return fmt.Sprintf("%.2g", n)
}
