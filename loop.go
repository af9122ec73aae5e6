package openailb

import (
	"crypto/rand"
	"net/http"
	"slices"
	"strings"
)

// loopHeader lists the handlers that a request has passed, by their marks. CDNs
// do the same with CDN-Loop (RFC 8586).
const loopHeader = "Openai-Lb-Loop"

// loopMark finds the requests that a handler has sent, and that came back to
// it: the address of a backend is that of the balancer, or of a proxy that
// leads there, perhaps through the pools of other balancers. Without an end,
// each of them would hold two more connections until no file descriptor is
// left.
//
// A handler adds its mark to each request for a backend, but not to those for
// known providers, which need not know what stands in front of them. The mark
// is random, so that nobody else can name it, and each handler has its own: a
// pool may be a backend of another one in the same Caddy. A reload makes
// another mark, which ends a loop one round later. The mark of a plain
// reverse_proxy is empty, and finds nothing.
type loopMark string

func newLoopMark() loopMark { return loopMark(rand.Text()) }

// has reports whether a request has passed the handler.
func (m loopMark) has(header http.Header) bool {
	for _, list := range header[loopHeader] {
		for mark := range strings.SplitSeq(list, ",") {
			if m != "" && strings.TrimSpace(mark) == string(m) {
				return true
			}
		}
	}
	return false
}

// add marks a request that goes on to a backend. Clients share the values of
// the header, so these are not changed.
func (m loopMark) add(header http.Header) {
	header[loopHeader] = append(slices.Clip(header[loopHeader]), string(m))
}
