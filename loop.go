package openailb

import (
	"crypto/rand"
	"net/http"
	"slices"
	"strings"
)

// loopHeader lists the marks of the handlers that a request has passed. CDNs do
// the same with CDN-Loop (RFC 8586).
const loopHeader = "Openai-Lb-Loop"

// loopMark is a handler's mark, which finds the requests that the handler has
// sent and that came back. They do if the address of a backend leads to the
// balancer, directly or through a proxy or the pools of other balancers. A loop
// without an end would use two more connections each round, until no file
// descriptor is left.
//
// A handler adds its mark to each request for a backend, but not to requests
// for known providers, which need not know what stands in front of them. The
// mark is random, so that no client can guess it. Each handler has its own
// mark, because a pool may be a backend of another pool in the same Caddy. A
// reload makes a new mark, so a loop ends one round later. The mark of a plain
// reverse_proxy is empty and finds nothing.
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

// add adds the mark to the header of a request to a backend. It copies the list
// of values, because the client's request shares it.
func (m loopMark) add(header http.Header) {
	header[loopHeader] = append(slices.Clip(header[loopHeader]), string(m))
}
