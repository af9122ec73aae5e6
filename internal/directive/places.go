package directive

import (
	"regexp"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// Places are the lines of a directive in a Caddyfile. With them, an error about
// a value that is known only at load names its line as other errors do.
type Places []place

// place is a line. It has a depth of 1 in the block of the directive, and of 2
// in a block of an option.
type place struct {
	depth int
	words []string
	at    caddyfile.Dispenser
}

// PlacesOf returns the lines of the directive that a dispenser has, and leaves
// the dispenser at its end.
func PlacesOf(d *caddyfile.Dispenser) (lines Places) {
	d.Reset()
	depth, file, line := 0, "", 0
	for d.Next() {
		if d.Val() == "}" {
			depth--
			continue
		}
		if len(lines) == 0 || d.File() != file || d.Line() != line {
			file, line = d.File(), d.Line()
			lines = append(lines, place{depth: depth, at: *d})
		}
		last := &lines[len(lines)-1]
		last.words = append(last.words, d.Val())
		if d.Val() == "{" {
			depth++
		}
	}
	return lines
}

var (
	// ofBackend matches an error about a backend, its option, and the first
	// argument of that.
	ofBackend = regexp.MustCompile(`^backend (\d+)[^:]*: (\w+)(?: ([^ :]+):)?`)
	// ofOption matches an error about an option, and its first argument.
	ofOption = regexp.MustCompile(`^(\w+)(?: ["']([^"']+)["'])?: `)
)

// WrapErr adds the file and the line to an error that begins with the name of
// an option, perhaps after the number of a backend. It leaves any other error
// as it is.
func (p Places) WrapErr(err error) error {
	if of := ofBackend.FindStringSubmatch(err.Error()); of != nil {
		number, _ := strconv.Atoi(of[1])
		return p.backend(number).option(of[2], of[3]).wrap(err)
	}
	if of := ofOption.FindStringSubmatch(err.Error()); of != nil {
		for _, line := range p {
			if line.depth == 1 && line.is(of[1], of[2]) {
				return line.at.WrapErr(err)
			}
		}
	}
	return err
}

// backend returns the lines of a backend. The first one has the number 1.
func (p Places) backend(number int) Places {
	for i, line := range p {
		if line.depth != 1 || !line.is("backend", "") {
			continue
		}
		if number--; number == 0 {
			end := i + 1
			for end < len(p) && p[end].depth > 1 {
				end++
			}
			return p[i:end]
		}
	}
	return nil
}

// option returns the line of an option in the block of a backend, or else that
// of the backend.
func (p Places) option(name, argument string) Places {
	for i, line := range p {
		if line.depth == 2 && line.is(name, argument) {
			return p[i : i+1]
		}
	}
	return p
}

func (p Places) wrap(err error) error {
	if len(p) == 0 {
		return err
	}
	return p[0].at.WrapErr(err)
}

// is reports whether a line begins with an option, and an argument if it is not
// empty.
func (l place) is(name, argument string) bool {
	return l.words[0] == name && (argument == "" || len(l.words) > 1 && strings.EqualFold(l.words[1], argument))
}
