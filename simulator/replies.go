package simulator

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"strings"
	"time"
)

// words are what replies are made of, a word a token, again and again.
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

// usage is what a reply cost, in the words of chat and completions.
type usage struct {
	PromptTokens            int64             `json:"prompt_tokens"`
	CompletionTokens        int64             `json:"completion_tokens"`
	TotalTokens             int64             `json:"total_tokens"`
	PromptTokensDetails     promptDetails     `json:"prompt_tokens_details"`
	CompletionTokensDetails completionDetails `json:"completion_tokens_details"`
}

type promptDetails struct {
	AudioTokens  int64 `json:"audio_tokens"`
	CachedTokens int64 `json:"cached_tokens"`
}

type completionDetails struct {
	AcceptedPredictionTokens int64 `json:"accepted_prediction_tokens"`
	AudioTokens              int64 `json:"audio_tokens"`
	ReasoningTokens          int64 `json:"reasoning_tokens"`
	RejectedPredictionTokens int64 `json:"rejected_prediction_tokens"`
}

// completion is a reply of chat or completions, or a chunk of one.
type completion struct {
	Choices             []choice             `json:"choices"`
	Created             int64                `json:"created"`
	ID                  string               `json:"id"`
	Model               string               `json:"model"`
	Object              string               `json:"object"`
	PromptFilterResults []promptFilterResult `json:"prompt_filter_results,omitempty"`
	SystemFingerprint   *string              `json:"system_fingerprint"`
	Usage               json.RawMessage      `json:"usage,omitempty"`
}

type choice struct {
	Index        int      `json:"index"`
	Message      *message `json:"message,omitempty"` // whole chat
	Delta        *message `json:"delta,omitempty"`   // streamed chat
	Text         *string  `json:"text,omitempty"`    // completions
	Logprobs     *string  `json:"logprobs"`
	FinishReason *string  `json:"finish_reason"`
}

type message struct {
	Role    string  `json:"role,omitempty"`
	Content *string `json:"content,omitempty"`
}

type promptFilterResult struct {
	PromptIndex          int      `json:"prompt_index"`
	ContentFilterResults struct{} `json:"content_filter_results"`
}

var (
	fingerprint  = "fp_simulator"
	promptFilter = []promptFilterResult{{}}
)

// generate answers a request that nothing stood in the way of.
func (x *exchange) generate() {
	switch op := x.route.op; {
	case op == opModels:
		x.reply(jsonReply(http.StatusOK, x.models()))
	case op == opStoredResponse:
		x.reply(x.storedResponse())
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

// outputTokens is how many tokens the reply has when it is finished.
func (x *exchange) outputTokens() int64 {
	n := int64(x.h.OutputTokens)
	if limit := x.request.maxTokens(); limit > 0 {
		n = min(n, limit)
	}
	return n
}

// finishReason says why the last token is the last.
func (x *exchange) finishReason() string {
	if x.outputTokens() < int64(x.h.OutputTokens) {
		return "length"
	}
	return "stop"
}

// whole generates n tokens and sends them in one piece. A client that leaves
// before they are there has used what was generated until then.
func (x *exchange) whole(n int64, build func() any) {
	first, each := time.Duration(x.h.FirstTokenLatency), time.Duration(x.h.TokenLatency)
	start := x.h.now()
	if !x.wait(generationTime(first, each, n)) {
		if each > 0 {
			x.produced = min(n, max(0, int64((x.h.now().Sub(start)-first)/each)))
		}
		x.abort()
	}
	x.produced = n
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

func (x *exchange) usage() json.RawMessage {
	u, _ := json.Marshal(usage{
		PromptTokens:     x.cost.prompt,
		CompletionTokens: x.produced,
		TotalTokens:      x.cost.prompt + x.produced,
	})
	return u
}

// model is the name a reply carries.
func (x *exchange) model() string {
	if x.request.Model != "" {
		return x.request.Model
	}
	return x.route.deployment
}

func (x *exchange) newCompletion(object string) completion {
	prefix := "chatcmpl-"
	if x.route.op == opCompletion {
		prefix, object = "cmpl-", "text_completion"
	}
	return completion{
		Created:           x.h.now().Unix(),
		ID:                prefix + rand.Text(),
		Model:             x.model(),
		Object:            object,
		SystemFingerprint: &fingerprint,
	}
}

func (x *exchange) completion() any {
	c := x.newCompletion("chat.completion")
	content, reason := text(x.produced), x.finishReason()
	c.Choices = []choice{{FinishReason: &reason}}
	if x.route.op == opCompletion {
		c.Choices[0].Text = &content
	} else {
		c.Choices[0].Message = &message{Role: "assistant", Content: &content}
	}
	c.PromptFilterResults = promptFilter
	c.Usage = x.usage()
	return c
}

// streamCompletion sends what Azure sends: a chunk about the prompt that has
// neither id nor choices, a role, the tokens, the finish, the usage if asked
// for, and the end.
func (x *exchange) streamCompletion() {
	if !x.wait(time.Duration(x.h.FirstTokenLatency)) {
		x.abort()
	}
	s := x.startStream()
	chunk := x.newCompletion("chat.completion.chunk")
	includeUsage := x.request.StreamOptions != nil && x.request.StreamOptions.IncludeUsage
	if includeUsage {
		// "All other chunks will also include a usage field, but with a null
		// value", says OpenAI's API reference.
		chunk.Usage = json.RawMessage("null")
	}

	s.send("", completion{Choices: []choice{}, PromptFilterResults: promptFilter})
	if x.route.op == opChat {
		empty := ""
		chunk.Choices = []choice{{Delta: &message{Role: "assistant", Content: &empty}}}
		s.send("", chunk)
	}
	for i := range x.outputTokens() {
		if i > 0 {
			s.pause()
		}
		if s.ended {
			return
		}
		word := token(i)
		if x.route.op == opChat {
			chunk.Choices = []choice{{Delta: &message{Content: &word}}}
		} else {
			chunk.Choices = []choice{{Text: &word}}
		}
		x.produced++
		s.send("", chunk)
	}
	reason, empty := x.finishReason(), ""
	chunk.Choices = []choice{{FinishReason: &reason, Delta: &message{}}}
	if x.route.op == opCompletion {
		chunk.Choices = []choice{{FinishReason: &reason, Text: &empty}}
	}
	s.send("", chunk)
	if includeUsage {
		chunk.Choices, chunk.Usage = []choice{}, x.usage()
		s.send("", chunk)
	}
	s.done()
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

type embeddingList struct {
	Object string         `json:"object"`
	Data   []embedding    `json:"data"`
	Model  string         `json:"model"`
	Usage  embeddingUsage `json:"usage"`
}

type embedding struct {
	Object    string `json:"object"`
	Index     int    `json:"index"`
	Embedding any    `json:"embedding"`
}

type embeddingUsage struct {
	PromptTokens int64 `json:"prompt_tokens"`
	TotalTokens  int64 `json:"total_tokens"`
}

func (x *exchange) embeddings() any {
	list := embeddingList{
		Object: "list",
		Data:   []embedding{},
		Model:  x.model(),
		Usage:  embeddingUsage{x.cost.prompt, x.cost.prompt},
	}
	for i, input := range inputs(x.request.Input) {
		vector := embed(input)
		e := embedding{Object: "embedding", Index: i, Embedding: vector}
		if x.request.EncodingFormat == "base64" {
			// The official SDKs ask for this by themselves and decode it again.
			var buf [4 * len(vector)]byte
			for j, value := range vector {
				binary.LittleEndian.PutUint32(buf[4*j:], math.Float32bits(value))
			}
			e.Embedding = base64.StdEncoding.EncodeToString(buf[:])
		}
		list.Data = append(list.Data, e)
	}
	return list
}

// inputs splits the input of embeddings: a string or a list of tokens is one, a
// list of those is many.
func inputs(v any) []any {
	list, ok := v.([]any)
	if !ok {
		return []any{v}
	}
	if len(list) > 0 {
		if _, isToken := list[0].(float64); isToken {
			return []any{list}
		}
	}
	return list
}

// embed makes a vector of length 1 that is always the same for the same input.
func embed(input any) [8]float32 {
	sum := sha256.Sum256(fmt.Append(nil, input))
	var vector [8]float32
	var square float64
	for i := range vector {
		vector[i] = float32(int32(binary.BigEndian.Uint32(sum[4*i:]))) / (1 << 31)
		square += float64(vector[i]) * float64(vector[i])
	}
	for i := range vector {
		vector[i] = float32(float64(vector[i]) / math.Sqrt(square))
	}
	return vector
}
