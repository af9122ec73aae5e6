package websocket

import (
	"bytes"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
)

// maxHeld is how much of a message is held back because it may be the beginning
// of a key. No key is that long, but one may be encoded in layers, so that one
// character takes many.
const maxHeld = 4 << 10

// filter puts stars in place of the keys in the messages of a backend. A key
// may be cut into several pieces: the end of a piece is held back if a key may
// begin there, and comes before the next piece.
type filter struct {
	secrets keys.Secrets
	held    []byte
}

// pass returns what may go on of the message, whose next piece is text. It may
// change the text. last reports whether it is the last piece. What pass returns
// is valid until its next call.
func (f *filter) pass(text []byte, last bool) []byte {
	if len(f.secrets) == 0 {
		return text
	}
	if len(f.held) > 0 {
		text = append(f.held, text...)
		f.held = nil
	}
	ready := f.secrets.Star(text, last)
	if last || ready == len(text) {
		return text
	}
	if long := len(text) - ready - maxHeld; long > 0 { // no key would be so long; but if it is one, it must not pass
		for i := range long {
			text[ready+i] = '*'
		}
		ready += long
	}
	f.held = bytes.Clone(text[ready:])
	return text[:ready]
}
