package model

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
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
	N                   *int64 `json:"n"`
	BestOf              *int64 `json:"best_of"`

	Messages     any `json:"messages"`
	Prompt       any `json:"prompt"`
	Input        any `json:"input"`
	Instructions any `json:"instructions"`
	Tools        any `json:"tools"`
	ToolChoice   any `json:"tool_choice"`

	streaming
	ofEmbeddings
	ofResponses
}

type streaming struct {
	Stream        bool           `json:"stream"`
	StreamOptions *streamOptions `json:"stream_options"`
}

type streamOptions struct {
	IncludeUsage bool `json:"include_usage"`
}

// ofEmbeddings are the fields of embeddings.
type ofEmbeddings struct {
	EncodingFormat string `json:"encoding_format"`
	Dimensions     *int64 `json:"dimensions"`
}

// ofResponses are the fields of the Responses API.
type ofResponses struct {
	Store              *bool    `json:"store"`
	Background         bool     `json:"background"`
	Include            []string `json:"include"`
	PreviousResponseID string   `json:"previous_response_id"`
}

// embedded removes the names of the embedded structs, which encoding/json writes before
// the name of a field in its errors.
var embedded = strings.NewReplacer("streaming.", "", "ofEmbeddings.", "", "ofResponses.", "")

// The most that the API reference allows for n and best_of.
const (
	mostChoices    = 128
	mostCandidates = 20
)

// ParseRequest reads a body, or the start of a body that was too large. The
// second result is an error message for the client, or empty.
func ParseRequest(op Operation, contentType string, body []byte, cut bool) (Request, string) {
	if op == OpTranscription {
		return parseForm(contentType, body, cut)
	}
	if cut {
		return parsePrefix(body), ""
	}
	var req Request
	if err := json.Unmarshal(body, &req); err != nil {
		var mismatch *json.UnmarshalTypeError
		if errors.As(err, &mismatch) && mismatch.Field != "" {
			return req, fmt.Sprintf("Invalid type for '%s': got %s instead.", embedded.Replace(mismatch.Field), mismatch.Value)
		}
		return req, "We could not parse the JSON body of your request."
	}
	for _, limit := range []struct {
		name  string
		value *int64
		most  int64
	}{
		{"max_tokens", req.MaxTokens, math.MaxInt64},
		{"max_completion_tokens", req.MaxCompletionTokens, math.MaxInt64},
		{"max_output_tokens", req.MaxOutputTokens, math.MaxInt64},
		{"dimensions", req.Dimensions, math.MaxInt64},
		{"n", req.N, mostChoices},
		{"best_of", req.BestOf, mostCandidates},
	} {
		switch {
		case limit.value == nil:
		case *limit.value < 1:
			return req, fmt.Sprintf("Invalid '%s': integer below minimum value. Expected a value >= 1, but got %d instead.", limit.name, *limit.value)
		case *limit.value > limit.most:
			return req, fmt.Sprintf("Invalid '%s': integer above maximum value. Expected a value <= %d, but got %d instead.", limit.name, limit.most, *limit.value)
		}
	}
	if n, candidates := req.choices(op), req.candidates(op); n > candidates {
		return req, fmt.Sprintf("You requested that the server return more choices than it will generate (HINT: You must set 'n' (currently %d) to be at most 'best_of' (currently %d), "+
			"or omit either parameter if you don't specifically want to use them.)", n, candidates)
	}
	if n := req.Dimensions; n != nil && *n > mostDimensions {
		return req, fmt.Sprintf("Invalid value for 'dimensions' = %d. Must be less than or equal to %d.", *n, mostDimensions)
	}
	return req, ""
}

// parsePrefix reads the fields of a JSON object whose end is missing.
func parsePrefix(body []byte) Request {
	var req Request
	dec := json.NewDecoder(bytes.NewReader(body))
	if start, err := dec.Token(); err != nil || start != json.Delim('{') {
		return req
	}
	for dec.More() {
		name, err := dec.Token()
		if err != nil {
			return req
		}
		var value json.RawMessage
		if dec.Decode(&value) != nil {
			return req
		}
		switch name {
		case "model":
			_ = json.Unmarshal(value, &req.Model)
		case "stream":
			_ = json.Unmarshal(value, &req.Stream)
		case "max_tokens", "max_completion_tokens", "max_output_tokens":
			_ = json.Unmarshal(value, &req.MaxTokens)
		case "n":
			_ = json.Unmarshal(value, &req.N)
		case "best_of":
			_ = json.Unmarshal(value, &req.BestOf)
		}
	}
	return req
}

// parseForm finds the model in a multipart form. It may be the last part.
func parseForm(contentType string, body []byte, cut bool) (Request, string) {
	var req Request
	media, params, err := mime.ParseMediaType(contentType)
	if err != nil || media != "multipart/form-data" || params["boundary"] == "" {
		return req, "Invalid Content-Type header: expected multipart/form-data with a boundary."
	}
	form := multipart.NewReader(bytes.NewReader(body), params["boundary"])
	for {
		part, err := form.NextPart()
		if err == io.EOF || err != nil && cut {
			return req, ""
		}
		if err != nil {
			return req, "We could not parse the multipart form of your request."
		}
		if part.FormName() == "model" {
			value, _ := io.ReadAll(io.LimitReader(part, 1024))
			req.Model = strings.TrimSpace(string(value))
		}
	}
}

// Cost estimates the tokens of the prompt, and the most that may be generated: from
// max_tokens and from how many replies are asked for, as "Manage Azure OpenAI quota"
// describes. Embeddings and transcriptions generate no tokens, nor does the handshake
// of a realtime session.
func (r Request) Cost(op Operation) (prompt, output int64) {
	var chars int64
	for _, n := range r.parts() {
		chars += n
	}
	prompt = tokensOf(chars)
	if op == OpEmbedding || op == OpTranscription || op == OpRealtime {
		return prompt, 0
	}
	output = 16
	if limit := r.maxTokens(); limit > 0 {
		// Sums of these must not overflow, whatever a client asks for.
		output = min(limit, math.MaxInt32)
	}
	return prompt, output * r.candidates(op)
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
		for _, list := range []any{r.Messages, r.Prompt, r.Input} {
			for _, part := range inputs(list) {
				if part != nil && !yield(part, textLength(part)) {
					return
				}
			}
		}
	}
}

// choices is how many replies the client gets.
func (r Request) choices(op Operation) int64 {
	if (op == OpChat || op == OpCompletion) && r.N != nil {
		return between1And(mostChoices, *r.N)
	}
	return 1
}

// candidates is how many replies are generated, of which the client gets the best.
func (r Request) candidates(op Operation) int64 {
	if op == OpCompletion && r.BestOf != nil {
		return between1And(mostCandidates, *r.BestOf)
	}
	return r.choices(op)
}

// between1And bounds a number of a body that was not checked, because its end is
// missing.
func between1And(most, n int64) int64 { return max(1, min(n, most)) }

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
	var text bytes.Buffer
	enc := json.NewEncoder(&text)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(v) // it was JSON before
	return int64(utf8.RuneCount(bytes.TrimSpace(text.Bytes())))
}

// textLength counts the characters of a prompt in any of its forms: a string, a
// list, messages, content parts, calls of functions and their results. Images and
// files are not text, and a number is a token, thus four characters.
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

var textFields = []string{"content", "text", "tool_calls", "function", "arguments", "output"}
