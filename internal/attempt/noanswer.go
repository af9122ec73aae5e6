package attempt

import (
	"bytes"
	"net/http"
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/sse"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// A reply with a status of success may come from something that is not the API,
// such as the page of a portal, the redirect to a login, or an empty body. SDKs
// accept it as an answer: openai-python returns a stream without events, and no
// exception. So the reply to inference is also checked by its first bytes. They
// must be JSON or the beginning of a stream, whatever its Content-Type says.
// Only audio may have any content.

// ErrNoAnswer means that a successful reply to inference is not an answer.
var ErrNoAnswer = &verdict.CauseError{Word: "no_answer", Text: "the reply is a success, but neither JSON nor a stream"}

// ErrNoStream means that the reply is JSON although the request is for a
// stream.
var ErrNoStream = &verdict.CauseError{Word: "no_stream", Text: "the reply is JSON, but the request is for a stream"}

// answers reports whether the reply must be JSON or a stream.
func (a *Traits) answers() bool {
	return a.Kind.Infers() && !a.Kind.IsHandshake() && !strings.HasPrefix(a.Operation, "/audio/")
}

// mustStream reports whether the reply must be a stream. Operations without
// streams ignore that one was asked for.
func (a *Traits) mustStream() bool {
	if !a.Stream || !a.answers() {
		return false
	}
	switch strings.TrimSuffix(a.Operation, "/") {
	case "/chat/completions", "/completions", "/responses", "/messages":
		return true
	}
	return false
}

// mayBeWhole reports whether JSON instead of a stream may be the answer.
// OpenAI's specification has no stream for the old completions, and servers
// that are generated from it answer with one JSON.
func (a *Traits) mayBeWhole(text []byte) bool {
	return strings.TrimSuffix(a.Operation, "/") == "/completions" && bytes.Contains(text, []byte(`"choices"`))
}

// isNoAnswer reports whether a successful reply cannot be an answer, because it
// is a redirect or has no body.
func (r *Reply) isNoAnswer() bool {
	if !r.sent.Traits.answers() || r.sent.Socket != nil || r.Status < 200 {
		return false
	}
	return r.Status >= 300 || r.Status == http.StatusNoContent || r.Status == http.StatusResetContent ||
		r.Status == http.StatusOK && r.body == nil
}

// looks is the format that the first bytes of a body seem to have.
type looks int

const (
	likeNothing looks = iota
	likeJSON
	likeStream
	likeOther
)

// looksLike returns the format of the first bytes of a body. For white space
// alone, it returns likeNothing.
func looksLike(text []byte) looks {
	text = bytes.TrimLeft(bytes.TrimPrefix(text, []byte("\xef\xbb\xbf")), " \t\r\n")
	if len(text) == 0 {
		return likeNothing
	}
	switch c := text[0]; {
	case c == '{', c == '[', c == '"', c == '-', '0' <= c && c <= '9', bytes.HasPrefix(text, []byte("null")),
		bytes.HasPrefix(text, []byte("true")),
		bytes.HasPrefix(text, []byte("false")):
		return likeJSON
	case c == ':':
		return likeStream
	}
	for _, field := range []string{"data:", "event:", "id:", "retry:"} {
		if n := min(len(field), len(text)); string(text[:n]) == field[:n] {
			return likeStream
		}
	}
	return likeOther
}

// openUntyped checks a reply whose Content-Type is neither JSON nor a stream.
func (r *Reply) openUntyped() (*sse.Error, error) {
	b := r.body
	b.readFirst()
	timeout := time.NewTimer(openingTimeout)
	defer timeout.Stop()
	for {
		switch looksLike(b.buffered) {
		case likeStream:
			return nil, nil
		case likeOther:
			return nil, ErrNoAnswer
		}
		if b.bufferedErr != nil || len(b.buffered) >= openingLimit || !b.readMore(timeout.C) {
			break
		}
	}
	switch {
	case b.bufferedErr != nil && !b.whole():
		return nil, b.bufferedErr
	case b.whole() && looksLike(b.buffered) == likeNothing:
		return nil, ErrNoAnswer
	}
	return r.judgeJSON()
}

// judgeJSON checks a reply that should be JSON, as far as it was read ahead. It
// returns the error that the JSON contains, or an error if the reply does not
// have the right format.
func (r *Reply) judgeJSON() (*sse.Error, error) {
	traits := &r.sent.Traits
	failure := r.body.errorIn(strings.HasSuffix(traits.Operation, "/responses"))
	switch text, all := r.body.text(); {
	case failure != nil:
	case !all: // it cannot be read
	case traits.mustStream() && looksLike(text) == likeJSON && traits.mayBeWhole(text):
	case traits.mustStream() && looksLike(text) == likeJSON:
		return nil, ErrNoStream
	case traits.mustStream() && looksLike(text) != likeStream:
		return nil, ErrNoAnswer
	case !traits.Stream && r.body.notJSON():
		return nil, ErrNotJSON
	case r.body.whole():
		r.decompress(r.secrets().Random())
	}
	return failure, nil
}

// isUntyped reports whether a reply whose Content-Type is neither JSON nor a
// stream must be checked by its first bytes.
func (r *Reply) isUntyped() bool {
	return r.sent.Traits.answers() && r.Status == http.StatusOK && r.body != nil &&
		!openaiapi.IsCompressed(r.Response.Header)
}
