package callers

import (
	"net/http"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// form is a form with a session, as a browser sends it for a call.
func form(session string) string {
	return "--b\r\nContent-Disposition: form-data; name=\"sdp\"\r\n\r\nv=0\r\n\r\n--b\r\nContent-Disposition: form-data; name=\"session\"\r\n\r\n" + session + "\r\n--b--\r\n"
}

func TestACallerWithModelsReachesNoOtherOneByAPathThatIsNotListed(t *testing.T) {
	inBubble(t, "caller alice {\nmodels gpt-4o\n}", func(t *testing.T, w *world) {
		for _, c := range []struct {
			path, body string
			served     bool
		}{
			{"/v1/engines/gpt-4o/completions", `{"prompt":"x"}`, true},
			{"/v1/engines/gpt-4o/completions", `{"prompt":"x","model":"gpt-4o"}`, true},
			{"/v1/engines/gpt-4o/completions", `{"prompt":"x","model":"o3"}`, false},
			{"/v1/engines/o3/completions", `{"prompt":"x"}`, false},
			{"/v1/engines/o3/completions", `{"prompt":"x","model":"gpt-4o"}`, false},
			{"/v1/engines/o%33/completions", `{"prompt":"x","model":"gpt-4o"}`, false},
			{"/v1/score", `{}`, false},
			{"/v1/score", ``, false},
			{"/v1/score", `model=o3`, false},
			{"/v1/score?model=gpt-4o", `{"Model":"o3"}`, false},
			{"/v1/score?model=gpt-4o", `["o3"]`, false},
			{"/v1/score", `{"model":"gpt-4o"}`, true},
			{"/v1/score", `{"model":"gpt-4o","model":"gpt-4o"}`, false},
			{"/openai/deployments/gpt-4o/extensions/chat/completions", `{}`, true},
			{"/openai/deployments/o3/extensions/chat/completions", `{}`, false},
			{"/v1/realtime/calls", `{"sdp":"v=0","session":{"model":"gpt-4o"}}`, true},
			{"/v1/realtime/calls", `{"sdp":"v=0","session":{"model":"o3"}}`, false},
			{"/v1/realtime/calls", `{"sdp":"v=0","session":{"model":"gpt-4o","Model":"o3"}}`, false},
			{"/v1/realtime/calls", `{"sdp":"v=0","session":{"model":"gpt-4o"},"session":{"model":"o3"}}`, false},
			{"/v1/realtime/calls", `{"sdp":"v=0"}`, false},
			{"/v1/realtime/calls", form(`{"model":"gpt-4o"}`), true},
			{"/v1/realtime/calls", form(`{"model":"o3"}`), false},
			{"/v1/realtime/calls", "v=0\r\n", false},
			{"/v1/realtime/calls?model=gpt-4o", "v=0\r\n", true},
			{"/v1/realtime/client_secrets", `{"session":{"model":"o3"}}`, false},
			{"/v1/realtime/calls/rtc_1234567890/accept", `{"model":"o3"}`, false},
			{"/v1/realtime/calls/rtc_1234567890/hangup", ``, true},
			{"/v1/videos", `{"prompt":"x"}`, false},
			{"/v1/chat/completions", `{"model":"gpt-4o","models":["gpt-4o"]}`, true},
			{"/v1/chat/completions", `{"model":"gpt-4o","models":["gpt-4o","o3"]}`, false},
			{"/v1/chat/completions", `{"model":"gpt-4o","mode\u006cs":["o3"]}`, false},
			{"/v1/chat/completions", `{"model":"gpt-4o","models":"o3"}`, false},
			{"/v1/chat/completions", `{"model":"gpt-4o","fallbacks":[{"model":"o3"}]}`, false},
			{"/v1/chat/completions", `{"model":"gpt-4o","metadata":{"models":["o3"]}}`, true},
			{"/v1/files", `{}`, true},
			{"/v1/vector_stores", `{}`, true},
			{"/v1/threads/thread_1234567890/runs", `{"model":"o3"}`, false},
		} {
			before := w.TotalCalls()
			r := w.Request(http.MethodPost, c.path, strings.NewReader(c.body))
			r.Header.Set("Authorization", "Bearer "+aliceKey)
			switch {
			case strings.HasPrefix(c.body, "--"):
				r.Header.Set("Content-Type", "multipart/form-data; boundary=b")
			case strings.HasPrefix(c.body, "v="):
				r.Header.Set("Content-Type", "application/sdp")
			}
			got := w.Send(r)
			if served := w.TotalCalls() > before; served != c.served || !served && got.Status != http.StatusNotFound && got.Status != http.StatusBadRequest {
				t.Errorf("%s %q: got %d %s", c.path, c.body, got.Status, got.Body)
			}
			w.post(bobKey, c.path, c.body).WantStatus(t, http.StatusOK)
		}
	})
}

func TestAReplyThatBringsAUsageIsChargedWhateverItsPath(t *testing.T) {
	said := lbtest.Says(200, `{"usage":{"prompt_tokens":70,"completion_tokens":500}}`)
	run := lbtest.Streams("event: thread.run.completed\ndata: {\"id\":\"run_1234567890\",\"usage\":"+usage(70, 500)+"}\n\n", "event: done\ndata: [DONE]\n\n")
	for name, c := range map[string]struct {
		method, path, body string
		reply              http.HandlerFunc
		tokens             int64
	}{
		"an engine":                 {"POST", "/v1/engines/x/completions", prompt(50, ""), said, 570},
		"an engine that says none":  {"POST", "/v1/engines/x/completions", prompt(50, ""), lbtest.Says(200, `{"choices":[{"text":"`+strings.Repeat("word ", 80)+`"}]}`), 150},
		"an extension":              {"POST", "/openai/deployments/x/extensions/chat/completions", prompt(50, ""), said, 570},
		"a path that is unknown":    {"POST", "/v1/score", `{}`, said, 570},
		"without a usage":           {"POST", "/v1/score", `{}`, lbtest.Says(200, `{"text":"x"}`), 0},
		"a stream":                  {"POST", "/v1/threads/runs", `{"stream":true}`, run, 570},
		"a list":                    {"GET", "/v1/threads/thread_1234567890/runs/run_1234567890", "", said, 0},
		"a change of what is there": {"POST", "/v1/chat/completions/chatcmpl-1234567890", `{}`, said, 0},
		"a batch that is cancelled": {"POST", "/v1/batches/batch_1234567890/cancel", `{}`, said, 0},
		"a failure":                 {"POST", "/v1/score", `{}`, lbtest.Says(400, `{"usage":{"prompt_tokens":70,"completion_tokens":500}}`), 0},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, "caller alice {\nrequests 1k/day\ntokens 1M/day\n}", func(t *testing.T, w *world) {
				w.AllReply(c.reply)
				r := w.Request(c.method, c.path, strings.NewReader(c.body))
				r.Header.Set("Authorization", "Bearer "+aliceKey)
				w.Send(r)
				synctest.Wait()
				w.wantCost(t, 1, c.tokens)
			})
		})
	}
}
