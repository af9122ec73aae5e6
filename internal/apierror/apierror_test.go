package apierror

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"reflect"
	"regexp"
	"testing"
)

// TestAtMessagesAnErrorHasTheTypeThatAnthropicGivesItsStatus is about the types
// of Anthropic's documentation ("Errors").
func TestAtMessagesAnErrorHasTheTypeThatAnthropicGivesItsStatus(t *testing.T) {
	for status, want := range map[int]string{
		400: "invalid_request_error", 401: "authentication_error", 402: "billing_error", 403: "permission_error", 404: "not_found_error",
		405: "invalid_request_error", 408: "invalid_request_error", 413: "request_too_large", 415: "invalid_request_error",
		426: "invalid_request_error", 429: "rate_limit_error", 431: "invalid_request_error", 500: "api_error", 502: "api_error",
		503: "overloaded_error", 504: "timeout_error", 529: "overloaded_error", 302: "api_error",
	} {
		e := Error{Status: status, Message: "Why.", Kind: "server_error", Code: "our_code", Param: "model"}
		res := e.Response(httptest.NewRequest(http.MethodPost, "/v1/messages?beta=true", nil))
		got := decoded(t, res)
		id := res.Header.Get("X-Request-Id")
		if want := map[string]any{
			"type":       "error",
			"error":      map[string]any{"type": want, "message": "Why.", "details": map[string]any{"error_code": "our_code"}},
			"request_id": id,
		}; !reflect.DeepEqual(got, want) {
			t.Errorf("%d: %v, want %v", status, got, want)
		}
		if id == "" || res.Header.Get("Request-Id") != id || res.StatusCode != status {
			t.Errorf("%d: %d with %v", status, res.StatusCode, res.Header)
		}
	}
}

func TestElsewhereAnErrorHasOpenAIsForm(t *testing.T) {
	for _, path := range []string{"/v1/chat/completions", "/v1/threads/thread_1/messages", "/"} {
		res := UnknownPath.Response(httptest.NewRequest(http.MethodPost, path, nil))
		want := map[string]any{"error": map[string]any{"type": UnknownPath.Kind, "message": UnknownPath.Message, "param": nil, "code": "unknown_url"}}
		if got := decoded(t, res); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %v, want %v", path, got, want)
		}
		if res.Header["Request-Id"] != nil || res.Header.Get("X-Request-Id") == "" {
			t.Errorf("%s: %v", path, res.Header)
		}
	}
}

func TestARequestHasAnIDOfItsOwnLikeOpenAIs(t *testing.T) {
	form, seen := regexp.MustCompile(`^req_[A-Z2-7]{26,}$`), make(map[string]bool)
	for range 3 {
		id := UnknownPath.Response(httptest.NewRequest(http.MethodPost, "/", nil)).Header.Get("X-Request-Id")
		if !form.MatchString(id) || seen[id] {
			t.Errorf("the ID %s after %v", id, seen)
		}
		seen[id] = true
	}
}

func TestWhatAStatusNeedsIsThereInBothForms(t *testing.T) {
	for _, path := range []string{"/v1/chat/completions", "/v1/messages"} {
		r := httptest.NewRequest(http.MethodPost, path, nil)
		if got := WrongKey.Response(r).Header.Get("WWW-Authenticate"); got != "Bearer" {
			t.Errorf("%s: WWW-Authenticate is %q", path, got)
		}
		if got := MethodNotAllowed.Response(r).Header.Get("Allow"); got == "" {
			t.Errorf("%s: a 405 has no Allow", path)
		}
	}
}

func decoded(t *testing.T, res *http.Response) (value map[string]any) {
	t.Helper()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	if int64(len(text)) != res.ContentLength {
		t.Errorf("%d bytes, but Content-Length %d", len(text), res.ContentLength)
	}
	if err := json.Unmarshal(text, &value); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	return value
}
