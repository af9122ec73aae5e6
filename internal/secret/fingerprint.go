package secret

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"net/http"
	"slices"

	"github.com/openai-lb/caddy-openai-lb/internal/callerkeys"
)

// Fingerprint tells credentials of a backend apart without holding them: by the
// scheme, by the identity of what supplies the credential, if anything does, and
// by those headers of the backend that may be a part of it, for example a
// gateway's key.
func Fingerprint(scheme, identity string, header http.Header) string {
	sum := sha256.New()
	fmt.Fprintf(sum, "%q", scheme)
	if identity != "" {
		fmt.Fprintf(sum, " %q", identity)
	}
	for _, name := range slices.Sorted(maps.Keys(header)) {
		if InHeader(name) || callerkeys.IsCredential(name) { // it decides which account pays
			fmt.Fprintf(sum, " %q %q", name, header[name])
		}
	}
	return hex.EncodeToString(sum.Sum(nil)[:16])
}
