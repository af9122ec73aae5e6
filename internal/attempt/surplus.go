package attempt

import (
	"bytes"
	"io"
	"log"
)

// surplus is the beginning of the line that net/http writes to Go's log when a
// server sends more than its reply (transport.go, readLoopPeekFailLocked). The
// rest of the line is the surplus data, which may be an echo of a key.
const surplus = "Unsolicited response received on idle HTTP channel"

// withoutSurplus is an output for Go's log that cuts such lines after surplus.
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

// hideSurplus keeps the surplus data of servers out of Go's log. Caddy changes
// the log's output when it loads or drops a config, so hideSurplus is called
// after that, and with each new connection.
func hideSurplus() {
	if _, hides := log.Writer().(withoutSurplus); !hides {
		log.SetOutput(withoutSurplus{log.Writer()})
	}
}
