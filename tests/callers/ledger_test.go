package callers

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/modules/ledger"
)

// entries returns the rows of the ledger of a pool in memory and in Caddy's
// storage, as "caller model backend tier: numbers".
func entries(t *testing.T, pool string) (lines []string) {
	t.Helper()
	pages, err := ledger.Pages(t.Context(), func(w ledger.Where) bool { return w.Pool == pool })
	if err != nil {
		t.Fatal(err)
	}
	sum := make(map[ledger.Key]ledger.Use)
	for _, p := range pages {
		for _, row := range p.Rows {
			u := sum[row.Key]
			u.Add(row.Use)
			sum[row.Key] = u
		}
	}
	for k, u := range sum {
		lines = append(lines, fmt.Sprintf("%s %s %s %s: %v", cmp.Or(k.Caller, "-"), cmp.Or(k.Model, "-"), k.Backend, k.ServiceTier, u))
	}
	slices.Sort(lines)
	return lines
}

// wantEntries checks them. The numbers are requests, input, cached, output,
// reasoning, and the estimated input and output.
func (w *world) wantEntries(t *testing.T, want ...string) {
	t.Helper()
	synctest.Wait()
	if got := entries(t, w.Handler.Pool); !slices.Equal(got, want) {
		t.Errorf("the ledger has\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// chatOf is a chat about a model.
func chatOf(model, rest string) string {
	return `{"model":"` + model + `",` + rest + `"messages":[{"role":"user","content":"Hello"}]}`
}

func TestTheLedgerHasARowForEachCallerModelBackendAndServiceTier(t *testing.T) {
	reply := func(tier string) http.HandlerFunc {
		return lbtest.Says(200, `{"id":"x","choices":[],`+tier+`"usage":{"prompt_tokens":70,"completion_tokens":50,"prompt_tokens_details":{"cached_tokens":40},"completion_tokens_details":{"reasoning_tokens":30}}}`)
	}
	inBubbleWith(t, "backend http://a {\npriority 1\n}\nbackend http://b {\npriority 2\n}\ncaller * {\ntokens 1G/day\n}", func(t *testing.T, w *world) {
		w.AllReply(reply(""))
		for range 2 {
			w.post(aliceKey, "/v1/chat/completions", chatOf("gpt-4o", "")).WantServed(t, "a")
		}
		w.post(bobKey, "/v1/chat/completions", chatOf("gpt-4o", "")).WantServed(t, "a")
		w.post(bobKey, "/v1/chat/completions", chatOf("o3", "")).WantServed(t, "a")
		w.AllReply(reply(`"service_tier":"flex",`))
		w.post(bobKey, "/v1/chat/completions", chatOf("o3", `"service_tier":"flex",`)).WantServed(t, "a")
		w.Backends["a"].Replies(lbtest.Status(500))
		w.Backends["b"].Replies(reply(""))
		w.post(bobKey, "/v1/chat/completions", chatOf("o3", "")).WantServed(t, "b")
		w.post(bobKey, "/nowhere", "")
		w.askUsage(http.MethodGet, "/v1/usage", bobKey)
		w.wantEntries(t,
			"alice gpt-4o a default: {2 140 80 100 60 0 0}",
			"bob gpt-4o a default: {1 70 40 50 30 0 0}",
			"bob o3 a default: {1 70 40 50 30 0 0}",
			"bob o3 a flex: {1 70 40 50 30 0 0}",
			"bob o3 b default: {1 70 40 50 30 0 0}")
	})
}

func TestTheLedgerHasWhatARequestIsChargedWithAndSaysWhatIsEstimated(t *testing.T) {
	stream := lbtest.StreamPreamble + strings.Repeat(lbtest.StreamContent, 3)
	reported := `data: {"choices":[],"usage":` + usage(7, 5) + "}\n\n"
	for name, c := range map[string]struct {
		path, body string
		reply      http.HandlerFunc
		want       string
	}{
		"a chat":                   {"/v1/chat/completions", prompt(50, ""), used(7, 5), "{1 7 0 5 0 0 0}"},
		"embeddings":               {"/v1/embeddings", prompt(50, ""), lbtest.Says(200, `{"usage":{"prompt_tokens":7,"total_tokens":7}}`), "{1 7 0 0 0 0 0}"},
		"a message of Anthropic":   {"/v1/messages", prompt(50, ""), lbtest.Says(200, `{"usage":{"input_tokens":7,"cache_read_input_tokens":3,"output_tokens":5}}`), "{1 10 3 5 0 0 0}"},
		"a stream":                 {"/v1/chat/completions", prompt(50, `"stream":true,`), lbtest.Streams(stream, reported, lbtest.StreamEnd), "{1 7 0 5 0 0 0}"},
		"a stream without a usage": {"/v1/chat/completions", prompt(50, `"stream":true,`), lbtest.Streams(stream, lbtest.StreamEnd), "{1 0 0 0 0 50 4}"},
		"a stream that was cut":    {"/v1/chat/completions", prompt(50, `"stream":true,`), lbtest.Streams(stream, lbtest.Abort), "{1 0 0 0 0 50 256}"},
		"a list of files":          {"/v1/files", "", lbtest.Says(200, `{}`), "{1 0 0 0 0 0 0}"},
		"a mistake":                {"/v1/chat/completions", prompt(50, ""), lbtest.Status(400), "{1 0 0 0 0 0 0}"},
		"a throttle":               {"/v1/chat/completions", prompt(50, ""), lbtest.Throttled("7"), ""},
		"a failure":                {"/v1/chat/completions", prompt(50, ""), lbtest.Status(500), ""},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, limited, func(t *testing.T, w *world) {
				w.AllReply(c.reply)
				w.post(aliceKey, c.path, c.body)
				synctest.Wait()
				if got := entries(t, w.Handler.Pool); len(got) != min(len(c.want), 1) || len(got) == 1 && !strings.HasSuffix(got[0], ": "+c.want) {
					t.Errorf("the ledger has %q, want %s", got, c.want)
				}
			})
		})
	}
}

// A caller without a limit of tokens has a bill as well.
func TestTheUsageOfAStreamIsAskedForWheneverItsCallerIsKnown(t *testing.T) {
	for name, c := range map[string]struct{ options, reply, want string }{
		"the backend reports it":    {"", lbtest.StreamContent + `data: {"choices":[],"usage":` + usage(7, 108_000) + "}\n\n", "alice gpt-4o a default: {1 7 0 108000 0 0 0}"},
		"the backend must not know": {"stream_usage off", strings.Repeat(lbtest.StreamContent, 3), "alice gpt-4o a default: {1 0 0 0 0 19 4}"},
	} {
		t.Run(name, func(t *testing.T) {
			inBubbleWith(t, "backend http://a {\n"+c.options+"\n}", func(t *testing.T, w *world) {
				w.Backends["a"].Replies(lbtest.Streams(lbtest.StreamPreamble+c.reply, lbtest.StreamEnd))
				reply := w.post(aliceKey, "/v1/chat/completions", chatOf("gpt-4o", `"stream":true,`))
				if strings.Contains(reply.Body, "usage") {
					t.Errorf("the client got %s", reply.Body)
				}
				wantLength := int64(len(chatOf("gpt-4o", `"stream":true,`)))
				if asked := c.options == ""; (w.Backends["a"].Received()[0].BodyBytes > wantLength) != asked {
					t.Errorf("the backend got %d bytes of %d", w.Backends["a"].Received()[0].BodyBytes, wantLength)
				}
				synctest.Wait()
				w.wantEntries(t, c.want)
			})
		})
	}
}

func TestAPoolWithoutCallersHasALedger(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\npool "+lbtest.Unique("callers")+"\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
		post := func(body string) {
			w.Send(w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(body))).WantServed(t, "a")
		}
		w.AllReply(used(7, 5))
		post(chatOf("gpt-4o", ""))
		w.AllReply(lbtest.Streams(lbtest.StreamPreamble+strings.Repeat(lbtest.StreamContent, 3), lbtest.StreamEnd))
		post(chatOf("gpt-4o", `"stream":true,`)) // of 76 bytes
		(&world{w}).wantEntries(t, "- gpt-4o a default: {2 7 0 5 0 19 4}")
		const id = "resp_0123456789abcdef"
		w.AllReply(lbtest.Says(200, `{"id":"`+id+`","status":"queued","usage":null}`))
		w.Send(w.Request(http.MethodPost, "/v1/responses", strings.NewReader(`{"model":"o5","background":true,"max_output_tokens":4000,"input":"Hello"}`))).WantServed(t, "a")
		w.AllReply(lbtest.Says(200, `{"id":"`+id+`","status":"completed","service_tier":"priority","usage":{"input_tokens":70,"output_tokens":900}}`))
		w.Send(w.Request(http.MethodGet, "/v1/responses/"+id, nil)).WantServed(t, "a")
		(&world{w}).wantEntries(t, "- - a priority: {1 0 0 0 0 0 0}", "- gpt-4o a default: {2 7 0 5 0 19 4}", "- o5 a priority: {1 70 0 900 0 0 0}")
	})
}

func TestTheLedgerSettlesAResponseInTheBackgroundOnTheDayOfItsRequest(t *testing.T) {
	const id = "resp_0123456789abcdef"
	inBubble(t, limited, func(t *testing.T, w *world) {
		time.Sleep(time.Until(time.Date(2000, 1, 2, 23, 0, 0, 0, time.UTC)))
		w.AllReply(lbtest.Says(200, `{"id":"`+id+`","status":"queued","usage":null}`))
		w.post(aliceKey, "/v1/responses", prompt(50, `"background":true,"max_output_tokens":4000,`)).WantStatus(t, 200)
		w.wantEntries(t, "alice gpt-4o a default: {1 0 0 0 0 50 4000}")
		time.Sleep(2 * time.Hour)
		w.AllReply(lbtest.Says(200, `{"id":"`+id+`","status":"completed","usage":{"input_tokens":70,"output_tokens":900}}`))
		for range 2 {
			w.get(t, "/v1/responses/"+id)
		}
		w.wantEntries(t, "alice - a default: {2 0 0 0 0 0 0}", "alice gpt-4o a default: {1 70 0 900 0 0 0}")
		pages, err := ledger.Pages(t.Context(), func(where ledger.Where) bool { return where.Pool == w.Handler.Pool })
		if err != nil || len(pages) != 2 {
			t.Fatalf("there are %d pages (%v), want those of two days", len(pages), err)
		}
	})
}

// TestTheLedgerOutlivesReloadsAndRestarts also has a config that is only
// validated, and one that fails to start.
func TestTheLedgerOutlivesReloadsAndRestarts(t *testing.T) {
	s := newSite(t)
	storage := t.TempDir()
	config := func(options string) string {
		return strings.NewReplacer("admin off", "admin off\nstorage file_system "+storage, "backend "+s.backend, "backend "+s.backend+" {\nname a\n}").Replace(s.config(options))
	}
	want := func(requests int) {
		t.Helper()
		row := fmt.Sprintf("alice gpt-4o a default: {%d %d 0 %d 0 0 0}", requests, 60*requests, 40*requests)
		lbtest.WaitFor(t, func() bool { return slices.Equal(entries(t, s.pool), []string{row}) })
	}
	first, second := block("caller alice { tokens 1k/day }"), block("caller alice { tokens 2k/day }")
	if err := lbtest.ValidateCaddyfile(t, config(first)); err != nil {
		t.Fatal(err)
	}
	if files := lbtest.FilesIn(t, storage); len(files) > 0 {
		t.Errorf("validating wrote %v", files)
	}
	lbtest.Run(t, config(first))
	s.ask(t, first).WantStatus(t, 200)
	want(1)
	lbtest.Reload(t, config(second))
	s.ask(t, second).WantStatus(t, 200)
	want(2)
	for i := range 3 {
		if err := caddy.Stop(); err != nil {
			t.Fatal(err)
		}
		lbtest.Reload(t, config(second))
		want(2 + i)
		s.ask(t, second).WantStatus(t, 200)
		want(3 + i)
	}
	if err := caddy.Stop(); err != nil {
		t.Fatal(err)
	}
	if files := lbtest.FilesIn(t, storage+"/openai_lb/ledger"); len(files) != 4 {
		t.Errorf("the ledger has the files %v, want one of each process", files)
	}
}

// TestAClientThatLeavesIsInTheLedger has a stream that its client does not wait
// for.
func TestAClientThatLeavesIsInTheLedger(t *testing.T) {
	inBubble(t, limited, func(t *testing.T, w *world) {
		w.AllReply(lbtest.Streams(lbtest.StreamPreamble, strings.Repeat(lbtest.StreamContent, 4), time.Hour))
		ctx, leave := context.WithCancel(t.Context())
		r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(prompt(50, `"stream":true,`))).WithContext(ctx)
		r.Header.Set("Authorization", "Bearer "+aliceKey)
		time.AfterFunc(10*time.Second, leave)
		res, err := w.Client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, res.Body)
		res.Body.Close()
		w.wantEntries(t, "alice gpt-4o a default: {1 0 0 0 0 50 256}")
	})
}
