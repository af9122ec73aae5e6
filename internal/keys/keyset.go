package keys

import (
	"slices"
	"strings"
)

// keySet is the keys of a request. Nearly every request has at most one.
type keySet struct {
	one  string
	more []string
}

func (k *keySet) add(key string) {
	switch {
	case len(key) < minLength, key == k.one:
		return
	case k.one == "":
		k.one = key
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

// in reports whether a value is one of the keys, with or without a scheme such
// as Bearer.
func (k *keySet) in(value string) bool {
	return k.one != "" &&
		(isKey(value, k.one) || slices.ContainsFunc(k.more, func(key string) bool { return isKey(value, key) }))
}

func (k *keySet) inAny(values []string) bool { return slices.ContainsFunc(values, k.in) }

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
