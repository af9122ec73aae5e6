package openaiapi

import "testing"

func TestPathsOfAnthropicsMessages(t *testing.T) {
	for path, want := range map[string]bool{
		"/v1/messages":                         true,
		"/v1/messages/":                        true,
		"/v1/messages/count_tokens":            true,
		"/v1/messages/batches/msgbatch_1":      true,
		"/openai/v1/messages":                  true,
		"/OpenAI/V1/Messages":                  true,
		"/openai/deployments/claude/messages":  true,
		"/openai/deployments/v1/messages":      true,
		"/openai/messages":                     true,
		"/messages":                            true,
		"/messages/count_tokens":               true,
		"/models/messages":                     true,
		"/anthropic/v1/messages":               true, // Microsoft Foundry's, which is an unknown path here
		"/a/b/v1/messages/count_tokens":        true,
		"//v1/messages":                        true,
		"/v1//messages":                        true,
		"/v1/%6Dessages":                       true,
		"/v1/messages;x=1":                     true,
		"/v1/threads/thread_1/messages":        false, // OpenAI's
		"/openai/threads/thread_1/messages":    false,
		"/v1/threads/v1/messages":              false,
		"/v1/messagesets":                      false,
		"/v1/chat/completions":                 false,
		"/v1/chat/completions/v1/messages":     false,
		"/openai/deployments/messages/chat/x":  false,
		"/openai/deployments/messages":         false,
		"/v1":                                  false,
		"/":                                    false,
		"":                                     false,
		"*":                                    false,
		"/models/messages/x":                   false, // a model
		"/v1/models/messages":                  false,
		"/team/messages":                       false,
		"/openai/deployments/v1/chat/messages": false,
	} {
		if got := IsMessages(path); got != want {
			t.Errorf("%q: %t, want %t", path, got, want)
		}
	}
}
