package keys

import (
	"slices"
	"strings"
)

// keyProtocol is the prefix of the WebSocket subprotocol in which browsers send
// a key, because they cannot set a header.
const keyProtocol = "openai-insecure-api-key."

// credentialProtocols are the prefixes of subprotocols that identify a caller.
var credentialProtocols = []string{keyProtocol, "openai-organization.", "openai-project."}

// IsCredentialProtocol reports whether a WebSocket subprotocol identifies the
// caller.
func IsCredentialProtocol(protocol string) bool {
	return slices.ContainsFunc(credentialProtocols, func(prefix string) bool { return hasPrefixFold(protocol, prefix) })
}

// protocolsWithout returns the subprotocols for which leaveOut returns false,
// joined to one value. It returns nil if none is left.
func protocolsWithout(values []string, leaveOut func(protocol string) bool) []string {
	var kept []string
	for _, value := range values {
		for protocol := range strings.SplitSeq(value, ",") {
			if protocol = strings.TrimSpace(protocol); protocol != "" && !leaveOut(protocol) {
				kept = append(kept, protocol)
			}
		}
	}
	if kept == nil {
		return nil
	}
	return []string{strings.Join(kept, ", ")}
}

func hasPrefixFold(s, prefix string) bool {
	return len(s) >= len(prefix) && strings.EqualFold(s[:len(prefix)], prefix)
}
