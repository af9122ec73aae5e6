package streams

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
)

// postStreamTo asks for a stream of an operation.
func postStreamTo(w *lbtest.World, path string) lbtest.Reply {
	return w.Send(w.Request(http.MethodPost, path, strings.NewReader(`{"model":"m","stream":true}`)))
}

// postStreamFor asks for a stream of a model.
func postStreamFor(w *lbtest.World, model string) lbtest.Reply {
	return w.Post(fmt.Sprintf(`{"model":%q,"stream":true,"messages":[]}`, model))
}

// wantBroken checks that the stream was cut for its client, and is the only one
// that counts as broken.
func wantBroken(t *testing.T, w *lbtest.World, reply lbtest.Reply, body string) {
	t.Helper()
	if reply.Status != 200 || reply.Body != body || reply.Err == nil {
		t.Errorf("client got %d %q, %v, want the stream, cut", reply.Status, reply.Body, reply.Err)
	}
	broken, cooldowns := w.Logged("reply broken"), w.Logged("cooldown started")
	if len(broken) != 1 || len(cooldowns) != 1 || cooldowns[0].ContextMap()["class"] != "broken_stream" || cooldowns[0].ContextMap()["cause"] != "unfinished" {
		t.Errorf("logged %v and %v, want one broken reply and its cooldown", broken, cooldowns)
	}
}

func TestAStreamWithoutTheEndMarkThatItsBackendSendsIsBroken(t *testing.T) {
	for path, stream := range map[string]struct{ content, end string }{
		"/v1/chat/completions":  {lbtest.StreamContent, lbtest.StreamEnd},
		"/v1/chat/completions/": {lbtest.StreamContent, lbtest.StreamEnd},
		"/v1/completions":       {"data: {\"choices\":[{\"text\":\"Hello\"}]}\n\n", lbtest.StreamEnd},
		"/openai/deployments/m/chat/completions?api-version=2024-10-21": {lbtest.StreamContent, lbtest.StreamEnd},
		"/v1/responses":            {"data: {\"type\":\"response.output_text.delta\"}\n\n", "event: response.completed\ndata: {}\n\n"},
		"/v1/messages":             {"event: content_block_delta\ndata: {}\n\n", "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"},
		"/v1/images/generations":   {"event: image_generation.partial_image\ndata: {\"b64_json\":\"x\"}\n\n", "event: image_generation.completed\ndata: {}\n\n"},
		"/v1/audio/transcriptions": {"data: {\"type\":\"transcript.text.delta\"}\n\n", "data: {\"type\":\"transcript.text.done\"}\n\n"},
		"/v1/audio/speech":         {"data: {\"type\":\"speech.audio.delta\"}\n\n", "data: {\"type\":\"speech.audio.done\"}\n\n"},
	} {
		t.Run(path, func(t *testing.T) {
			lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(lbtest.Streams(stream.content, stream.end))
				if reply := postStreamTo(w, path); reply.Err != nil || reply.Body != stream.content+stream.end {
					t.Fatalf("client got %d %q, %v", reply.Status, reply.Body, reply.Err)
				}
				w.Backends["a"].Replies(lbtest.Streams(stream.content))
				wantBroken(t, w, postStreamTo(w, path), stream.content)
			})
		})
	}
}

func TestAnEndMarkIsOnlyExpectedOfABackendAndAnOperationThatHadOne(t *testing.T) {
	const failed = "data: {\"error\":{\"code\":\"content_filter\",\"type\":\"invalid_request_error\"}}\n\n"
	const errorEvent = "event: error\ndata: {\"error\":{\"code\":\"content_filter\",\"type\":\"invalid_request_error\"}}\n\n"
	for name, c := range map[string]struct {
		first, path, then string
		at                string // the backend of the second request
	}{
		"another backend":          {lbtest.StreamContent + lbtest.StreamEnd, "/v1/chat/completions", lbtest.StreamContent, "b"},
		"another operation":        {lbtest.StreamContent + lbtest.StreamEnd, "/v1/completions", lbtest.StreamContent, "a"},
		"none before":              {lbtest.StreamContent, "/v1/chat/completions", lbtest.StreamContent, "a"},
		"an error is none":         {lbtest.StreamContent + errorEvent, "/v1/chat/completions", lbtest.StreamContent, "a"},
		"an error ends a stream":   {lbtest.StreamContent + lbtest.StreamEnd, "/v1/chat/completions", lbtest.StreamContent + failed, "a"},
		"an error in its own name": {lbtest.StreamContent + lbtest.StreamEnd, "/v1/chat/completions", lbtest.StreamContent + errorEvent, "a"},
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, "openai_lb {\nbackend http://a\nbackend http://b {\npriority 2\n}\n}", func(t *testing.T, w *lbtest.World) {
				w.AllReply(lbtest.Streams(c.first))
				w.PostStream().WantServed(t, "a")
				if c.at == "b" {
					w.Backends["a"].Replies(lbtest.Throttled("60"))
				}
				w.Backends[c.at].Replies(lbtest.Streams(c.then))
				reply := postStreamTo(w, c.path)
				if reply.WantServed(t, c.at); reply.Body != c.then {
					t.Errorf("client got %q", reply.Body)
				}
				if broken := w.Logged("reply broken"); len(broken) != 0 {
					t.Errorf("logged %v", broken)
				}
			})
		})
	}
}

// A gateway may send the streams of one engine with an end mark, and those of
// another without.
func TestAnEndMarkOfOneModelIsNotExpectedOfAnother(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a {\nmodel own renamed\nmodel with\nmodel without\n}\n}", func(t *testing.T, w *lbtest.World) {
		a := w.Backends["a"]
		for _, model := range []string{"with", "own"} {
			a.Replies(lbtest.Streams(lbtest.StreamContent, lbtest.StreamEnd))
			postStreamFor(w, model).WantServed(t, "a")
		}
		a.Replies(lbtest.Streams(lbtest.StreamContent))
		for range 2 {
			if reply := postStreamFor(w, "without"); reply.Status != 200 || reply.Err != nil || reply.Body != lbtest.StreamContent {
				t.Errorf("client got %d %q, %v, want the stream as it came", reply.Status, reply.Body, reply.Err)
			}
		}
		w.WantNobodyBlamed()
		wantBroken(t, w, postStreamFor(w, "own"), lbtest.StreamContent)
	})
}

func TestAResetForgetsThatABackendSendsEndMarks(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Streams(lbtest.StreamContent, lbtest.StreamEnd))
		w.PostStream().WantServed(t, "a")
		w.Backends["a"].Replies(lbtest.Streams(lbtest.StreamContent))
		wantBroken(t, w, w.PostStream(), lbtest.StreamContent)
		for _, entry := range pools.Default.Entries() {
			entry.Pool.Members[0].Reset(pool.Order{})
		}
		w.PostStream().WantServed(t, "a")
	})
}

func TestAnEndMarkIsExpectedAfterAReload(t *testing.T) {
	a, server := lbtest.Listen(t, "a")
	port := lbtest.FreePort(t)
	config := fmt.Sprintf("{\nadmin off\ndefault_bind 127.0.0.1\n}\nhttp://:%d {\nheader X-Config 1\nopenai_lb {\nbackend %s {\nname a\n}\n}\n}", port, server.URL)
	url := fmt.Sprintf("http://127.0.0.1:%d/v1/chat/completions", port)
	lbtest.Run(t, config)
	a.Replies(lbtest.Streams(lbtest.StreamContent, lbtest.StreamEnd))
	if reply := lbtest.Post(lbtest.NewClient(t), url, `{"stream":true}`); reply.Err != nil {
		t.Fatal(reply.Err)
	}
	lbtest.Reload(t, strings.Replace(config, "X-Config 1", "X-Config 2", 1))
	client := lbtest.ClientOf(t, "2", url)
	a.Replies(lbtest.Streams(lbtest.StreamContent))
	if reply := lbtest.Post(client, url, `{"stream":true}`); reply.Err == nil || reply.Body != lbtest.StreamContent {
		t.Errorf("client got %d %q, %v, want the stream, cut", reply.Status, reply.Body, reply.Err)
	}
}
