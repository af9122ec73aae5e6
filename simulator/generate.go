package simulator

import (
	"math"
	"net/http"
	"strings"
	"time"
)

// generate answers a request that was not refused.
func (x *exchange) generate() {
	x.call = x.request.chooseCall(x.route.op)
	switch op := x.route.op; {
	case op == opModels:
		x.reply(jsonReply(http.StatusOK, x.models()))
	case op == opStoredResponse:
		x.storedResponse()
	case op == opRealtime:
		x.realtime()
	case op == opObject:
		x.reply(x.object())
	case op == opResponse:
		x.respond()
	case op == opEmbedding:
		x.whole(0, x.embeddings)
	case op == opTranscription:
		x.whole(x.outputTokens(), func() any {
			return map[string]any{"text": text(x.outputTokens())}
		})
	case x.request.Stream:
		x.streamCompletion()
	default:
		x.whole(x.outputTokens(), x.completion)
	}
}

// candidates is how many replies are generated at the same time.
func (x *exchange) candidates() int64 { return x.request.candidates(x.route.op) }

// outputTokens is how many tokens each of them has when it is finished.
func (x *exchange) outputTokens() int64 {
	n := x.fullLength()
	if limit := x.request.maxTokens(); limit > 0 {
		n = min(n, limit)
	}
	return n
}

// finishReason is why the reply ends after its last token.
func (x *exchange) finishReason() string {
	switch {
	case x.outputTokens() < x.fullLength():
		return "length"
	case x.call != nil:
		return "tool_calls"
	}
	return "stop"
}

// whole generates n tokens of each candidate and sends them in one piece. If the
// client leaves before the end, the tokens generated until then count.
func (x *exchange) whole(n int64, build func() any) {
	first, each := x.firstTokenLatency(), time.Duration(x.h.TokenLatency)
	start := x.h.now()
	if !x.wait(generationTime(first, each, n)) {
		if each > 0 {
			x.produced = x.candidates() * min(n, max(0, int64((x.h.now().Sub(start)-first)/each)))
		}
		x.abort()
	}
	x.produced = x.candidates() * n
	x.settle()
	x.reply(jsonReply(http.StatusOK, build()))
}

// generationTime is how long n tokens take. It is bounded, so that a long reply
// with a long latency does not overflow and come at once.
func generationTime(first, each time.Duration, n int64) time.Duration {
	if n > 0 && each > (math.MaxInt64-first)/time.Duration(n) {
		return math.MaxInt64
	}
	return first + time.Duration(n)*each
}

// model is the name a reply carries.
func (x *exchange) model() string {
	if x.request.Model != "" {
		return x.request.Model
	}
	return x.route.deployment
}

type modelList struct {
	Object string  `json:"object"`
	Data   []model `json:"data"`
}

type model struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Created int64  `json:"created"`
	OwnedBy string `json:"owned_by"`
}

func (x *exchange) models() modelList {
	list := modelList{Object: "list", Data: []model{}}
	for _, id := range x.h.Deployments {
		list.Data = append(list.Data, model{ID: id, Object: "model", OwnedBy: x.h.Name})
	}
	return list
}

// words are the text of every reply, repeated as needed. Each word is a token.
var words = strings.Fields("This reply comes from a simulated deployment, so please read nothing into the words it is made of.")

// token is the n-th token of any reply.
func token(n int64) string {
	word := words[n%int64(len(words))]
	if n == 0 {
		return word
	}
	return " " + word
}

func text(n int64) string {
	var b strings.Builder
	for i := range n {
		b.WriteString(token(i))
	}
	return b.String()
}
