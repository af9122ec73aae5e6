package openaiapi

import "testing"

func TestWhatMayBeDoneTwice(t *testing.T) {
	for _, tt := range []struct {
		method, operation     string
		inference, repeatable bool
	}{
		{"POST", "/chat/completions", true, true},
		{"POST", "/chat/completions/", true, true},
		{"POST", "/completions", true, true},
		{"POST", "/embeddings", true, true},
		{"POST", "/moderations", true, true},
		{"POST", "/rerank", true, true},
		{"POST", "/decisions", true, true},
		{"POST", "/responses", true, true},
		{"POST", "/responses/compact", true, true},
		{"POST", "/responses/input_tokens", true, true},
		{"POST", "/messages", true, true},
		{"POST", "/messages/count_tokens", true, true},
		{"POST", "/audio/speech", true, true},
		{"POST", "/audio/transcriptions", true, true},
		{"POST", "/audio/translations", true, true},
		{"POST", "/images/generations", true, true},
		{"POST", "/images/edits", true, true},
		{"POST", "/images/variations", true, true},
		{"POST", "/images/embeddings", true, true},

		{"POST", "/responses/resp_1/cancel", false, false},
		{"POST", "/responses/compact/x", false, false},
		{"POST", "/chat/completions/chatcmpl-1", false, false}, // changes the metadata of a stored one
		{"POST", "/chat/completions//", false, false},
		{"POST", "/Chat/Completions", false, false},
		{"POST", "/chat%2Fcompletions", false, false},
		{"POST", "chat/completions", false, false},
		{"POST", "/batches", false, false},
		{"POST", "/files", false, false},
		{"POST", "/uploads", false, false},
		{"POST", "/fine_tuning/jobs", false, false},
		{"POST", "/vector_stores", false, false},
		{"POST", "/threads/thread_1/messages", false, false},
		{"POST", "/conversations", false, false},
		{"POST", "/audio", false, false},
		{"POST", "/audio/voices", false, false},
		{"POST", "/videos", false, false},
		{"POST", "/decisions/dec_1", false, false},
		{"GET", "/decisions", false, true},
		{"POST", "/realtime/sessions", false, false},
		{"POST", "/", false, false},
		{"POST", "", false, false},

		{"GET", "/chat/completions", false, true},
		{"GET", "/files/file-1/content", false, true},
		{"HEAD", "/models", false, true},
		{"OPTIONS", "/batches", false, true},
		{"TRACE", "/", false, false},
		{"PUT", "/chat/completions", false, false},
		{"PATCH", "/x", false, false},
		{"DELETE", "/files/file-1", false, false},
		{"CONNECT", "/realtime", false, false},
		{"get", "/files", false, false}, // methods are case-sensitive (RFC 9110 section 9.1)
		{"", "", false, false},
	} {
		if IsInference(tt.method, tt.operation) != tt.inference || repeatable(tt.method, tt.operation) != tt.repeatable {
			t.Errorf("%s %s: inference %v and repeatable %v, want %v and %v", tt.method, tt.operation,
				IsInference(tt.method, tt.operation), repeatable(tt.method, tt.operation), tt.inference, tt.repeatable)
		}
	}
}
