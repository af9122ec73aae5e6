package attempt

import (
	"bytes"
	"io"
	"log"
)

// surplus begins what net/http writes to Go's log of a server that sends more
// than its reply (transport.go, readLoopPeekFailLocked). It goes on with what
// was sent, which may be an echo of a key.
const surplus = "Unsolicited response received on idle HTTP channel"

// withoutSurplus is an output of Go's log.
type withoutSurplus struct{ io.Writer }

// Write implements io.Writer.
func (w withoutSurplus) Write(line []byte) (int, error) {
	kept := line
	if i := bytes.Index(line, []byte(surplus)); i >= 0 {
		kept = append(line[:i:i], surplus+"\n"...)
	}
	_, err := w.Writer.Write(kept)
	return len(line), err
}

// hideSurplus keeps what servers send in excess of their replies out of Go's
// log. Caddy directs that log elsewhere when it loads a config or drops one, so
// it is called after that, and with each new connection.
func hideSurplus() {
	if _, hides := log.Writer().(withoutSurplus); !hides {
		log.SetOutput(withoutSurplus{log.Writer()})
	}
}
