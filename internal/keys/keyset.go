package keys

import (
	"slices"
	"strings"
)

// keySet is the keys of a request. Nearly every request has at most one.
type keySet struct {
	first string
	more  []string
}

func (k *keySet) add(key string) {
	switch {
	case len(key) < minLength, key == k.first:
		return
	case k.first == "":
		k.first = key
	default:
		k.more = append(k.more, key)
	}
}

func (k *keySet) addProtocols(values []string) {
	protocolsWithout(values, func(protocol string) bool {
		if hasPrefixFold(protocol, keyProtocol) {
			k.add(protocol[len(keyProtocol):])
		}
		return true
	})
}

// contains reports whether a value is one of the keys, with or without a scheme
// such as Bearer.
func (k *keySet) contains(value string) bool {
	return k.first != "" &&
		(isKey(value, k.first) || slices.ContainsFunc(k.more, func(key string) bool { return isKey(value, key) }))
}

func (k *keySet) containsAny(values []string) bool { return slices.ContainsFunc(values, k.contains) }

func isKey(value, key string) bool {
	if len(value) < len(key) {
		return false // as nearly always
	}
	value = strings.TrimSpace(value)
	return strings.HasSuffix(value, key) && (len(value) == len(key) || KeyIn(value) == key)
}

// KeyIn returns the key in the value of a header of any origin. The value may
// begin with a scheme, such as Bearer (RFC 6750).
func KeyIn(value string) string {
	value = strings.TrimSpace(value)
	if i := strings.IndexAny(value, " \t"); i >= 0 {
		return strings.TrimSpace(value[i:])
	}
	return value
}
