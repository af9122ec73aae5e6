package openaiapi

import (
	"net/http"
	"strconv"
	"time"
)

// Patience returns how long the caller waits for a reply. OpenAI's SDKs send
// this in seconds: the Python SDK as X-Stainless-Read-Timeout, the Node SDK as
// X-Stainless-Timeout.
func Patience(header http.Header) (patience time.Duration, ok bool) {
	values := header["X-Stainless-Read-Timeout"]
	if len(values) == 0 {
		values = header["X-Stainless-Timeout"]
	}
	if len(values) == 0 {
		return 0, false
	}
	seconds, err := strconv.ParseFloat(values[0], 64)
	if err != nil || !(seconds > 0 && seconds < time.Hour.Seconds()) {
		return 0, false
	}
	return time.Duration(seconds * float64(time.Second)), true
}
