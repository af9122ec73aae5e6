package admin

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
)

// ownErrors is what Caddy puts before an error of an openai_lb. What is before it names only servers and routes by number.
const ownErrors = "provision http.handlers.openai_lb: "

// values match what an error repeats of a configuration: a placeholder, a value in quotes, or the path of a file.
var values = regexp.MustCompile(`\{(?:env|file)\.[^{}]+\}|'[^']{3,}'|open /[^:]+`)

// shortened returns an error about a configuration without Caddy's path to it, and with the line of the value that it names.
// The text of the configuration may be in no file.
func shortened(err error, file string) error {
	at := strings.LastIndex(err.Error(), ownErrors)
	if at < 0 {
		return err
	}
	short := err.Error()[at+len(ownErrors):]
	text, _ := os.ReadFile(file)
	for _, value := range values.FindAllString(short, -1) {
		value = strings.TrimPrefix(strings.Trim(value, "'"), "open ")
		if before, _, found := strings.Cut(string(text), value); found {
			return fmt.Errorf("%s, at %s:%d", short, file, 1+strings.Count(before, "\n"))
		}
	}
	return errors.New(short)
}
