package callers

import (
	"bytes"
	"compress/gzip"
	"net/http"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

const (
	mayUseFlex = "caller alice {\nservice_tiers flex default\n}"
	azureToo   = "backend http://a {\napi_key key-of-a-backend\nauth api_key\n}\n"
)

// TestFastAndPriorityAreNamesOfOneServiceTier has callers that may use it by
// one of its names.
func TestFastAndPriorityAreNamesOfOneServiceTier(t *testing.T) {
	for _, named := range []string{"fast", "priority"} {
		inBubble(t, "caller alice {\nservice_tiers default "+named+"\n}", func(t *testing.T, w *world) {
			for _, tier := range []string{"fast", "priority", "default"} {
				w.post(aliceKey, "/v1/chat/completions", `{"model":"gpt-4o","service_tier":"`+tier+`"}`).WantServed(t, "a")
			}
			for _, tier := range []string{"ultrafast", "flex", "auto"} {
				w.post(aliceKey, "/v1/chat/completions", `{"model":"gpt-4o","service_tier":"`+tier+`"}`).WantError(t, 400, "invalid_value")
			}
		})
	}
	inBubble(t, "caller alice {\nservice_tiers ultrafast\n}", func(t *testing.T, w *world) {
		w.post(aliceKey, "/v1/chat/completions", `{"model":"gpt-4o","service_tier":"ultrafast"}`).WantServed(t, "a")
		w.post(aliceKey, "/v1/chat/completions", `{"model":"gpt-4o","service_tier":"fast"}`).WantError(t, 400, "invalid_value")
	})
}

func TestACallerMayUseOnlyItsServiceTiers(t *testing.T) {
	inBubble(t, mayUseFlex, func(t *testing.T, w *world) {
		const allowed = "Supported values are: 'flex' and 'default'."
		for _, c := range []struct{ path, tier, refused string }{
			{tier: ``},
			{tier: `"service_tier":"flex",`},
			{tier: `"service_tier":"default",`},
			{tier: `"service_tier":null,`},
			{tier: `"metadata":{"service_tier":"priority"},`},
			{tier: `"service_tier":"priority",`, refused: "Invalid value: 'priority'. " + allowed},
			{tier: `"service_tier":"auto",`, refused: "Invalid value: 'auto'. " + allowed},
			{tier: `"service_tier":"pri\u006frity",`, refused: "Invalid value: 'priority'. " + allowed},
			{tier: `"service\u005ftier":"priority",`, refused: "Invalid value: 'priority'. " + allowed},
			{tier: `"Service_Tier":"priority",`, refused: "not certain"},
			{tier: `"service_tier":"flex","service_tier":"flex",`, refused: "not certain"},
			{tier: `"service_tier":"client-key-of-alice",`, refused: "Invalid value. " + allowed},
			{tier: `"service_tier":"",`, refused: "Invalid value. " + allowed},
			{tier: `"service_tier":7,`, refused: "Invalid value. " + allowed},
			{tier: `"service_tier":["priority"],`, refused: "Invalid value. " + allowed},
			{tier: `"service_tier":"flex","service_tier":"priority",`, refused: "not certain"},
			{tier: `"service_tier":"priority","service_tier":"flex",`, refused: "not certain"},
			{tier: `"service_tier":"flex","Service_tier":"priority",`, refused: "not certain"},
			{path: "/v1/responses", tier: `"service_tier":"priority",`, refused: allowed},
			{path: "/v1/responses/", tier: `"service_tier":"priority",`, refused: allowed},
			{path: "/v1/responses/compact", tier: `"service_tier":"priority",`, refused: allowed},
			{path: "/openai/deployments/m/chat/completions?api-version=1", tier: `"service_tier":"priority",`, refused: allowed},
			{path: "/v1/of-tomorrow", tier: `"service_tier":"priority",`, refused: allowed},
			{path: "/v1/of-tomorrow", tier: `"service_tier":"flex",`},
			{path: "/v1/embeddings", tier: `"service_tier":"priority",`}, // there are none
		} {
			path := c.path
			if path == "" {
				path = "/v1/chat/completions"
			}
			got := w.post(aliceKey, path, `{`+c.tier+`"model":"gpt-4o","input":"Hi","messages":[]}`)
			if c.refused == "" {
				got.WantServed(t, "a")
				continue
			}
			got.WantError(t, http.StatusBadRequest, "invalid_value")
			if !strings.Contains(got.Body, c.refused) || !strings.Contains(got.Body, `"param":"service_tier"`) || strings.Contains(got.Body, aliceKey) {
				t.Errorf("%s %s: got %s, want %q", path, c.tier, got.Body, c.refused)
			}
		}
		w.post(bobKey, "/v1/chat/completions", `{"model":"gpt-4o","service_tier":"priority"}`).WantServed(t, "a")
		w.WantCalls(map[string]int{"a": 8})
	})
}

func TestNoServiceTierPassesUnseen(t *testing.T) {
	inBubble(t, "request_buffers 2KB\n"+mayUseFlex, func(t *testing.T, w *world) {
		send := func(path, kind, encoding, body string) lbtest.Reply {
			r := w.Request(http.MethodPost, path, strings.NewReader(body))
			r.Header.Set("Authorization", "Bearer "+aliceKey)
			r.Header.Set("Content-Type", kind)
			if encoding != "" {
				r.Header.Set("Content-Encoding", encoding)
			}
			return w.Send(r)
		}
		const chat, json = "/v1/chat/completions", "application/json"
		long := strings.Repeat("x", 4<<10)
		var compressed bytes.Buffer
		z := gzip.NewWriter(&compressed)
		_, _ = z.Write([]byte(`{"model":"gpt-4o","service_tier":"priority"}`))
		_ = z.Close()

		send(chat, json, "gzip", compressed.String()).WantError(t, http.StatusUnsupportedMediaType, "unsupported_content_encoding")
		send("/v1/of-tomorrow", json, "gzip", compressed.String()).WantError(t, http.StatusUnsupportedMediaType, "unsupported_content_encoding")
		for _, body := range []string{
			`{"model":"gpt-4o","user":"` + long + `","service_tier":"priority"}`,
			`{"model":"gpt-4o","service_tier":"flex","user":"` + long + `","service_tier":"priority"}`,
			`{"model":"gpt-4o",,"service_tier":"priority"}`,
			`[{"model":"gpt-4o","service_tier":"priority"}]`,
		} {
			send(chat, json, "", body).WantError(t, http.StatusBadRequest, "invalid_value")
			send("/v1/of-tomorrow", json, "", body).WantError(t, http.StatusBadRequest, "invalid_value")
		}
		send(chat, "text/plain", "", `{"model":"gpt-4o","service_tier":"priority"}`).WantError(t, http.StatusBadRequest, "invalid_value")
		w.WantCalls(map[string]int{"a": 0})

		form := "--x\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--x\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.mp3\"\r\n\r\n" + long + "\r\n--x--\r\n"
		for _, part := range []string{"service_tier", "Service_Tier"} {
			form := "--x\r\nContent-Disposition: form-data; name=\"" + part + "\"\r\n\r\npriority\r\n--x--\r\n"
			send(chat, "multipart/form-data; boundary=x", "", form).WantError(t, http.StatusBadRequest, "invalid_value")
			send("/v1/of-tomorrow", "multipart/form-data; boundary=x", "", form).WantError(t, http.StatusBadRequest, "invalid_value")
		}
		w.WantCalls(map[string]int{"a": 0})
		send("/v1/audio/transcriptions", "multipart/form-data; boundary=x", "", form).WantServed(t, "a")
		send("/v1/files", "multipart/form-data; boundary=x", "", form).WantServed(t, "a")
	})
}

func TestAzuresHeaderCountsForACallerThatMayUseItsTier(t *testing.T) {
	for name, backends := range map[string]string{"openai": "backend http://a\n", "azure": azureToo} {
		inBubbleWith(t, backends+mayUseFlex, func(t *testing.T, w *world) {
			send := func(key, path string, tiers ...string) lbtest.Reply {
				r := w.Request(http.MethodPost, path, strings.NewReader(`{"model":"gpt-4o","input":"Hi","service_tier":"default"}`))
				r.Header.Set("Authorization", "Bearer "+key)
				r.Header["X-Ms-Service-Tier"] = tiers
				return w.Send(r)
			}
			want := func(header, body string) {
				t.Helper()
				calls := w.Backends["a"].Received()
				last := calls[len(calls)-1]
				if got := last.Request.Header.Get("X-Ms-Service-Tier"); got != header || !strings.Contains(string(last.Beginning), `"service_tier":"`+body+`"`) {
					t.Errorf("%s: the backend got the header %q and the body %s, want %q and %s", name, got, last.Beginning, header, body)
				}
			}
			send(aliceKey, "/v1/chat/completions", "flex").WantServed(t, "a")
			if name == "azure" {
				want("flex", "default")
			} else {
				want("", "flex")
			}
			send(bobKey, "/v1/chat/completions", "flex").WantServed(t, "a")
			want("", "default")
			send(aliceKey, "/v1/embeddings", "flex").WantServed(t, "a")
			want("", "default")
			for _, tiers := range [][]string{{"priority"}, {"flex", "priority"}, {"flex,priority"}, {"FLEX"}, {" "}, {"client-key-of-alice"}} {
				got := send(aliceKey, "/v1/chat/completions", tiers...)
				got.WantError(t, http.StatusBadRequest, "invalid_value")
				if !strings.Contains(got.Body, "Supported values are: 'flex' and 'default'.") || strings.Contains(got.Body, aliceKey) {
					t.Errorf("%q: got %s", tiers, got.Body)
				}
			}
			w.WantCalls(map[string]int{"a": 3})
		})
	}
}

func TestFlexInAHeaderCoolsOnlyFlexDown(t *testing.T) {
	inBubbleWith(t, azureToo+mayUseFlex, func(t *testing.T, w *world) {
		flex := func() lbtest.Reply {
			r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{"model":"gpt-4o"}`))
			r.Header.Set("Authorization", "Bearer "+aliceKey)
			r.Header.Set("x-ms-service-tier", "flex")
			return w.Send(r)
		}
		w.Backends["a"].Replies(lbtest.Throttled("20"))
		flex().WantStatus(t, http.StatusTooManyRequests)
		w.Backends["a"].Recovers()
		w.chat(`{"model":"gpt-4o"}`).WantServed(t, "a")
		flex().WantStatus(t, http.StatusTooManyRequests)
		w.WantCalls(map[string]int{"a": 2})
	})
}
