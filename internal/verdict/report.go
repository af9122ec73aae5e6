package verdict

import (
	"bytes"
	"slices"
	"strconv"
	"strings"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// report is what an error body says, in whichever shape it says it.
type report struct {
	code, kind, message string
	// param is the part of the request that it is about.
	param string
	// number is the code if that is a number, or 0.
	number int
	// unsuccessful reports whether the body says "success": false, as
	// Cloudflare's do.
	unsuccessful bool
	// unshaped reports whether the message is not in the shape of an API's
	// error: a web framework has written it.
	unshaped bool
}

// parseReport reads OpenAI's and Azure's {"error":{…}}, whose code may be a
// number (OpenRouter, vLLM), the flat object of Mistral and older vLLMs,
// {"error":"text"}, Cloudflare's list of errors, of which the first counts, and
// FastAPI's {"detail":"text"}. A gateway may quote the whole reply of a
// provider as the message. Anything else is an empty report.
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

// readReport reads an object, and returns the error in it as it is written.
// Names are read in any case, as encoding/json does.
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

// aboutPart reports whether it is about a part of the request other than its
// model.
func (r report) aboutPart() bool { return r.param != "" && r.param != "model" }

// Code returns the code of an error, or else its type. Codes are words:
// anything else is left out.
func Code(body []byte) string {
	r := parseReport(body)
	for _, code := range []string{r.code, r.kind} {
		if IsCode(code) {
			return code
		}
	}
	return ""
}

// maxCode is how long a code is at most.
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

// exceedsContext knows the text of errors that have no code for it: Azure's
// embeddings and vLLM begin the message with "This model's maximum context
// length is", OpenRouter with "This endpoint's".
func (r report) exceedsContext() bool {
	return r.means(TooLarge) || strings.Contains(r.message, "maximum context length is")
}

// aboutItsTokens reports whether a limit or a budget is refused to this one
// request, because it asks for too many tokens. It knows OpenAI's text, and
// OpenRouter's: "This request requires more credits, or fewer max_tokens. You
// requested up to 65536 tokens, but can only afford 2500."
func (r report) aboutItsTokens() bool {
	return r.says("Request too large for", "fewer max_tokens", "can only afford")
}

// overloaded knows the texts of errors that have no code for it: OpenAI's
// "Selected model is at capacity" within a stream, and "That model is currently
// overloaded with other requests".
func (r report) overloaded() bool {
	return r.means(Overloaded) || r.says("is at capacity", "currently overloaded")
}

// says reports whether the message contains one of these texts.
func (r report) says(texts ...string) bool {
	return slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(r.message, text) })
}

// notPermitted knows OpenAI's text for a key that is restricted to some of the
// API, and Azure's for an identity whose role lacks an operation.
func (r report) notPermitted() bool {
	return r.means(NotPermitted) || r.says("insufficient permissions for this operation", "lacks the required data action")
}
