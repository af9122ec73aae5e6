package verdict

import (
	"bytes"
	"encoding/json"
	"errors"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// report is what an error body says, in whichever shape it says it.
type report struct {
	code, kind, message string
	// param is the part of the request that it is about.
	param string
	// number is the code if that is a number, or 0.
	number int
}

// parseReport reads OpenAI's and Azure's {"error":{…}}, whose code may be a number (OpenRouter, vLLM),
// the flat object of Mistral and older vLLMs, and {"error":"text"}. Anything else is an empty report.
func parseReport(body []byte) report {
	type fields struct {
		Code    any    `json:"code"`
		Type    string `json:"type"`
		Message text   `json:"message"`
		Param   any    `json:"param"`
		Details struct {
			ErrorCode string `json:"error_code"`
		} `json:"details"`
	}
	var whole struct {
		fields
		Error *fields `json:"error"`
	}
	err := json.Unmarshal(body, &whole)
	var wrongType *json.UnmarshalTypeError
	if err != nil && !errors.As(err, &wrongType) { // if one field has an unexpected type, the others are filled in
		return report{}
	}
	f := whole.fields
	if whole.Error != nil {
		f = *whole.Error
	}
	if wrongType != nil && wrongType.Field == "error" {
		var flat struct {
			Error text `json:"error"`
		}
		_ = json.Unmarshal(body, &flat)
		f.Message = flat.Error
	}
	code, _ := f.Code.(string)
	if code == "" {
		code = f.Details.ErrorCode
	}
	number, _ := strconv.Atoi(code)
	if n, ok := f.Code.(float64); ok {
		number = int(n)
	}
	param, _ := f.Param.(string)
	return report{code: code, kind: f.Type, message: string(f.Message), number: number, param: param}
}

// text is a message, which is most of an error. Without an escape it is taken as it is: encoding/json would take
// longer for it than for the rest of the error.
type text string

// UnmarshalJSON implements json.Unmarshaler.
func (t *text) UnmarshalJSON(quoted []byte) error {
	if quoted[0] == '"' && bytes.IndexByte(quoted, '\\') < 0 && utf8.Valid(quoted) {
		*t = text(quoted[1 : len(quoted)-1])
	} else {
		_ = json.Unmarshal(quoted, (*string)(t)) // whatever is no string is left out
	}
	return nil
}

// aboutPart reports whether it is about a part of the request other than its model.
func (r report) aboutPart() bool { return r.param != "" && r.param != "model" }

// Code returns the code of an error, or else its type. Codes are words: anything
// else is left out.
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

// exceedsContext knows the text of errors that have no code for it: Azure's embeddings and vLLM begin
// the message with "This model's maximum context length is", OpenRouter with "This endpoint's".
func (r report) exceedsContext() bool {
	return r.means(TooLarge) || strings.Contains(r.message, "maximum context length is")
}

// notHere reports whether the backend does not offer the service tier or the operation: a provisioned deployment of
// Azure's has no flex, and Foundry's code OperationNotSupported is about an operation that does not work with the model.
func (r report) notHere() bool { return r.param == "service_tier" || r.means(NotHere) }

// aboutItsTokens reports whether a limit or a budget is refused to this one request, because it asks for
// too many tokens. It knows OpenAI's text, and OpenRouter's: "This request requires more credits, or
// fewer max_tokens. You requested up to 65536 tokens, but can only afford 2500."
func (r report) aboutItsTokens() bool {
	return r.says("Request too large for", "fewer max_tokens", "can only afford")
}

// says reports whether the message contains one of these texts.
func (r report) says(texts ...string) bool {
	return slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(r.message, text) })
}

// notPermitted knows OpenAI's text for a key that is restricted to some of the API, and Azure's for
// an identity whose role lacks an operation.
func (r report) notPermitted() bool {
	return r.means(NotPermitted) || r.says("insufficient permissions for this operation", "lacks the required data action")
}
