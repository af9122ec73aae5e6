package attempt

import (
	"errors"
	"io"
	"net/http"
)

// exact is the body of a reply over HTTP/2 or HTTP/3 with a Content-Length. A
// reply with more data than that is malformed (RFC 9113 section 8.1.1). But
// net/http reports this only after the last announced byte, when the client
// already has a reply that looks complete. So exact holds the last byte back
// until the end.
type exact struct {
	io.ReadCloser
	left int64
	next [1]byte
}

// bodyOf returns the body of the response, as an exact body if that is needed.
func (e *exact) bodyOf(res *http.Response) io.ReadCloser {
	if res.ProtoMajor < 2 || res.ContentLength < 0 {
		return res.Body
	}
	if res.ContentLength == 0 { // no byte can be kept back: the client must not know that there is none
		delete(res.Header, "Content-Length")
		res.ContentLength = -1
		return res.Body
	}
	e.ReadCloser, e.left = res.Body, res.ContentLength
	return e
}

// Read implements io.Reader.
func (e *exact) Read(p []byte) (int, error) {
	n, err := e.ReadCloser.Read(p)
	if e.left -= int64(n); e.left > 0 || n == 0 {
		return n, err
	}
	for err == nil {
		var more int
		if more, err = e.ReadCloser.Read(e.next[:]); more > 0 {
			err = ErrSurplus
		}
	}
	if !errors.Is(err, io.EOF) {
		n--
	}
	return n, err
}
