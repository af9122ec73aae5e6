package sse

import (
	"bytes"
	"encoding/binary"
	"encoding/json"

	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// Error is an error inside a reply of status 200, in the form of a separate
// reply.
type Error struct {
	// Status is the HTTP status that the error would have had.
	Status int
	// Body is the error in OpenAI's shape: {"error":…}.
	Body []byte
	// OfResponse reports whether it is the error of a failed response.
	OfResponse bool
}

// ofResponse returns the error of a failed response.
func ofResponse(raw json.RawMessage) *Error {
	e := newError(raw)
	e.OfResponse = true
	return e
}

// Whole returns the error in a JSON reply of status 200, or nil if there is
// none. Only an error that is a member of the reply itself counts, and only if
// the reply is not a stored object that failed earlier. creates reports whether
// a response object in the reply was created by this request.
func Whole(body []byte, creates bool) *Error {
	if !mayHoldError(body) {
		return nil
	}
	var reply struct {
		Error  json.RawMessage `json:"error"`
		Object string          `json:"object"`
	}
	if json.Unmarshal(body, &reply) != nil || !present(reply.Error) {
		return nil
	}
	switch {
	case reply.Object == "response" && creates:
		return ofResponse(reply.Error)
	case reply.Object == "", reply.Object == "error":
		return newError(reply.Error)
	}
	return nil
}

const whiteSpace = " \t\r\n"

var errorName = []byte(`"error"`)

// mayHoldError reports whether any object in the data has an "error" that is
// not empty. It is a quick check, because hardly any event has one. The caller
// then parses the data, and finds out which object has the error. Text that
// contains "error" does not match, because JSON escapes its quotes.
func mayHoldError(data []byte) bool {
	for mayHaveDoubleR(skipText(data)) {
		value, found := NextMember(data, errorName)
		if !found || !beginsEmpty(value) {
			return found
		}
		data = value
	}
	return false
}

// NextMember finds the next member in the data whose name has this end,
// including its closing quote. It returns the data from the member's value on.
func NextMember(data, nameEnd []byte) (value []byte, found bool) {
	for {
		i := bytes.Index(data, nameEnd)
		if i < 0 {
			return nil, false
		}
		data = bytes.TrimLeft(data[i+len(nameEnd):], whiteSpace)
		if len(data) > 0 && data[0] == ':' {
			return bytes.TrimLeft(data[1:], whiteSpace), true
		}
	}
}

// shortData is the length of data below which quotes are too frequent to be
// worth checking one by one.
const shortData = 2 << 10

var usageName = []byte("usage")

// skipText returns the part of the data that may have a name that matters:
// "error", or one that ends in "usage". Long data is mostly a text with few
// quotes, and a search for quotes is several times faster than one for a name.
// If quotes are frequent after all, skipText stops early and returns the rest
// unchecked.
func skipText(data []byte) []byte {
	if len(data) < shortData {
		return data
	}
	at := 0
	for range len(data) / 128 {
		i := bytes.IndexByte(data[at:], '"')
		if i < 0 {
			return nil
		}
		if at += i; bytes.HasPrefix(data[at:], errorName) {
			return data[at:]
		}
		if bytes.HasSuffix(data[:at], usageName) {
			return data[at-len(usageName):]
		}
		at++
	}
	return data[at-1:] // the last quote may begin a name
}

// mayHaveDoubleR reports whether the data may have two letters r in a row,
// which are rare except in "error". It takes a fraction of the time of
// bytes.Index, which stops at each of the many quotes.
func mayHaveDoubleR(data []byte) bool {
	for ; len(data) >= 29; data = data[28:] { // four steps at once
		if findDoubleR(data)|findDoubleR(data[7:])|findDoubleR(data[14:])|findDoubleR(data[21:]) != 0 {
			return true
		}
	}
	for ; len(data) >= 8; data = data[7:] {
		if findDoubleR(data) != 0 {
			return true
		}
	}
	return bytes.Contains(data, []byte("rr"))
}

// findDoubleR returns a number other than 0 if there are two letters r in a row
// among the first eight bytes, and sometimes if there is an r and an s.
func findDoubleR(b []byte) uint64 {
	const ones, highs = 0x0101010101010101, 0x8080808080808080
	x := binary.LittleEndian.Uint64(b) ^ ones*'r' // a zero byte for each r
	zeros := (x - ones) &^ x & highs              // the high bit of each zero byte
	return zeros & (zeros >> 8)
}

func beginsEmpty(data []byte) bool {
	for _, empty := range []string{"null", "false", `""`, "{}", "[]"} {
		if bytes.HasPrefix(data, []byte(empty)) {
			return true
		}
	}
	return false
}

// present reports whether the value is not empty. Some backends write an empty
// value instead of null.
func present(raw json.RawMessage) bool {
	switch string(raw) {
	case "", "null", "false", "0", `""`:
		return false
	}
	if raw[0] == '"' {
		return len(bytes.Trim(raw, `"`+whiteSpace)) > 0
	}
	opening, last := raw[0], raw[len(raw)-1]
	if opening == '{' && last == '}' || opening == '[' && last == ']' {
		return len(bytes.Trim(raw[1:len(raw)-1], whiteSpace)) > 0
	}
	return true
}

// newError returns the Error for the value of an "error".
func newError(raw json.RawMessage) *Error {
	if !present(raw) || !json.Valid(raw) {
		raw = json.RawMessage(`{"message":"The backend's stream failed.","type":"server_error","param":null,"code":null}`)
	}
	body := append([]byte(`{"error":`), raw...)
	body = append(body, '}')
	return &Error{Status: verdict.Status(body), Body: body}
}
