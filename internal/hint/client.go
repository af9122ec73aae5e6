package hint

import (
	"math"
	"net/http"
	"strconv"
	"time"
)

// The bounds of what a client is told to wait. Some SDKs sleep for as long as they are told
// (openai-node 6.26 to 7.4), others ignore or refuse more than a minute or two (openai-python,
// openai-go), and most treat 0 as no answer.
const (
	minClientWait = time.Second
	maxClientWait = 59 * time.Second
)

// ClientSeconds is the wait in whole seconds, within the bounds: the only form of Retry-After that
// every SDK reads.
func ClientSeconds(wait time.Duration) int {
	return int(math.Ceil(min(max(wait, minClientWait), maxClientWait).Seconds()))
}

// Set tells a client how long to wait.
func Set(header http.Header, wait time.Duration) {
	wait = min(max(wait, minClientWait), maxClientWait)
	header["Retry-After"] = []string{strconv.Itoa(ClientSeconds(wait))}
	header["Retry-After-Ms"] = []string{strconv.FormatInt(wait.Milliseconds(), 10)}
}

// Rewrite replaces the hints in a backend's reply, if there are any. A backend speaks only for
// itself, and in forms that some SDKs cannot read.
func Rewrite(header http.Header, wait time.Duration) {
	hinted := false
	for _, name := range []string{"Retry-After", "Retry-After-Ms", "X-Ms-Retry-After-Ms"} {
		hinted = hinted || header[name] != nil
		delete(header, name)
	}
	if hinted {
		Set(header, wait)
	}
}
