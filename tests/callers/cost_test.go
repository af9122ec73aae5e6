package callers

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// limited are limits of all models, and of the one that requests name.
const limited = "caller alice {\nrequests 1k/day\ntokens 1M/day\ntokens 1M/day gpt-4o\n}"

// longEvent is an event of 200 words.
var longEvent = `data: {"choices":[{"delta":{"content":"` + strings.Repeat("word ", 200) + `"}}]}` + "\n\n"

// wantCost checks what alice has used, all of whose tokens are of one model.
func (w *world) wantCost(t *testing.T, requests, tokens int64) {
	t.Helper()
	synctest.Wait()
	w.wantUse(t, tokens)
	for _, use := range w.of("alice").Limits {
		if use.Limit.Kind.String() == "requests" && use.Used != requests {
			t.Errorf("alice has used %d requests, want %d", use.Used, requests)
		}
		if use.Limit.Model != "" && use.Used != tokens {
			t.Errorf("of the model, alice has used %d tokens, want %d", use.Used, tokens)
		}
	}
}

func TestARequestCostsWhatItsReplySays(t *testing.T) {
	stream := lbtest.StreamPreamble + strings.Repeat(lbtest.StreamContent, 3)
	event := func(kind, rest string) string {
		return fmt.Sprintf("event: %[1]s\ndata: {\"type\":%[1]q%[2]s}\n\n", kind, rest)
	}
	for name, c := range map[string]struct {
		path, body       string
		reply            http.HandlerFunc
		requests, tokens int64
	}{
		"a chat":                      {"/v1/chat/completions", prompt(50, ""), used(7, 5), 1, 12},
		"a chat without a usage":      {"/v1/chat/completions", prompt(50, ""), lbtest.Says(200, `{"id":"x"}`), 1, 50},
		"a response":                  {"/v1/responses", prompt(50, ""), lbtest.Says(200, `{"usage":{"input_tokens":7,"output_tokens":5}}`), 1, 12},
		"decisions":                   {"/v1/decisions", `{"model":"gpt-4o","input":"` + strings.Repeat("x", 120) + `","questions":[{"type":"predicate","instructions":"Is it one?"}]}`, lbtest.Says(200, `{"answers":[{"type":"predicate","probability":0.9}],"usage":{"input_tokens":7,"output_tokens":0,"total_tokens":7}}`), 1, 7},
		"embeddings":                  {"/v1/embeddings", prompt(50, ""), lbtest.Says(200, `{"usage":{"prompt_tokens":7,"total_tokens":7}}`), 1, 7},
		"a message of Anthropic":      {"/v1/messages", prompt(50, ""), lbtest.Says(200, `{"usage":{"input_tokens":7,"cache_read_input_tokens":3,"output_tokens":5}}`), 1, 15},
		"a stream":                    {"/v1/chat/completions", prompt(50, `"stream":true,`), lbtest.Streams(stream, `data: {"choices":[],"usage":`+usage(7, 5)+"}\n\n", lbtest.StreamEnd), 1, 12},
		"a stream without a usage":    {"/v1/chat/completions", prompt(50, `"stream":true,`), lbtest.Streams(stream, lbtest.StreamEnd), 1, 50 + 4},
		"a streamed response":         {"/v1/responses", prompt(50, `"stream":true,`), lbtest.Streams(event("response.output_text.delta", ""), event("response.completed", `,"response":{"usage":{"input_tokens":7,"output_tokens":5}}`)), 1, 12},
		"a response that was cut":     {"/v1/responses", prompt(50, `"stream":true,`), lbtest.Streams(strings.Repeat(event("response.output_text.delta", ""), 3), lbtest.Abort), 1, 50 + 256},
		"a stream that was cut":       {"/v1/chat/completions", prompt(50, `"stream":true,`), lbtest.Streams(stream, lbtest.Abort), 1, 50 + 256},
		"a chat that says no usage":   {"/v1/chat/completions", prompt(50, ""), lbtest.Says(200, `{"choices":[{"message":{"role":"assistant","content":"`+strings.Repeat("word ", 80)+`"}}]}`), 1, 50 + 100},
		"a long one":                  {"/v1/chat/completions", prompt(50, ""), lbtest.Says(200, `{"choices":[{"message":{"role":"assistant","content":"`+strings.Repeat("word ", 40_000)+`"}}]}`), 1, 50 + 50_000},
		"a response without a usage":  {"/v1/responses", prompt(50, ""), lbtest.Says(200, `{"output":[{"content":[{"type":"output_text","text":"`+strings.Repeat("word ", 80)+`"}]}],"usage":null}`), 1, 50 + 100},
		"a stream of long events":     {"/v1/chat/completions", prompt(50, `"stream":true,`), lbtest.Streams(strings.Repeat(longEvent, 2), lbtest.StreamEnd), 1, 50 + 500},
		"one that was cut":            {"/v1/chat/completions", prompt(50, `"stream":true,`), lbtest.Streams(strings.Repeat(longEvent, 2), lbtest.Abort), 1, 50 + 500},
		"long events, and a usage":    {"/v1/chat/completions", prompt(50, `"stream":true,`), lbtest.Streams(longEvent, `data: {"choices":[],"usage":`+usage(7, 5)+"}\n\n", lbtest.StreamEnd), 1, 12},
		"a rerank without a usage":    {"/v1/rerank", prompt(50, ""), lbtest.Says(200, `{"results":[{"document":{"text":"`+strings.Repeat("word ", 80)+`"}}]}`), 1, 50},
		"a list of files":             {"/v1/files", "", lbtest.Says(200, `{}`), 1, 0},
		"a batch":                     {"/v1/batches", `{"input_file_id":"file-1234567890"}`, lbtest.Says(200, `{}`), 1, 0},
		"a count of tokens":           {"/v1/responses/input_tokens", prompt(50, ""), lbtest.Says(200, `{"object":"response.input_tokens","input_tokens":50}`), 1, 0},
		"a mistake":                   {"/v1/chat/completions", prompt(50, ""), lbtest.Status(400), 1, 0},
		"a prompt over the context":   {"/v1/chat/completions", prompt(50, ""), lbtest.Says(400, `{"error":{"code":"context_length_exceeded"}}`), 1, 0},
		"a missing file":              {"/v1/files/file-1234567890", "", lbtest.Status(404), 1, 0},
		"a throttle":                  {"/v1/chat/completions", prompt(50, ""), lbtest.Throttled("7"), 0, 0},
		"an exhausted account":        {"/v1/chat/completions", prompt(50, ""), lbtest.Says(429, `{"error":{"code":"insufficient_quota"}}`), 0, 0},
		"a failure":                   {"/v1/chat/completions", prompt(50, ""), lbtest.Status(500), 0, 0},
		"a refused key":               {"/v1/chat/completions", prompt(50, ""), lbtest.Status(401), 0, 0},
		"a broken connection":         {"/v1/chat/completions", prompt(50, ""), lbtest.Aborts, 0, 0},
		"an error as the first event": {"/v1/chat/completions", prompt(50, `"stream":true,`), lbtest.Streams(lbtest.StreamError), 0, 0},
		"a path that is unknown":      {"/nowhere", "", used(1, 1), 0, 0},
		"a recording":                 {"/v1/audio/speech", prompt(50, ""), lbtest.Says(200, "RIFF", "Content-Type", "audio/wav"), 1, 50},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, limited, func(t *testing.T, w *world) {
				w.AllReply(c.reply)
				w.post(aliceKey, c.path, c.body)
				w.wantCost(t, c.requests, c.tokens)
			})
		})
	}
}

func TestTheUsageOfAStreamStaysHidden(t *testing.T) {
	for options, want := range map[string]bool{limited: true, "caller alice {\nrequests 1k/day\n}": true, "": true} {
		inBubble(t, options, func(t *testing.T, w *world) {
			asked := false
			stream := lbtest.StreamPreamble + lbtest.StreamContent
			w.AllReply(func(rw http.ResponseWriter, r *http.Request) {
				asked = r.ContentLength > 70
				lbtest.Streams(stream, `data: {"choices":[],"usage":`+usage(7, 5)+"}\n\n", lbtest.StreamEnd)(rw, r)
			})
			got := w.chat(`{"model":"gpt-4o","messages":[],"stream":true}`)
			if asked != want || strings.Contains(got.Body, "usage") == want {
				t.Errorf("%s: asked for the usage: %v, want %v; the client got %s", options, asked, want, got.Body)
			}
		})
	}
}

func TestARequestIsChargedOnceAndNotPerAttempt(t *testing.T) {
	inBubble(t, "backend http://b\nbackend http://c\n"+limited, func(t *testing.T, w *world) {
		first := true
		w.AllReply(func(rw http.ResponseWriter, r *http.Request) {
			if first {
				first = false
				lbtest.Status(500)(rw, r)
				return
			}
			used(7, 5)(rw, r)
		})
		w.chat(`{"model":"gpt-4o"}`)
		if w.TotalCalls() != 2 {
			t.Errorf("%d calls, want 2", w.TotalCalls())
		}
		w.wantCost(t, 1, 12)
	})
}

func TestARequestThatItsClientGivesUpIsSettled(t *testing.T) {
	for name, c := range map[string]struct {
		reply  http.HandlerFunc
		tokens int64
	}{
		"before the reply":    {lbtest.Hangs, 50},
		"in a stream":         {lbtest.Streams(lbtest.StreamPreamble, strings.Repeat(lbtest.StreamContent, 4), time.Hour), 50 + 256},
		"in a long stream":    {lbtest.Streams(lbtest.StreamPreamble, strings.Repeat(lbtest.StreamContent, 400), time.Hour), 50 + 500},
		"after the usage":     {lbtest.Streams(lbtest.StreamContent, `data: {"choices":[],"usage":`+usage(7, 1)+"}\n\n", time.Hour), 8},
		"between its headers": {lbtest.Streams(time.Hour), 50},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, limited, func(t *testing.T, w *world) {
				w.AllReply(c.reply)
				ctx, leave := context.WithCancel(t.Context())
				r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(prompt(50, `"stream":true,`))).WithContext(ctx)
				r.Header.Set("Authorization", "Bearer "+aliceKey)
				time.AfterFunc(10*time.Second, leave)
				if res, err := w.Client.Do(r); err == nil {
					io.Copy(io.Discard, res.Body)
					res.Body.Close()
				}
				w.wantCost(t, 1, c.tokens)
			})
		})
	}
}

// TestAReplyThatItsClientDoesNotReadIsNotFree has a client that pauses until
// the backend gives up.
func TestAReplyThatItsClientDoesNotReadIsNotFree(t *testing.T) {
	inBubble(t, limited, func(t *testing.T, w *world) {
		const events = 40
		w.AllReply(lbtest.Streams(strings.Repeat(longEvent, events), 5*time.Second, lbtest.Abort))
		r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(prompt(50, `"stream":true,`)))
		r.Header.Set("Api-Key", aliceKey)
		res, err := w.Client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		time.Sleep(20 * time.Second)
		if _, err := io.ReadAll(res.Body); err == nil {
			t.Error("the reply is not cut")
		}
		w.wantCost(t, 1, 50+events*250)
		if n := len(w.Logged("reply broken while the client paused")); n != 1 {
			t.Errorf("it is logged %d times that the client paused", n)
		}
	})
}

func TestAStreamOverMidnightIsChargedOnceForBothDays(t *testing.T) {
	inBubble(t, "caller alice {\ntokens 1k/day\n}", func(t *testing.T, w *world) {
		midnight := time.Date(2000, 1, 2, 0, 0, 0, 0, time.UTC)
		time.Sleep(time.Until(midnight.Add(-time.Minute)))
		w.AllReply(lbtest.Streams(lbtest.StreamContent, 90*time.Second, lbtest.StreamContent, `data: {"choices":[],"usage":`+usage(100, 700)+"}\n\n", lbtest.StreamEnd))
		w.chat(prompt(50, `"stream":true,`)).WantStatus(t, 200)
		synctest.Wait()
		w.wantUse(t, 800-50-256) // the rest counts yesterday
		if got := w.of("alice"); got.Month != 800 {
			t.Errorf("got %d tokens in the month, want 800", got.Month)
		}
	})
}
