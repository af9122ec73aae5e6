package verdict

import (
	"math"
	"net/http"
	"strconv"
	"time"
)

// The bounds of a client's Retry-After. Some SDKs sleep for as long as it says
// (openai-node 6.26 to 7.4), others ignore or reject more than a minute or two
// (openai-python, openai-go), and most treat 0 like no value.
const (
	minClientWait = time.Second
	maxClientWait = 59 * time.Second
)

// RetrySeconds returns the wait in whole seconds, within the bounds: the only
// form of Retry-After that every SDK reads.
func RetrySeconds(wait time.Duration) int {
	return int(math.Ceil(min(max(wait, minClientWait), maxClientWait).Seconds()))
}

// SetHint sets the headers that say how long a client must wait.
func SetHint(header http.Header, wait time.Duration) {
	wait = min(max(wait, minClientWait), maxClientWait)
	header["Retry-After"] = []string{strconv.Itoa(RetrySeconds(wait))}
	header["Retry-After-Ms"] = []string{strconv.FormatInt((wait + time.Millisecond - 1).Milliseconds(), 10)}
}

// RewriteHints replaces the hints in a backend's reply, if there are any. A
// backend's hints apply only to that backend, and some SDKs cannot read their
// form.
func RewriteHints(header http.Header, wait time.Duration) {
	hinted := false
	for i := range hintHeaders {
		name := hintHeaders[i].name
		hinted = hinted || header[name] != nil
		delete(header, name)
	}
	if hinted {
		SetHint(header, wait)
	}
}
