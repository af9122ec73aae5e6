package openailb

import (
	"cmp"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"
)

// The variables of backends_from_env are those of Microsoft's sample
// Azure-Samples/openai-aca-lb, so that its users need not change theirs.
const (
	defaultEnvPrefix = "BACKEND"

	envURL        = "URL"
	envPriority   = "PRIORITY"
	envAPIKey     = "APIKEY"
	envDeployment = "DEPLOYMENT_NAME"

	envTimeout        = "HTTP_TIMEOUT_SECONDS"
	defaultEnvTimeout = 100 * time.Second
)

var validEnvPrefix = regexp.MustCompile(`^[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?$`)

// checkEnvPrefix says what is wrong with a prefix, if anything is.
func checkEnvPrefix(prefix string) error {
	if !validEnvPrefix.MatchString(prefix) {
		return fmt.Errorf("backends_from_env '%s': expected what the variables' names begin with, like %s: letters, digits and _, and no _ at the end",
			prefix, defaultEnvPrefix)
	}
	return nil
}

// provisionFromEnv adds the backends that the environment describes. They come
// into being here, and not in the Caddyfile, so that no config holds them.
func (h *Handler) provisionFromEnv() error {
	if h.BackendsFromEnv == "" {
		return nil
	}
	if err := checkEnvPrefix(h.BackendsFromEnv); err != nil {
		return err
	}
	env := newEnvironment(os.Environ())
	names := env.backendNames(h.BackendsFromEnv)
	if len(names) == 0 && len(h.Backends) == 0 {
		return fmt.Errorf("backends_from_env: found no backend: expected variables like %[1]s_1_%[2]s, %[1]s_1_%[3]s and %[1]s_1_%[4]s",
			h.BackendsFromEnv, envURL, envPriority, envAPIKey)
	}
	for _, name := range names {
		b, err := env.backend(name, checkAuth(authAzureIdentity))
		if err != nil {
			return err
		}
		h.Backends = append(h.Backends, b)
	}
	timeout, err := env.timeout()
	if err != nil {
		return err
	}
	// there it is how long a request may be idle, whatever it waits for
	for _, d := range []*caddy.Duration{&h.ResponseHeaderTimeout, &h.StreamFirstEventTimeout, &h.StreamIdleTimeout} {
		*d = cmp.Or(*d, caddy.Duration(timeout))
	}
	h.logger.Info("backends from the environment", zap.Strings("variables", names), zap.Duration("timeout", timeout))
	return nil
}

// environment has variables by their names in capitals: the sample takes them
// in any case.
type environment map[string]variable

type variable struct {
	name  string // as it is set
	value string // without the white space around it
}

func newEnvironment(environ []string) environment {
	env := make(environment)
	// of two that differ in case alone, capitals come first
	for _, pair := range slices.Sorted(slices.Values(environ)) {
		name, value, _ := strings.Cut(pair, "=")
		if key := strings.ToUpper(name); env[key].name == "" {
			env[key] = variable{name, strings.TrimSpace(value)}
		}
	}
	return env
}

// lookup returns the variable. One that is not set is blank.
func (e environment) lookup(name string) variable {
	v := e[strings.ToUpper(name)]
	v.name = cmp.Or(v.name, name)
	return v
}

// backendNames returns what the names of each backend's variables begin with:
// those with numbers in their order, then the others. Kubernetes sets variables
// for a service called backend, such as BACKEND_SERVICE_HOST: only names that
// end in what we ask for count, after a word without an underscore.
func (e environment) backendNames(prefix string) []string {
	var words []string
	for name := range e {
		rest, ok := strings.CutPrefix(name, strings.ToUpper(prefix)+"_")
		word, property, _ := strings.Cut(rest, "_")
		if !ok || word == "" || slices.Contains(words, word) {
			continue
		}
		switch property {
		case envURL, envPriority, envAPIKey, envDeployment:
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
	for i, word := range words {
		words[i] = prefix + "_" + word
	}
	return words
}

// digits returns the digits of a number, without zeros in front of others, and
// nothing of any other word.
func digits(word string) string {
	if strings.Trim(word, "0123456789") != "" {
		return ""
	}
	return cmp.Or(strings.TrimLeft(word, "0"), "0")
}

// backend makes the one whose variables' names begin with this. identity is
// what keeps it from using Azure's identities, if anything does. Errors hold
// no key.
func (e environment) backend(name string, identity error) (*Backend, error) {
	rawURL := e.lookup(name + "_" + envURL)
	if rawURL.value == "" {
		return nil, fmt.Errorf("%s: expected the URL of an Azure OpenAI resource, found none", rawURL.name)
	}
	u, err := parseBackendURL(rawURL.value)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", rawURL.name, err)
	}
	// written by net/url it has no braces, which would be placeholders
	b := &Backend{URL: u.String(), Deployment: e.lookup(name + "_" + envDeployment).value}
	if b.Priority, err = e.lookup(name + "_" + envPriority).number(); err != nil {
		return nil, err
	}
	key := e.lookup(name + "_" + envAPIKey)
	if key.value == "" {
		if identity != nil {
			return nil, fmt.Errorf("%s: expected a key, found none, and %w", key.name, identity)
		}
		b.Auth = authAzureIdentity
		return b, nil
	}
	b.Auth, b.APIKey = authAPIKey, "{env."+key.name+"}"
	if _, err := resolveSecret(b.APIKey); err != nil {
		return nil, fmt.Errorf("%s: %w", key.name, err)
	}
	return b, nil
}

func (e environment) timeout() (time.Duration, error) {
	v := e.lookup(envTimeout)
	if v.value == "" {
		return defaultEnvTimeout, nil
	}
	seconds, err := v.number()
	return time.Duration(seconds) * time.Second, err
}

// number reads a whole number of 1 or more.
func (v variable) number() (int, error) {
	n, err := strconv.Atoi(v.value)
	switch {
	case v.value == "":
		return 0, fmt.Errorf("%s: expected a whole number of 1 or more, found none", v.name)
	case err != nil || n < 1 || n > maxInt:
		return 0, fmt.Errorf("%s: expected a whole number of 1 or more, found '%s'", v.name, v.value)
	}
	return n, nil
}
