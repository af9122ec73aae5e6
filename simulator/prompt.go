package simulator

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"mime"
	"mime/multipart"
	"strings"
	"unicode/utf8"
)

// request holds the fields of a body that the simulator uses.
type request struct {
	Model               string         `json:"model"`
	Stream              bool           `json:"stream"`
	StreamOptions       *streamOptions `json:"stream_options"`
	MaxTokens           *int64         `json:"max_tokens"`
	MaxCompletionTokens *int64         `json:"max_completion_tokens"`
	MaxOutputTokens     *int64         `json:"max_output_tokens"`
	EncodingFormat      string         `json:"encoding_format"`
	Dimensions          *int64         `json:"dimensions"`
	Store               *bool          `json:"store"`
	Background          bool           `json:"background"`
	Include             []string       `json:"include"`
	PreviousResponseID  string         `json:"previous_response_id"`

	Messages     any `json:"messages"`
	Prompt       any `json:"prompt"`
	Input        any `json:"input"`
	Instructions any `json:"instructions"`
	Tools        any `json:"tools"`
	ToolChoice   any `json:"tool_choice"`
}

type streamOptions struct {
	IncludeUsage bool `json:"include_usage"`
}

// parseRequest reads a body, or the start of a body that was too large. The
// second result is an error message for the client, or empty.
func parseRequest(op operation, contentType string, body []byte, cut bool) (request, string) {
	if op == opTranscription {
		return parseForm(contentType, body, cut)
	}
	if cut {
		return parsePrefix(body), ""
	}
	var req request
	if err := json.Unmarshal(body, &req); err != nil {
		var mismatch *json.UnmarshalTypeError
		if errors.As(err, &mismatch) && mismatch.Field != "" {
			return req, fmt.Sprintf("Invalid type for '%s': got %s instead.", mismatch.Field, mismatch.Value)
		}
		return req, "We could not parse the JSON body of your request."
	}
	for _, limit := range []struct {
		name  string
		value *int64
	}{
		{"max_tokens", req.MaxTokens},
		{"max_completion_tokens", req.MaxCompletionTokens},
		{"max_output_tokens", req.MaxOutputTokens},
		{"dimensions", req.Dimensions},
	} {
		if limit.value != nil && *limit.value < 1 {
			return req, fmt.Sprintf("Invalid '%s': integer below minimum value. Expected a value >= 1, but got %d instead.", limit.name, *limit.value)
		}
	}
	if n := req.Dimensions; n != nil && *n > mostDimensions {
		return req, fmt.Sprintf("Invalid value for 'dimensions' = %d. Must be less than or equal to %d.", *n, mostDimensions)
	}
	return req, ""
}

// parsePrefix reads the fields of a JSON object whose end is missing.
func parsePrefix(body []byte) request {
	var req request
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
		}
	}
	return req
}

// parseForm finds the model in a multipart form. It may be the last part.
func parseForm(contentType string, body []byte, cut bool) (request, string) {
	var req request
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

// cost estimates the tokens of a request from the text of its prompt and from
// max_tokens, as "Manage Azure OpenAI quota" describes. Embeddings and
// transcriptions generate no tokens.
func (r request) cost(op operation) cost {
	chars := textLength(r.Messages) + textLength(r.Prompt) + textLength(r.Input) + textLength(r.Instructions)
	c := cost{prompt: (chars + 3) / 4}
	if op == opEmbedding || op == opTranscription {
		return c
	}
	c.output = 16
	if limit := r.maxTokens(); limit > 0 {
		// Sums of these must not overflow, whatever a client asks for.
		c.output = min(limit, math.MaxInt32)
	}
	return c
}

// maxTokens is the most tokens that the reply may have. Zero means no limit.
func (r request) maxTokens() int64 {
	for _, limit := range []*int64{r.MaxCompletionTokens, r.MaxTokens, r.MaxOutputTokens} {
		if limit != nil {
			return max(0, *limit)
		}
	}
	return 0
}

// textLength counts the characters of a prompt in any of its forms: a string, a
// list, messages, content parts. Images and files are not text, and a number is
// a token, thus four characters.
func textLength(v any) int64 {
	switch v := v.(type) {
	case string:
		return int64(utf8.RuneCountInString(v))
	case float64:
		return 4
	case []any:
		var n int64
		for _, item := range v {
			n += textLength(item)
		}
		return n
	case map[string]any:
		return textLength(v["content"]) + textLength(v["text"])
	default:
		return 0
	}
}
