package websocket

import (
	"bytes"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
)

// maxHeld is how much of a message is held back because it may be the beginning
// of a key. No key is that long, but a key may be encoded in several layers, so
// that one character takes many bytes.
const maxHeld = 4 << 10

// filter replaces keys in the messages of a backend by stars. A key may be
// split across pieces. So the end of a piece is held back if a key may begin
// there, and is passed on before the next piece.
type filter struct {
	secrets keys.Secrets
	rest    []byte
}

// pass returns the part of the message that may be passed on, after its next
// piece, text. It may change the text. last reports whether it is the last
// piece. The result is valid until the next call.
func (f *filter) pass(text []byte, last bool) []byte {
	if len(f.secrets) == 0 {
		return text
	}
	if len(f.rest) > 0 {
		text = append(f.rest, text...)
		f.rest = nil
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
	f.rest = bytes.Clone(text[ready:])
	return text[:ready]
}
