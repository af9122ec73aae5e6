package openaiapi

import (
	"bytes"
	"math"
	"net/http/httptest"
	"strconv"
	"testing"
)

func TestAnOutputIsLimitedByTheMembersThatItsAPIObeys(t *testing.T) {
	for _, tt := range []struct {
		operation, body string
		limit           int64
		ok              bool
	}{
		{"/chat/completions", `{}`, 0, false},
		{"/chat/completions", `{"max_tokens":0}`, 0, false},
		{"/chat/completions", `{"max_tokens":100}`, 100, true},
		{"/chat/completions", `{"max_tokens":1,"max_completion_tokens":10000}`, 10000, true},
		{"/chat/completions", `{"max_completion_tokens":10000,"max_tokens":1}`, 10000, true},
		{"/chat/completions", `{"max_tokens":10000,"max_tokens":1}`, 10000, true},
		{"/chat/completions", `{"max_output_tokens":1}`, 0, false},
		{"/chat/completions", `{"max_tokens":100,"n":3}`, 300, true},
		{"/chat/completions", `{"max_tokens":100,"n":` + strconv.Itoa(math.MaxInt64) + `}`, math.MaxInt64 / 100 * 100, true},
		{"/chat/completions", `{"max_tokens":1,"messages":[`, 0, false},
		{"/completions", `{"max_tokens":7,"max_completion_tokens":70}`, 7, true},
		{"/responses", `{"max_tokens":1,"max_output_tokens":50}`, 50, true},
		{"/responses", `{"max_tokens":1}`, 0, false},
		{"/messages", `{"max_tokens":50}`, 50, true},
		{"/embeddings", `{"input":"x"}`, 0, true},
		{"/images/generations", `{"prompt":"x"}`, 0, false},
	} {
		r := httptest.NewRequest("POST", "/v1"+tt.operation, bytes.NewReader([]byte(tt.body)))
		q := Parse(r, ParsePath(r.URL.Path), Received{Bytes: []byte(tt.body), Whole: true, Length: int64(len(tt.body))}, nil)
		if limit, ok := q.OutputLimit(); limit != tt.limit || ok != tt.ok {
			t.Errorf("%s %s: got %d %v, want %d %v", tt.operation, tt.body, limit, ok, tt.limit, tt.ok)
		}
	}
}

func TestAPromptForAModelHasATokenAtLeast(t *testing.T) {
	for _, tt := range []struct {
		method, operation, kind, body string
		want                          int64
	}{
		{"POST", "/chat/completions", "application/json", "", 1},
		{"POST", "/chat/completions", "application/json", `{"model":"gpt-4o","messages":[{"content":"Hi"}]}`, 12},
		{"POST", "/audio/transcriptions", "multipart/form-data; boundary=x", "--x\r\n", 1000},
		{"POST", "/batches", "application/json", `{"input_file_id":"file-123456"}`, 0},
		{"POST", "/messages/count_tokens", "application/json", `{"messages":[{"content":"Hi"}]}`, 0},
		{"GET", "/files", "", "", 0},
	} {
		r := httptest.NewRequest(tt.method, "/v1"+tt.operation, nil)
		r.Header.Set("Content-Type", tt.kind)
		q := Parse(r, ParsePath(r.URL.Path), Received{Bytes: []byte(tt.body), Whole: true, Length: int64(len(tt.body))}, nil)
		if got := q.PromptTokens([]byte(tt.body)); got != tt.want {
			t.Errorf("%s %s: got %d, want %d", tt.operation, tt.body, got, tt.want)
		}
	}
}
