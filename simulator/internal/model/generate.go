// Package model generates the replies of a simulated model. It parses what a
// request asks for, and returns the reply whole, or as a sequence of Events
// with the [Wait] before each. It sends and stores nothing, and knows no
// limits: the objects that an [Event] has as [Stored] are for its caller to
// keep.
//
// A reply has the same tokens whole and as a stream. The waits are only named,
// as the time before the first token or between two tokens. The caller knows
// how long they are, and may stop after any event, as when a client leaves. A
// [Generation] belongs to one request.
package model

import (
	"iter"
	"strings"
	"time"
)

// Task is a request that was admitted, and what is known of it.
type Task struct {
	Op      Operation
	Request Request
	Model   string // the name that the reply carries
	Tier    string // that serves it
	Length  int64  // tokens of a reply that nothing limits
	Prompt  int64  // tokens of the prompt
	Cached  int64  // and how many of them were in the cache
	Now     func() time.Time
}

// Generation is the output of the model for a task.
type Generation struct {
	Task
	call *toolCall // nil: the reply is a text
}

// New starts a generation. It decides whether the reply is a call of a
// function.
func New(task Task) *Generation {
	return &Generation{task, task.Request.chooseCall(task.Op)}
}

// Event is an event of a streamed reply. One without Data is the end mark of
// chat.
type Event struct {
	Name   string // of those of the Responses API
	Data   any
	Wait   Wait   // before it
	Tokens int64  // generated with it
	Stored Stored // to be stored after it
}

// Stored are objects that a client can refer to later, by their ids.
type Stored map[string][]byte

// Wait is the reason why an event is delayed.
type Wait int

// The waits.
const (
	NoWait     Wait = iota
	FirstToken      // the time before the first token
	NextToken       // the time between two tokens
)

// sequence makes a sequence of the events that a function sends. After its end,
// send drops further events and returns false.
func sequence(generate func(send func(Event) bool)) iter.Seq[Event] {
	return func(yield func(Event) bool) {
		goesOn := true
		generate(func(e Event) bool {
			goesOn = goesOn && yield(e)
			return goesOn
		})
	}
}

// Whole is the reply in one piece: that of a chat, embeddings or a
// transcription.
func (g *Generation) Whole() any {
	switch g.Op {
	case OpEmbedding:
		return g.embeddings()
	case OpTranscription:
		return object{"text": g.text()}
	default:
		return g.chat()
	}
}

// Tokens returns how many tokens the reply has when it is finished.
func (g *Generation) Tokens() int64 {
	if g.Op == OpEmbedding {
		return 0
	}
	n := g.fullLength()
	if limit := g.Request.maxTokens(); limit > 0 {
		n = min(n, limit)
	}
	return n
}

// finishReason is why the reply ends after its last token.
func (g *Generation) finishReason() string {
	switch {
	case g.Tokens() < g.fullLength():
		return "length"
	case g.call != nil:
		return "tool_calls"
	}
	return "stop"
}

// fullLength is how many tokens the reply has if the request does not limit
// them.
func (g *Generation) fullLength() int64 {
	if g.call != nil {
		return int64(len(g.call.pieces))
	}
	return g.Length
}

// tokens are the tokens of the reply, with the wait before each.
func (g *Generation) tokens() iter.Seq2[string, Wait] {
	return func(yield func(string, Wait) bool) {
		wait := NoWait
		for i := range g.Tokens() {
			if !yield(g.token(i), wait) {
				return
			}
			wait = NextToken
		}
	}
}

// words are the text of every reply, repeated as needed. Each word is a token.
var words = strings.Fields("This reply comes from a simulated deployment, so please read nothing into the words it is made of.")

// token is the n-th token of the reply.
func (g *Generation) token(n int64) string {
	switch {
	case g.call != nil:
		return g.call.pieces[n]
	case n == 0:
		return words[0]
	}
	return " " + words[n%int64(len(words))]
}

// text is all of the reply.
func (g *Generation) text() string {
	var b strings.Builder
	for word := range g.tokens() {
		b.WriteString(word)
	}
	return b.String()
}
