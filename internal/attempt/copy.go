package attempt

import (
	"errors"
	"io"
)

const (
	// firstCopied is how much of a tunnel's bytes is copied at a time at first.
	firstCopied = 4 << 10
	// mostCopied is up to how much that grows, without stream_buffer_size: as much as reverse_proxy copies.
	mostCopied = 32 << 10
)

// copyTunnel copies one direction of a tunnel until its end. reverse_proxy would keep two buffers of 32 KiB for each tunnel, however
// little passes: most of what an open WebSocket needs. Here, the buffer grows while what comes fills it, up to a size, or to the
// default if that is not above 0.
func copyTunnel(to io.Writer, from io.Reader, most int) (copied int64, err error) {
	if most <= 0 {
		most = mostCopied
	}
	buffer := make([]byte, min(firstCopied, most))
	for {
		n, err := from.Read(buffer)
		if n > 0 {
			if n, err := to.Write(buffer[:n]); err != nil {
				return copied + int64(n), err
			}
			copied += int64(n)
		}
		switch {
		case errors.Is(err, io.EOF):
			return copied, nil
		case err != nil:
			return copied, err
		case n == len(buffer) && n < most:
			buffer = make([]byte, min(2*n, most))
		}
	}
}
