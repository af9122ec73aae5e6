package model

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"math"
	"mime"
	"mime/multipart"
	"strings"
	"unicode/utf8"
)

// Request holds the fields of a body that the simulator uses.
type Request struct {
	Model               string `json:"model"`
	MaxTokens           *int64 `json:"max_tokens"`
	MaxCompletionTokens *int64 `json:"max_completion_tokens"`
	MaxOutputTokens     *int64 `json:"max_output_tokens"`

	ServiceTier  string `json:"service_tier"`
	Messages     any    `json:"messages"`
	Input        any    `json:"input"`
	Instructions any    `json:"instructions"`
	Tools        any    `json:"tools"`
	ToolChoice   any    `json:"tool_choice"`

	Stream        bool `json:"stream"`
	StreamOptions struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`

	// of embeddings
	EncodingFormat string `json:"encoding_format"`
	Dimensions     *int64 `json:"dimensions"`

	// of the Responses API
	Store              *bool  `json:"store"`
	Background         bool   `json:"background"`
	PreviousResponseID string `json:"previous_response_id"`
}

// ParseRequest reads a body. The second result is an error message for the
// client, or empty.
func ParseRequest(op Operation, contentType string, body []byte) (Request, string) {
	if op == OpTranscription {
		return parseForm(contentType, body)
	}
	var req Request
	if err := json.Unmarshal(body, &req); err != nil {
		if mismatch, ok := errors.AsType[*json.UnmarshalTypeError](err); ok && mismatch.Field != "" {
			return req, fmt.Sprintf("Invalid type for '%s': got %s instead.", mismatch.Field, mismatch.Value)
		}
		return req, "We could not parse the JSON body of your request."
	}
	if n := req.Dimensions; n != nil && (*n < 1 || *n > mostDimensions) {
		return req, fmt.Sprintf("Invalid 'dimensions': expected an integer from 1 to %d, but got %d instead.",
			mostDimensions, *n)
	}
	return req, ""
}

// parseForm finds the model in a multipart form.
func parseForm(contentType string, body []byte) (req Request, problem string) {
	media, params, err := mime.ParseMediaType(contentType)
	if err != nil || media != "multipart/form-data" || params["boundary"] == "" {
		return req, "Invalid Content-Type header: expected multipart/form-data with a boundary."
	}
	form, err := multipart.NewReader(bytes.NewReader(body), params["boundary"]).ReadForm(int64(len(body)))
	if err != nil {
		return req, "We could not parse the multipart form of your request."
	}
	req.Model = strings.TrimSpace(strings.Join(form.Value["model"], ""))
	return req, ""
}

// defaultOutput is the estimated output of a request that names no limit.
const defaultOutput = 16

// Cost estimates the tokens of the prompt, and the most that may be generated:
// from max_tokens, as "Manage Azure OpenAI quota" describes. Embeddings and
// transcriptions generate no tokens, nor does the handshake of a realtime
// session.
func (r Request) Cost(op Operation) (prompt, output int64) {
	var chars int64
	for _, n := range r.parts() {
		chars += n
	}
	prompt = tokensOf(chars)
	if op == OpEmbedding || op == OpTranscription || op == OpRealtime {
		return prompt, 0
	}
	if limit := r.maxTokens(); limit > 0 {
		// Sums of these must not overflow, whatever a client asks for.
		return prompt, min(limit, math.MaxInt32)
	}
	return prompt, defaultOutput
}

// tokensOf is how many tokens so many characters are.
func tokensOf(chars int64) int64 { return (chars + 3) / 4 }

// parts are the parts of the prompt and their lengths in characters: the tools,
// the instructions, and each message. Tools count as their JSON.
func (r Request) parts() iter.Seq2[any, int64] {
	return func(yield func(any, int64) bool) {
		if !yield(r.Tools, jsonLength(r.Tools)) || !yield(r.Instructions, textLength(r.Instructions)) {
			return
		}
		for _, list := range []any{r.Messages, r.Input} {
			for _, part := range inputs(list) {
				if part != nil && !yield(part, textLength(part)) {
					return
				}
			}
		}
	}
}

// maxTokens is the most tokens that the reply may have. Zero means no limit.
func (r Request) maxTokens() int64 {
	for _, limit := range []*int64{r.MaxCompletionTokens, r.MaxTokens, r.MaxOutputTokens} {
		if limit != nil {
			return max(0, *limit)
		}
	}
	return 0
}

// jsonLength counts the characters of the JSON of a value. It is 0 for nil.
func jsonLength(v any) int64 {
	if v == nil {
		return 0
	}
	return int64(utf8.RuneCount(encode(v)))
}

// textFields are the fields of messages and their parts that have text.
var textFields = []string{"content", "text", "tool_calls", "function", "arguments", "output"}

// textLength counts the characters of a prompt in any of its forms: a string, a
// list, messages, content parts, calls of functions and their results. Images
// and files are not text, and a number is a token, thus four characters.
func textLength(v any) int64 {
	var n int64
	switch v := v.(type) {
	case string:
		return int64(utf8.RuneCountInString(v))
	case float64:
		return 4
	case []any:
		for _, item := range v {
			n += textLength(item)
		}
	case map[string]any:
		for _, field := range textFields {
			n += textLength(v[field])
		}
	}
	return n
}

// Operation is the kind of a request.
type Operation int

// The operations. Those from OpChat to OpResponse have a body that names a
// model.
const (
	OpUnknown Operation = iota
	OpChat
	OpEmbedding
	OpTranscription
	OpResponse
	OpStoredResponse
	OpObject
	OpModels
	OpRealtime
	OpResponses // over a WebSocket
)

// Generates reports whether the operation has a body that asks for a reply.
func (op Operation) Generates() bool { return op >= OpChat && op <= OpResponse }

// Limited reports whether the operation is one of a deployment, whose limits it
// counts towards.
func (op Operation) Limited() bool { return op.Generates() || op == OpRealtime }

// AzureName returns the name of the operation in the text of Azure's 429.
func (op Operation) AzureName() string {
	names := map[Operation]string{
		OpEmbedding: "Embeddings_Create", OpTranscription: "Transcriptions_Create", OpResponse: "Responses_Create",
		OpRealtime: "Realtime_Connect",
	}
	return cmp.Or(names[op], "ChatCompletions_Create")
}
