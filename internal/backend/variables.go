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
	// DefaultPrefix is the prefix of the sample's variables.
	DefaultPrefix = "BACKEND"
	// TimeoutVariable is the name of the variable that limits the time of a
	// request.
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

// CheckPrefix returns an error if the prefix of variables, the value of
// backends_from_env, is not valid.
func CheckPrefix(prefix string) error {
	if !validPrefix.MatchString(prefix) {
		return fmt.Errorf("backends_from_env '%s' is not a prefix of environment variables, such as %s: expected letters, digits and _, and no _ at the end",
			prefix, DefaultPrefix)
	}
	return nil
}

// ExampleVariables returns the names of a backend's variables, for an error.
func ExampleVariables(prefix string) string {
	return fmt.Sprintf("%[1]s_1_%[2]s, %[1]s_1_%[3]s and %[1]s_1_%[4]s",
		prefix, urlVariable, priorityVariable, apiKeyVariable)
}

// described is a backend that variables describe.
type described struct {
	// Prefix is the prefix of its variables, such as BACKEND_1.
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
	// Value is the value without white space around it. It is empty if the
	// variable is not set.
	Value string
}

// environment maps names in upper case to variables, because the sample ignores
// case.
type environment map[string]variable

// parseEnvironment parses variables as [os.Environ] returns them.
func parseEnvironment(environ []string) environment {
	env := make(environment)
	// Of two names that differ only in case, the one in upper case sorts first.
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

// backends returns the backends whose variables have the prefix. Its errors
// contain no key.
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

// ofService matches the rest of the names of variables that Kubernetes sets for
// a service with the prefix's name.
var ofService = regexp.MustCompile(`^(SERVICE_(HOST|PORT(_.*)?)|PORT(_.*)?)$`)

// checkNames rejects unknown variables of a backend, such as
// BACKEND_1_DEPLOYMENT.
func (e environment) checkNames(prefix string) error {
	properties := []string{urlVariable, priorityVariable, apiKeyVariable, deploymentVariable}
	for _, name := range slices.Sorted(maps.Keys(e)) {
		property, ok := strings.CutPrefix(name, strings.ToUpper(prefix)+"_")
		if ok && !slices.Contains(properties, property) && !ofService.MatchString(property) {
			return fmt.Errorf("%s is not a variable of a backend: expected one of %s_%s",
				e[name].Name, prefix, strings.Join(properties, ", "+prefix+"_"))
		}
	}
	return nil
}

// words returns the words that distinguish the backends: numbers in order, then
// other words.
//
// Kubernetes also sets variables such as BACKEND_SERVICE_HOST for a service
// called backend. So a name counts only if it has one word without an
// underscore, and then the name of a known property.
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

// digits returns the digits of a number without leading zeros, or an empty
// string if the word is not a number.
func digits(word string) string {
	if strings.Trim(word, "0123456789") != "" {
		return ""
	}
	return cmp.Or(strings.TrimLeft(word, "0"), "0")
}

// timeout returns how long a request may take. In the sample, this is how long
// a request may be idle.
func (e environment) timeout() (time.Duration, error) {
	v := e.lookup(TimeoutVariable)
	if v.Value == "" {
		return defaultTimeout, nil
	}
	seconds, err := v.number()
	return time.Duration(seconds) * time.Second, err
}

// number parses a whole number of 1 or more.
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
