package callers

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// Backend is what the options of callers have to know of a backend.
type Backend struct {
	// Name is its name. Empty: that is not known yet.
	Name string
	// Models are those that it lists. nil: it serves any model, or they are not
	// known yet.
	Models []string
}

// Matches reports whether a backend has one of these names, in which * stands
// for any characters. nil: any has.
func Matches(names []string, backend string) bool {
	return names == nil || slices.ContainsFunc(names, func(name string) bool {
		pattern := strings.ReplaceAll(regexp.QuoteMeta(name), `\*`, ".*")
		return regexp.MustCompile("^(?s:" + pattern + ")$").MatchString(backend)
	})
}

// checkBackends returns what is wrong with the option backends, if anything is.
func checkBackends(names []string, backends []Backend) error {
	var there []string
	for _, b := range backends {
		there = append(there, b.Name)
	}
	return checkNames("backend", names, func(name string) error {
		if there == nil || slices.ContainsFunc(there, func(b string) bool { return b == "" || Matches([]string{name}, b) }) {
			return nil
		}
		return fmt.Errorf(": no backend has the name '%s': expected some of %s, or a name with *", name, strings.Join(there, ", "))
	})
}

// modelsOf returns the models of those backends that have one of the names.
// nil: they serve any model, or are not known yet.
func modelsOf(backends []Backend, names []string) (models []string) {
	known := make(map[string]bool)
	for _, b := range backends {
		switch {
		case b.Name == "" && names != nil:
			return nil
		case !Matches(names, b.Name):
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

// modelsAmong returns those of the models that backends have, and what a list
// of models shows. nil: any.
func modelsAmong(models, have []string) (may, listed []string) {
	if models == nil || have == nil {
		return models, slices.Concat(models, have)
	}
	has := setOf(have)
	may = slices.DeleteFunc(slices.Clone(models), func(model string) bool { return !has[model] })
	return may, may
}
