package backend

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	// DefaultPrefix is what the names of the sample's variables begin with.
	DefaultPrefix = "BACKEND"
	// TimeoutVariable is the name of the one that limits the time of a request.
	TimeoutVariable = "HTTP_TIMEOUT_SECONDS"

	urlVariable        = "URL"
	priorityVariable   = "PRIORITY"
	apiKeyVariable     = "APIKEY"
	deploymentVariable = "DEPLOYMENT_NAME"

	defaultTimeout = 100 * time.Second

	// shortestKey is the length from which a value may be a key.
	shortestKey = 16
)

var validPrefix = regexp.MustCompile(`^[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?$`)

// CheckPrefix checks the prefix of variables' names, which is the value of
// backends_from_env.
func CheckPrefix(prefix string) error {
	if !validPrefix.MatchString(prefix) {
		return fmt.Errorf("backends_from_env '%s' is not a prefix of environment variables, such as %s: expected letters, digits and _, and no _ at the end",
			prefix, DefaultPrefix)
	}
	return nil
}

// ExampleVariables names the variables of a backend, for an error.
func ExampleVariables(prefix string) string {
	return fmt.Sprintf("%[1]s_1_%[2]s, %[1]s_1_%[3]s and %[1]s_1_%[4]s", prefix, urlVariable, priorityVariable, apiKeyVariable)
}

// described is a backend that variables describe.
type described struct {
	// Prefix is what the names of its variables begin with, such as BACKEND_1.
	Prefix     string
	URL        variable
	APIKey     variable
	Priority   int
	Deployment string
}

// variable is an environment variable.
type variable struct {
	// Name is the name under which it is set.
	Name string
	// Value has no white space around it. It is empty if the variable is not
	// set.
	Value string
}

// environment has variables by their names in capitals: the sample takes them
// in any case.
type environment map[string]variable

// parseEnvironment reads variables as [os.Environ] returns them.
func parseEnvironment(environ []string) environment {
	env := make(environment)
	// of two names that differ only in case, the one in capitals sorts first
	for _, pair := range slices.Sorted(slices.Values(environ)) {
		name, value, _ := strings.Cut(pair, "=")
		if key := strings.ToUpper(name); env[key].Name == "" {
			env[key] = variable{name, strings.TrimSpace(value)}
		}
	}
	return env
}

// lookup returns a variable, with an empty value if it is not set.
func (e environment) lookup(name string) variable {
	v := e[strings.ToUpper(name)]
	v.Name = cmp.Or(v.Name, name)
	return v
}

// backends returns the backends of which the variables' names begin with the
// prefix. Its errors contain no key.
func (e environment) backends(prefix string) ([]described, error) {
	if err := CheckPrefix(prefix); err != nil {
		return nil, err
	}
	var backends []described
	for _, word := range e.words(prefix) {
		b := described{Prefix: prefix + "_" + word}
		b.URL = e.lookup(b.Prefix + "_" + urlVariable)
		if b.URL.Value == "" {
			return nil, fmt.Errorf("%s is required: expected the URL of an Azure OpenAI resource", b.URL.Name)
		}
		var err error
		if b.Priority, err = e.lookup(b.Prefix + "_" + priorityVariable).number(); err != nil {
			return nil, err
		}
		b.APIKey = e.lookup(b.Prefix + "_" + apiKeyVariable)
		b.Deployment = e.lookup(b.Prefix + "_" + deploymentVariable).Value
		if err := e.checkNames(b.Prefix); err != nil {
			return nil, err
		}
		backends = append(backends, b)
	}
	return backends, nil
}

// ofService matches the rest of a variable's name that Kubernetes sets for each
// service of the prefix's name.
var ofService = regexp.MustCompile(`^(SERVICE_(HOST|PORT(_.*)?)|PORT(_.*)?)$`)

// checkNames refuses variables of a backend that are not known, such as
// BACKEND_1_DEPLOYMENT.
func (e environment) checkNames(prefix string) error {
	properties := []string{urlVariable, priorityVariable, apiKeyVariable, deploymentVariable}
	for _, name := range slices.Sorted(maps.Keys(e)) {
		property, ok := strings.CutPrefix(name, strings.ToUpper(prefix)+"_")
		if ok && !slices.Contains(properties, property) && !ofService.MatchString(property) {
			return fmt.Errorf("%s is not a variable of a backend: expected one of %s_%s", e[name].Name, prefix, strings.Join(properties, ", "+prefix+"_"))
		}
	}
	return nil
}

// words returns the words that tell the backends apart: numbers in their order,
// then the others.
//
// Kubernetes sets variables for a service called backend, too, such as
// BACKEND_SERVICE_HOST. So a name counts only if it has one word without an
// underscore, and then the name of a property that we know.
func (e environment) words(prefix string) []string {
	var words []string
	for name := range e {
		rest, ok := strings.CutPrefix(name, strings.ToUpper(prefix)+"_")
		word, property, _ := strings.Cut(rest, "_")
		if !ok || word == "" || slices.Contains(words, word) {
			continue
		}
		switch property {
		case urlVariable, priorityVariable, apiKeyVariable, deploymentVariable:
			words = append(words, word)
		}
	}
	slices.SortFunc(words, func(a, b string) int {
		digitsA, digitsB := digits(a), digits(b)
		if digitsA == "" || digitsB == "" {
			return cmp.Or(strings.Compare(digitsB, digitsA), strings.Compare(a, b))
		}
		return cmp.Or(cmp.Compare(len(digitsA), len(digitsB)), strings.Compare(digitsA, digitsB), strings.Compare(a, b))
	})
	return words
}

// digits returns the digits of a number without leading zeros, and nothing if
// the word is not a number.
func digits(word string) string {
	if strings.Trim(word, "0123456789") != "" {
		return ""
	}
	return cmp.Or(strings.TrimLeft(word, "0"), "0")
}

// timeout is how long a request may take. In the sample, that is how long it
// may be idle.
func (e environment) timeout() (time.Duration, error) {
	v := e.lookup(TimeoutVariable)
	if v.Value == "" {
		return defaultTimeout, nil
	}
	seconds, err := v.number()
	return time.Duration(seconds) * time.Second, err
}

// number reads a whole number of 1 or more.
func (v variable) number() (int, error) {
	n, err := strconv.Atoi(v.Value)
	switch {
	case v.Value == "":
		return 0, fmt.Errorf("%s is required: expected a whole number of 1 or more", v.Name)
	case err != nil || n < 1 || n > math.MaxInt32:
		value := v.Value
		if len(value) >= shortestKey {
			value = "…" // it may be a key in the wrong variable
		}
		return 0, fmt.Errorf("%s '%s' is not a whole number of 1 or more", v.Name, value)
	}
	return n, nil
}
