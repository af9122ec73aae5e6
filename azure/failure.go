package azure

import (
	"cmp"
	"encoding/json"
	"errors"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore/runtime"
	"github.com/Azure/azure-sdk-for-go/sdk/azidentity"

	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// failure is the part of an error of azidentity's that logs and users see. The
// error itself contains whole replies of token endpoints.
type failure struct {
	message    string
	retryAfter time.Duration
}

func (f *failure) Error() string { return f.message }

// maxMessage is the length of a message, in bytes.
const maxMessage = 400

// summarize makes an error short, and leaves out what may be a secret.
func summarize(err error, secrets ...string) error {
	f := new(failure)
	text := err.Error()
	failed := new(azidentity.AuthenticationFailedError)
	replied := errors.As(err, &failed) && failed.RawResponse != nil
	if _, chain, found := strings.Cut(text, chainIntroduction); found {
		text = tried(chain)
	} else if replied {
		text, _, _ = strings.Cut(text, " authentication failed")
	} else {
		text = firstLine(text)
	}
	if replied {
		text += ": " + describe(failed.RawResponse)
		f.retryAfter, _ = verdict.ReadHint(failed.RawResponse.StatusCode, failed.RawResponse.Header, nil, time.Now())
	}
	for _, secret := range secrets {
		if secret != "" {
			text = strings.ReplaceAll(text, secret, "…")
		}
	}
	text = query.ReplaceAllString(text, "")
	f.message = cut(opaque.ReplaceAllString(text, "…"))
	return f
}

// query matches the query of a URL.
var query = regexp.MustCompile(`\?[^\s"]*`)

// opaque matches JSON Web Tokens, and texts too long for a word.
var opaque = regexp.MustCompile(`eyJ[\w.-]{16,}|[\w.~+=-]{80,}`)

func cut(text string) string {
	if len(text) > maxMessage {
		text = strings.ToValidUTF8(text[:maxMessage], "") + "…"
	}
	return text
}

// describe returns the description of a reply of a token endpoint: its status
// and its error's name and first line, and not a word of a reply that is no
// error.
func describe(res *http.Response) string {
	status := strconv.Itoa(res.StatusCode)
	if text := http.StatusText(res.StatusCode); text != "" {
		status += " " + text
	}
	body, err := runtime.Payload(res)
	if err != nil || res.StatusCode < 400 {
		return status
	}
	// Entra and IMDS, and App Service
	var reply struct {
		Error            string `json:"error"`
		ErrorDescription string `json:"error_description"`
		Message          string `json:"message"`
	}
	if json.Unmarshal(body, &reply) != nil {
		return status
	}
	description, _, _ := strings.Cut(cmp.Or(reply.ErrorDescription, reply.Message), "\n")
	description, _, _ = strings.Cut(description, " Trace ID:")
	for _, word := range []string{reply.Error, strings.TrimSpace(description)} {
		if word != "" {
			status += ", " + word
		}
	}
	return status
}

// chainIntroduction begins the list of the credentials that a chain tried.
const chainIntroduction = "Attempted credentials:"

// bodyMarks come before azidentity's quotes of a reply's body.
var bodyMarks = []string{"The endpoint responded with", "unexpected response", "To troubleshoot, visit"}

// tried lists the credentials of a chain with the first line of each one's
// error.
func tried(chain string) string {
	var lines []string
	for line := range strings.SplitSeq(chain, "\n\t") {
		// further lines of an error have a second tab
		if line != "" && line[0] != '\t' {
			lines = append(lines, firstLine(line))
		}
	}
	return strings.Join(lines, "; ")
}

func firstLine(text string) string {
	// MSAL breaks the line before the cause
	text = strings.ReplaceAll(text, "error:\n ", "error: ")
	text, _, _ = strings.Cut(text, "\n")
	for _, mark := range bodyMarks {
		text, _, _ = strings.Cut(text, mark)
	}
	return strings.Trim(text, " .:")
}
