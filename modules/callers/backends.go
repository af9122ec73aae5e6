package callers

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

// matches reports whether the name of a backend matches one of names, in which
// * stands for any characters. If names is nil, every backend matches.
func matches(names []string, backend string) bool {
	return names == nil || slices.ContainsFunc(names, func(name string) bool {
		pattern := strings.ReplaceAll(regexp.QuoteMeta(name), `\*`, ".*")
		return regexp.MustCompile("^(?s:" + pattern + ")$").MatchString(backend)
	})
}

// checkBackends returns an error if a name of the option backends matches no
// backend. holder names the caller or the tier in errors.
func checkBackends(holder string, names []string, backends []seam.NamedBackend) error {
	var known []string
	for _, b := range backends {
		known = append(known, b.Name)
	}
	return checkNames(holder, "backend", names, func(name string) error {
		if known == nil ||
			slices.ContainsFunc(known, func(b string) bool { return b == "" || matches([]string{name}, b) }) {
			return nil
		}
		return fmt.Errorf("%s: no backend has the name '%s': expected some of %s, or a name with *",
			holder, name, strings.Join(known, ", "))
	})
}

// modelsOf returns the models of the backends that match names. It returns nil
// if one of these serves any model, or if the models are not known yet.
func modelsOf(backends []seam.NamedBackend, names []string) (models []string) {
	known := make(map[string]bool)
	for _, b := range backends {
		switch {
		case b.Name == "" && names != nil:
			return nil
		case !matches(names, b.Name):
			continue
		case b.Models == nil:
			return nil
		}
		for _, model := range b.Models {
			if !known[model] {
				models, known[model] = append(models, model), true
			}
		}
	}
	return models
}

func setOf(names []string) map[string]bool {
	set := make(map[string]bool, len(names))
	for _, name := range names {
		set[name] = true
	}
	return set
}

// modelsAmong returns the models that a caller may use, and the models that its
// list of models shows. models are those of the caller's option, and have those
// of the backends. nil stands for any model.
func modelsAmong(models, have []string) (may, listed []string) {
	if models == nil || have == nil {
		return models, slices.Concat(models, have)
	}
	known := setOf(have)
	may = slices.DeleteFunc(slices.Clone(models), func(model string) bool { return !known[model] })
	return may, may
}
