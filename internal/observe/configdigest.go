package observe

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"slices"
)

// configDigestSize is the number of bytes of a digest. Replicas accept digests
// of this length from each other.
const configDigestSize = 6

// secretive are the options whose texts may be secrets. They include the
// options of other modules, and the fields of headers.
var secretive = []string{"api_key", "auth_options", "caller_identity", "header", "key", "lb_policy", "transport"}

// ConfigDigest returns a short digest of a handler's options as they were
// written, which is the same on every machine. It leaves out texts that may be
// secrets, the engine of state, which replicas may reach in several ways, and
// the priorities of backends, which differ by region.
func ConfigDigest(handler any) (string, error) {
	text, err := json.Marshal(handler)
	if err != nil {
		return "", err
	}
	var options map[string]any
	if err := json.Unmarshal(text, &options); err != nil {
		return "", err
	}
	delete(options, "state")
	backends, _ := options["backends"].([]any)
	for _, b := range backends {
		if b, ok := b.(map[string]any); ok {
			delete(b, "priority") // each region prefers its own
		}
	}
	if text, err = json.Marshal(withoutSecrets(options, true)); err != nil {
		return "", err
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:configDigestSize]), nil
}

// withoutSecrets clears the texts in the value that may be secrets. If public
// is true, it clears the texts of secretive options, and otherwise all texts.
// It always keeps the names of policies.
func withoutSecrets(value any, public bool) any {
	switch value := value.(type) {
	case string:
		if !public {
			return ""
		}
	case []any:
		for i, element := range value {
			value[i] = withoutSecrets(element, public)
		}
	case map[string]any:
		for name, element := range value {
			value[name] = withoutSecrets(element, name == "policy" || public && !slices.Contains(secretive, name))
		}
	}
	return value
}
