package observe

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

const chatPath = "/v1/chat/completions"

// servedBy is a chat completion with 100 and 7 tokens, and a service tier,
// unless that is empty.
func servedBy(tier string) http.HandlerFunc {
	if tier != "" {
		tier = fmt.Sprintf(`,"service_tier":%q`, tier)
	}
	return lbtest.Says(200, `{"object":"chat.completion","usage":{"prompt_tokens":100,"completion_tokens":7}`+tier+`}`)
}

func TestTokensAreCountedByTheServiceTierThatServed(t *testing.T) {
	pool := lbtest.Unique("tier-tokens")
	lbtest.InBubble(t, "openai_lb {\npool "+pool+"\nclient_key alice client-key-of-alice\nbackend http://a {\nmodel gpt-4o\n}\n}", func(t *testing.T, w *lbtest.World) {
		ask := func(reply http.HandlerFunc, path, body string) {
			t.Helper()
			w.Backends["a"].Replies(reply)
			w.Send(asAlice(w, http.MethodPost, path, body)).WantStatus(t, 200)
		}
		for _, served := range []string{"default", "priority", "priority", "flex", "scale", ""} {
			ask(servedBy(served), chatPath, `{"model":"gpt-4o"}`)
		}
		ask(lbtest.Streams("data: {\"choices\":[{\"delta\":{\"content\":\"Hi\"}}]}\n\n",
			"data: {\"choices\":[],\"service_tier\":\"flex\",\"usage\":{\"prompt_tokens\":100,\"completion_tokens\":7}}\n\ndata: [DONE]\n\n"), chatPath, `{"model":"gpt-4o","stream":true,"stream_options":{"include_usage":true}}`)
		ask(lbtest.Streams("event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"service_tier\":\"auto\",\"usage\":null}}\n\n",
			"event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"service_tier\":\"priority\",\"usage\":{\"input_tokens\":100,\"output_tokens\":7}}}\n\n"), "/v1/responses", `{"model":"gpt-4o","stream":true}`)
		for _, metric := range []string{"tokens_total model=gpt-4o deployment=gpt-4o backend=a", "caller_tokens_total caller=alice model=gpt-4o"} {
			lbtest.WantSums(t, pool,
				metric+" type=input tier_served=default 200", metric+" type=input tier_served=priority 300", metric+" type=output tier_served=priority 21",
				metric+" type=input tier_served=flex 200", metric+" type=input tier_served=other 100", metric+" tier_served= 0", metric+" type=input 800", metric+" type=output 56")
		}
	})
}

func TestRequestsForAnotherServiceTierAreCountedByTheOneThatServed(t *testing.T) {
	pool := lbtest.Unique("tier-requests")
	lbtest.InBubble(t, "openai_lb {\npool "+pool+"\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
		ask := func(requested, served string) {
			w.Backends["a"].Replies(servedBy(served))
			w.Post(`{"model":"gpt-4o"` + requested + `}`)
		}
		// what costs as usual makes no series, and neither does a tier where
		// there is none
		for _, requested := range []string{"", `,"service_tier":null`, `,"service_tier":"auto"`, `,"service_tier":"default"`, `,"service_tier":"made up"`} {
			ask(requested, "default")
		}
		w.Send(w.Request(http.MethodPost, "/v1/embeddings", strings.NewReader(`{"model":"gpt-4o","service_tier":"flex"}`))).WantStatus(t, 200)
		lbtest.WantSums(t, pool, "requests_total 6", "service_tier_requests_total 0")
		for _, family := range lbtest.Scrape(t) {
			for _, metric := range family.GetMetric() {
				if family.GetName() == "caddy_openai_lb_service_tier_requests_total" && lbtest.HasLabels(metric, map[string]string{"pool": pool}) {
					t.Errorf("a plain pool has the series %v", metric)
				}
			}
		}
		for served, n := range map[string]int{"priority": 3, "default": 2, "": 1} {
			for range n {
				ask(`,"service_tier":"priority"`, served)
			}
		}
		ask(`,"service_tier":"flex"`, "flex")
		ask(`,"service_tier":"fast"`, "fast")
		ask(`,"service_tier":"ultrafast"`, "default")
		w.Backends["a"].Replies(lbtest.Status(400))
		w.Post(`{"model":"gpt-4o","service_tier":"priority"}`).WantStatus(t, 400)
		lbtest.WantSums(t, pool,
			"service_tier_requests_total backend=a tier_requested=priority tier_served=priority 3", "service_tier_requests_total tier_requested=priority tier_served=default 2",
			"service_tier_requests_total tier_requested=priority tier_served=unknown 1", "service_tier_requests_total tier_requested=flex tier_served=flex 1",
			"service_tier_requests_total tier_requested=fast tier_served=fast 1", "service_tier_requests_total tier_requested=ultrafast tier_served=default 1", "service_tier_requests_total 9")
	})
}

func TestTheAccessLogSaysWhichServiceTierServed(t *testing.T) {
	a, server := lbtest.Listen(t, "a")
	file := filepath.Join(t.TempDir(), "access.log")
	address := lbtest.ServeAt(t, fmt.Sprintf(`
		log {
			output file %s
		}
		log_append requested {http.openai_lb.tier_requested}
		log_append served {http.openai_lb.tier_served}
		header >X-Requested {http.openai_lb.tier_requested}
		openai_lb {
			pool %s
			backend %s
		}`, file, lbtest.Unique("tier-logged"), server.URL))
	var want []string
	for _, c := range []struct{ requested, served, want string }{
		{"priority", "default", "priority default"},
		{"priority", "priority", "priority priority"},
		{"flex", "", "flex "},
		{"fast", "fast", "fast fast"},
		{"ultrafast", "ultrafast", "ultrafast ultrafast"},
		{"auto", "default", "auto default"},
		{"default", "default", "default default"},
		{"", "priority", " priority"}, // the project has it
		{"", "default", " "},
		{"", "", " "},
		{"made up", "scale", "other other"},
	} {
		a.Replies(servedBy(c.served))
		body := `{"model":"gpt-4o"}`
		if c.requested != "" {
			body = fmt.Sprintf(`{"model":"gpt-4o","service_tier":%q}`, c.requested)
		}
		reply := lbtest.Post(lbtest.NewClient(t), "http://"+address+chatPath, body)
		reply.WantServed(t, "a")
		if requested, _, _ := strings.Cut(c.want, " "); reply.Header.Get("X-Requested") != requested {
			t.Errorf("a header says that %q was requested, want %q", reply.Header.Get("X-Requested"), requested)
		}
		want = append(want, c.want)
	}
	var got []string
	lbtest.WaitFor(t, func() bool {
		text, _ := os.ReadFile(file)
		got = nil
		for line := range strings.Lines(string(text)) {
			var its struct {
				Requested, Served string
				Balancer          map[string]any `json:"openai_lb"`
			}
			if json.Unmarshal([]byte(line), &its) != nil {
				continue
			}
			for name, placeholder := range map[string]string{"tier_requested": its.Requested, "tier_served": its.Served} {
				if field, ok := its.Balancer[name]; ok && field != placeholder || !ok && placeholder != "" {
					t.Errorf("the placeholder %s is %q, and the field %v", name, placeholder, field)
				}
			}
			got = append(got, its.Requested+" "+its.Served)
		}
		return len(got) == len(want)
	})
	if fmt.Sprintf("%q", got) != fmt.Sprintf("%q", want) {
		t.Errorf("it says %q, want %q", got, want)
	}
}

func TestARequestIsCountedByTheServiceTierOfItsBackend(t *testing.T) {
	pool := lbtest.Unique("tier-of-backend")
	lbtest.InBubble(t, "openai_lb {\npool "+pool+"\nbackend http://a {\nservice_tier priority\n}\nbackend http://b {\npriority 2\nservice_tier default\n}\n}", func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(servedBy("default"))
		w.Backends["b"].Replies(servedBy("default"))
		w.Post(`{"model":"gpt-4o"}`).WantStatus(t, 200)
		w.Backends["a"].Replies(lbtest.Status(429))
		w.Post(`{"model":"gpt-4o","service_tier":"flex"}`).WantServed(t, "b")
		lbtest.WantSums(t, pool, "service_tier_requests_total backend=a tier_requested=priority tier_served=default 1", "service_tier_requests_total 1")
	})
}

func TestTheSpilloverOfABackendIsCounted(t *testing.T) {
	pool := lbtest.Unique("spilled")
	lbtest.InBubble(t, "openai_lb {\npool "+pool+"\nbackend http://a {\nmodel gpt-4o gpt-4o-ptu\n}\n}", func(t *testing.T, w *lbtest.World) {
		for _, c := range []struct {
			status    int
			from, why string
		}{
			{200, "", ""}, {200, "gpt-4o-ptu", "429"}, {200, "gpt-4o-ptu", "429"}, {200, "gpt-4o-ptu", ""}, {200, "gpt-4o-ptu", "made up"}, {400, "gpt-4o-ptu", "400"},
			{200, "", "503"}, // it did not spill over
		} {
			w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
				if c.from != "" {
					rw.Header().Set("x-ms-spillover-from-deployment", c.from)
				}
				if c.why != "" {
					rw.Header().Set("x-ms-spillover-error", c.why)
				}
				lbtest.Says(c.status, `{"error":{}}`)(rw, r)
			})
			w.Post(`{"model":"gpt-4o"}`).WantStatus(t, c.status)
		}
		lbtest.WantSums(t, pool, "spillover_total backend=a deployment=gpt-4o-ptu error=429 result=served 2", "spillover_total error= result=served 1",
			"spillover_total error=other result=served 1", "spillover_total error=400 result=failed 1", "spillover_total 5", "attempts_total 7")
	})
}
