package callers

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
)

// websocket makes a request a handshake.
func websocket(r *http.Request) *http.Request {
	r.Header.Set("Connection", "Upgrade")
	r.Header.Set("Upgrade", "websocket")
	r.Header.Set("Sec-WebSocket-Version", "13")
	r.Header.Set("Sec-WebSocket-Key", "AAAAAAAAAAAAAAAAAAAAAA==")
	return r
}

// TestAModelOfAnotherCallerCannotBeHiddenNextToAnAllowedOne has WebSockets, of
// which the query names the model. Some servers read the last parameter of a
// name (Starlette), and some the first.
func TestAModelOfAnotherCallerCannotBeHiddenNextToAnAllowedOne(t *testing.T) {
	inBubble(t, "caller alice {\nmodels gpt-realtime\n}", func(t *testing.T, w *world) {
		for path, want := range map[string]string{
			"/v1/realtime?model=gpt-realtime":                         "model=gpt-realtime",
			"/v1/realtime?model=gpt-realtime&model=o3":                "model=gpt-realtime&model=gpt-realtime",
			"/v1/realtime?x=1&model=gpt-realtime&MODEL=o3":            "x=1&model=gpt-realtime&MODEL=gpt-realtime",
			"/v1/realtime?model=gpt-realtime&deployment=o3":           "model=gpt-realtime",
			"/v1/realtime?deployment=gpt-realtime&deployment=o3":      "model=gpt-realtime",
			"/openai/realtime?deployment=gpt-realtime&deployment=o3":  "model=gpt-realtime",
			"/v1/realtime?model=o3&model=gpt-realtime":                "refused",
			"/v1/responses?model=gpt-realtime":                        "refused", // its messages name models
			"/openai/v1/responses?model=gpt-realtime&api-version=now": "refused",
		} {
			asked := "refused"
			w.AllReply(func(rw http.ResponseWriter, r *http.Request) {
				asked = r.URL.RawQuery
				lbtest.Status(http.StatusBadRequest)(rw, r)
			})
			r := websocket(w.Request(http.MethodGet, path, nil))
			r.Header.Set("Authorization", "Bearer "+aliceKey)
			if got := w.Send(r); asked != want {
				t.Errorf("%s: the backend was asked for %q, want %q; the client got %d", path, asked, want, got.Status)
			}
		}
	})
}

// TestASecondModelBeyondTheBufferIsRefused has bodies that are longer than what
// the balancer reads of them. Most servers read the last model of a body.
func TestASecondModelBeyondTheBufferIsRefused(t *testing.T) {
	inBubble(t, "request_buffers 2KB\ncaller alice {\nmodels gpt-4o\n}", func(t *testing.T, w *world) {
		long := `"user":"` + strings.Repeat("x", 4000) + `"`
		for body, want := range map[string]int{
			`{"model":"gpt-4o",` + long + `,"model":"o3"}`: http.StatusRequestEntityTooLarge,
			`{` + long + `,"model":"o3"}`:                  http.StatusRequestEntityTooLarge,
			`{"model":"gpt-4o"}`:                           http.StatusOK,
		} {
			for _, path := range []string{"/v1/chat/completions", "/v1/chat/completions?model=gpt-4o", "/openai/deployments/gpt-4o/chat/completions?api-version=1"} {
				got := w.post(aliceKey, path, body)
				if got.Status != want {
					t.Errorf("%s %.20s…: got %d, want %d", path, body, got.Status, want)
				}
			}
		}
		w.post(bobKey, "/v1/chat/completions", `{"model":"gpt-4o",`+long+`}`).WantServed(t, "a")
	})
}

// TestAResponseInTheBackgroundIsChargedWhatItDeclares is about output that no
// reply to the caller's request shows.
func TestAResponseInTheBackgroundIsChargedWhatItDeclares(t *testing.T) {
	queued := lbtest.Says(200, `{"id":"resp_1234567890","object":"response","status":"queued","background":true,"usage":null}`)
	begun := lbtest.Streams("event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"resp_1234567890\",\"usage\":null}}\n\n",
		"event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"x\"}\n\n", time.Hour)
	for name, c := range map[string]struct {
		members string
		reply   http.HandlerFunc
		tokens  int64
	}{
		"its output is not limited":   {`"background":true,`, queued, 50 + 16_384},
		"its output is limited":       {`"background":true,"max_output_tokens":100,`, queued, 50 + 100},
		"it is named twice":           {`"background":true,"background":false,`, queued, 50 + 16_384},
		"a stream that is cancelled":  {`"background":true,"stream":true,`, begun, 50 + 16_384},
		"it is served at once":        {`"background":true,`, lbtest.Says(200, `{"usage":{"input_tokens":7,"output_tokens":5}}`), 12},
		"a stream in the foreground":  {`"background":false,"stream":true,"max_output_tokens":10,`, begun, 50 + 10},
		"a request that was refused":  {`"background":true,`, lbtest.Throttled("7"), 0},
		"a mistake":                   {`"background":true,`, lbtest.Status(400), 0},
		"its output is much too long": {`"background":true,"max_output_tokens":100000,`, queued, 50 + 100_000},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, limited, func(t *testing.T, w *world) {
				w.AllReply(c.reply)
				ctx, leave := context.WithTimeout(t.Context(), 10*time.Second)
				defer leave()
				r := w.Request(http.MethodPost, "/v1/responses", strings.NewReader(prompt(50, c.members))).WithContext(ctx)
				r.Header.Set("Authorization", "Bearer "+aliceKey)
				if res, err := w.Client.Do(r); err == nil {
					io.Copy(io.Discard, res.Body)
					res.Body.Close()
				}
				synctest.Wait()
				w.wantUse(t, c.tokens)
			})
		})
	}
}

// TestATierOfAnotherConfigHasNoShare has what a reload brings for a moment:
// requests of one config, and limits of another one, which has more tiers.
func TestATierOfAnotherConfigHasNoShare(t *testing.T) {
	for _, options := range []string{"caller alice {\ntokens 1k/day\n}", "caller alice {\ntier batch\n}\ntier batch {\nreserve 20%\n}"} {
		inBubble(t, options, func(t *testing.T, w *world) {
			w.chat(`{"model":"gpt-4o"}`).WantServed(t, "a")
			lbtest.LimitersOf(w.Handler.Pool).Configure(time.Now(), func(string) limiter.Settings {
				return limiter.Settings{Tier: "nightly", Tiers: []string{"interactive", "batch", "nightly"}}
			})
			w.chat(`{"model":"gpt-4o"}`).WantServed(t, "a")
		})
	}
}

// TestAClientThatRetriesWhenItIsToldIsServed has waits that are not whole
// milliseconds.
func TestAClientThatRetriesWhenItIsToldIsServed(t *testing.T) {
	inBubble(t, "caller alice {\nrequests 7/second\n}", func(t *testing.T, w *world) {
		for range 50 {
			got := w.chat(`{}`)
			for got.Status == 200 {
				got = w.chat(`{}`)
			}
			wait, err := time.ParseDuration(got.Header.Get("Retry-After-Ms") + "ms")
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(wait)
			w.chat(`{}`).WantServed(t, "a")
			time.Sleep(1234567 * time.Nanosecond)
		}
	})
}

// TestACompressedPromptIsRefusedToACallerWithALimitOfTokens is about prompts of
// which the tokens cannot be estimated, and streams that cannot be asked for
// their usage.
func TestACompressedPromptIsRefusedToACallerWithALimitOfTokens(t *testing.T) {
	inBubble(t, "caller alice {\ntokens 1k/day\n}\ncaller bob {\nrequests 10/day\n}", func(t *testing.T, w *world) {
		for key, want := range map[string]int{aliceKey: http.StatusUnsupportedMediaType, bobKey: http.StatusOK} {
			for path, want := range map[string]int{"/v1/chat/completions": want, "/v1/files": http.StatusOK} {
				r := w.Request(http.MethodPost, path, strings.NewReader(lbtest.Gzipped(prompt(5000, `"stream":true,`))))
				r.Header.Set("Authorization", "Bearer "+key)
				r.Header.Set("Content-Encoding", "gzip")
				w.Send(r).WantStatus(t, want)
			}
		}
		w.wantUse(t, 0)
	})
}

// Codex sends its requests in zstd. They are read as if they had come without
// it, and sent as they came.
func TestAPromptInZstandardIsLimitedChargedAndFailsOver(t *testing.T) {
	inBubbleWith(t, "backend http://a\nbackend http://b {\npriority 2\nmodel o3 deployment-3\n}\ncaller alice {\ntokens 10k/day\nmodels gpt-4o o3\n}", func(t *testing.T, w *world) {
		post := func(body string) lbtest.Reply {
			r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(lbtest.Zstandard(body)))
			r.Header.Set("Authorization", "Bearer "+aliceKey)
			r.Header.Set("Content-Encoding", "zstd")
			return w.Send(r)
		}
		body := strings.Replace(prompt(5000, ""), `"model":"gpt-4o"`, `"model":"o3"`, 1)
		w.Backends["a"].Replies(lbtest.Aborts)
		w.Backends["b"].Replies(used(4000, 5))
		post(body).WantServed(t, "b")
		a, b := w.Backends["a"].Received()[0], w.Backends["b"].Received()[0]
		if a.BodyHash != lbtest.Hash([]byte(lbtest.Zstandard(body))) || a.Request.Header.Get("Content-Encoding") != "zstd" {
			t.Errorf("the first backend got %d bytes in %q", a.BodyBytes, a.Request.Header.Get("Content-Encoding"))
		}
		if b.BodyHash != lbtest.Hash([]byte(strings.Replace(body, `"o3"`, `"deployment-3"`, 1))) || b.Request.Header.Get("Content-Encoding") != "" {
			t.Errorf("the second backend, which has another name for the model, got %.80s in %q", b.Beginning, b.Request.Header.Get("Content-Encoding"))
		}
		w.wantUse(t, 4005)
		post(strings.Replace(body, `"o3"`, `"o4"`, 1)).WantStatus(t, http.StatusNotFound)
		post(prompt(9500, "")).WantStatus(t, http.StatusTooManyRequests) // as its text is so long
	})
}

// TestACompressedStreamThatIsCancelledIsChargedByItsEvents has a backend that
// compresses its events, as some proxies do if the client accepts that.
func TestACompressedStreamThatIsCancelledIsChargedByItsEvents(t *testing.T) {
	inBubble(t, limited, func(t *testing.T, w *world) {
		w.AllReply(func(rw http.ResponseWriter, r *http.Request) {
			rw.Header().Set("Content-Type", "text/event-stream")
			rw.Header().Set("Content-Encoding", "gzip")
			io.WriteString(rw, lbtest.Gzipped(lbtest.StreamPreamble+strings.Repeat(lbtest.StreamContent, 400)))
			http.NewResponseController(rw).Flush()
			<-r.Context().Done()
		})
		ctx, leave := context.WithTimeout(t.Context(), 10*time.Second)
		defer leave()
		r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(prompt(50, `"stream":true,`))).WithContext(ctx)
		r.Header.Set("Authorization", "Bearer "+aliceKey)
		r.Header.Set("Accept-Encoding", "gzip")
		if res, err := w.Client.Do(r); err == nil {
			io.Copy(io.Discard, res.Body)
			res.Body.Close()
		}
		w.wantCost(t, 1, 50+500)
	})
}
