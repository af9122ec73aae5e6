package verdict

import (
	"bytes"
	"slices"
	"strconv"
	"strings"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// report is the content of an error body in any of its shapes.
type report struct {
	code, kind, message string
	// param is the part of the request that the error is about.
	param string
	// number is the code if it is a number, or 0.
	number int
	// unsuccessful reports whether the body has "success": false, as
	// Cloudflare's do.
	unsuccessful bool
	// unshaped reports whether the message does not have the shape of an API's
	// error, because a web framework has written it.
	unshaped bool
}

// parseReport parses an error body. It accepts OpenAI's and Azure's
// {"error":{…}}, whose code may be a number (OpenRouter, vLLM), the flat object
// of Mistral and older vLLMs, {"error":"text"}, Cloudflare's list of errors, of
// which the first counts, and FastAPI's {"detail":"text"}. A gateway may quote
// the whole reply of a provider as the message; then the quoted error counts.
// For anything else, the report is empty.
func parseReport(body []byte) report {
	r, inner := readReport(body)
	if text := openaiapi.Text(inner); text != "" {
		r.message, r.unshaped = text, true
	} else if inner = bytes.TrimLeft(inner, "[ \t\r\n"); len(inner) > 0 && inner[0] == '{' {
		unsuccessful := r.unsuccessful
		r, _ = readReport(inner)
		r.unsuccessful = unsuccessful
	}
	if quoted := strings.TrimSpace(r.message); strings.HasPrefix(quoted, `{"`) || strings.HasPrefix(quoted, "{\n") {
		if _, inner := readReport([]byte(quoted)); len(inner) > 0 && inner[0] == '{' {
			if q, _ := readReport(inner); q.message != "" {
				return q
			}
		}
	}
	return r
}

// readReport reads an object, and returns the error in it, unparsed. Names are
// compared ignoring case, as encoding/json does.
func readReport(object []byte) (r report, inner []byte) {
	details := ""
	for name, value := range openaiapi.Members(object) {
		switch strings.ToLower(string(name)) {
		case "error":
			inner = value
		case "errors":
			if inner == nil && value[0] == '[' { // Cloudflare's. Others have an object here, with a list for each field
				inner = value
			}
		case "success":
			r.unsuccessful = string(value) == "false"
		case "detail":
			if r.message == "" {
				r.message, r.unshaped = openaiapi.Text(value), true
			}
		case "code":
			if r.code = openaiapi.Text(value); value[0] != '"' {
				number, _ := strconv.ParseFloat(string(value), 64)
				r.number = int(number)
			}
		case "type":
			r.kind = openaiapi.Text(value)
		case "message":
			r.message, r.unshaped = openaiapi.Text(value), false
		case "param":
			if r.param = openaiapi.Text(value); r.param == "None" { // LiteLLM's word for null
				r.param = ""
			}
		case "details":
			for name, value := range openaiapi.Members(value) {
				if strings.EqualFold(string(name), "error_code") {
					details = openaiapi.Text(value)
				}
			}
		}
	}
	if r.code == "" {
		r.code = details
	}
	if r.number == 0 {
		r.number, _ = strconv.Atoi(r.code)
	}
	return r, inner
}

// aboutPart reports whether the error is about a part of the request other than
// its model.
func (r report) aboutPart() bool { return r.param != "" && r.param != "model" }

// Code returns the code of an error, or else its type. A text that is not a
// word is ignored.
func Code(body []byte) string {
	r := parseReport(body)
	for _, code := range []string{r.code, r.kind} {
		if IsCode(code) {
			return code
		}
	}
	return ""
}

// maxCode is the maximum length of a code.
const maxCode = 64

const codeLetters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-."

// IsCode reports whether the text may be a code.
func IsCode(text string) bool {
	return text != "" && len(text) <= maxCode && strings.Trim(text, codeLetters) == ""
}

// means reports whether one of the error's words has this meaning.
func (r report) means(class Class) bool {
	return meaningOf(r.code).class == class || meaningOf(r.kind).class == class
}

// exceedsContext reports whether the prompt is too long for the model. Some
// such errors have only a text: Azure's embeddings and vLLM begin the message
// with "This model's maximum context length is", OpenRouter with "This
// endpoint's".
func (r report) exceedsContext() bool {
	return r.means(TooLarge) || strings.Contains(r.message, "maximum context length is")
}

// aboutItsTokens reports whether a limit or a budget refuses this one request
// because it asks for too many tokens. It recognizes OpenAI's text, and
// OpenRouter's: "This request requires more credits, or fewer max_tokens. You
// requested up to 65536 tokens, but can only afford 2500."
func (r report) aboutItsTokens() bool {
	return r.messageContains("Request too large for", "fewer max_tokens", "can only afford")
}

// overloaded reports whether the backend is overloaded. Some such errors have
// only a text: OpenAI's "Selected model is at capacity" within a stream, and
// "That model is currently overloaded with other requests".
func (r report) overloaded() bool {
	return r.means(Overloaded) || r.messageContains("is at capacity", "currently overloaded")
}

// messageContains reports whether the message contains one of these texts.
func (r report) messageContains(texts ...string) bool {
	return slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(r.message, text) })
}

// notPermitted reports whether the credential does not permit the request. Some
// such errors have only a text: OpenAI's for a key that is restricted to parts
// of the API, and Azure's for an identity whose role lacks an operation.
func (r report) notPermitted() bool {
	return r.means(NotPermitted) ||
		r.messageContains("insufficient permissions for this operation", "lacks the required data action")
}
