package attempt

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net/http"
	"time"
)

// errNotWritable is the error for a 101 whose connection can only be read.
var errNotWritable = errors.New("the connection of the backend cannot be written")

// errHalfOpen is the error for a connection of which one direction cannot end before the other.
var errHalfOpen = errors.New("the connection cannot end in one direction")

// Relay sends the client the head of a committed 101, takes its connection over, and copies what either side sends to the
// other until both have ended. The end of one side is passed on to the other; an error ends both. timeout, if it is above
// 0, is for how long that may go on. An error means that the connections could not be joined.
func (r *Reply) Relay(w http.ResponseWriter, res *http.Response, timeout time.Duration) error {
	defer res.Body.Close()
	backend, ok := res.Body.(io.ReadWriteCloser)
	if !ok {
		return errNotWritable
	}
	w.WriteHeader(res.StatusCode)
	client, buffers, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return err
	}
	defer client.Close()
	t := r.sent
	closeBoth := func() {
		client.Close()
		backend.Close()
	}
	stopAtEnd := context.AfterFunc(t.Incoming.Context(), closeBoth)
	defer stopAtEnd()
	stopAtClose := context.AfterFunc(t.closing, func() {
		if t.handshakes() {
			_, _ = client.Write(closeFrame(closeGoingAway, false)) // at best
			client.Close()
			_, _ = backend.Write(closeFrame(closeGoingAway, true))
		}
		closeBoth()
	})
	defer stopAtClose()
	if timeout > 0 {
		timer := time.AfterFunc(timeout, closeBoth)
		defer timer.Stop()
	}
	if err := sendEarly(buffers, backend); err != nil {
		return nil // one of them has left, which the reply's end says
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if copyHalf(client, backend, t.copies) != nil {
			closeBoth()
		}
	}()
	if copyHalf(backend, client, t.copies) != nil {
		closeBoth()
	}
	<-ended
	return nil
}

// sendEarly flushes what is left for the client, and sends what it has sent already to the backend.
func sendEarly(buffers *bufio.ReadWriter, backend io.Writer) error {
	if err := buffers.Flush(); err != nil {
		return err
	}
	early, err := buffers.Peek(buffers.Reader.Buffered())
	if err == nil && len(early) > 0 {
		_, err = backend.Write(early)
	}
	return err
}

// copyHalf copies one direction until its end, which it passes on.
func copyHalf(to, from io.ReadWriteCloser, most int) error {
	if _, err := copyTunnel(to, from, most); err != nil {
		return err
	}
	half, ok := to.(interface{ CloseWrite() error })
	if !ok {
		return errHalfOpen
	}
	return half.CloseWrite()
}
