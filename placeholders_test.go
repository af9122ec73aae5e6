package openailb_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestPlaceholdersReachTheClientsHeaders(t *testing.T) {
	a, serverA := lbtest.Listen(t, "a")
	b, serverB := lbtest.Listen(t, "b")
	address := lbtest.ServeAt(t, fmt.Sprintf(`
		header >X-Served-By {http.openai_lb.backend}
		header >X-Served-As "{http.openai_lb.class} {http.openai_lb.attempts} {http.openai_lb.model} {http.openai_lb.caller}"
		openai_lb {
			client_key alice client-key-of-alice
			backend %s {
				name first
			}
			backend %s {
				name second
				priority 2
			}
		}`, serverA.URL, serverB.URL))
	for _, c := range []struct {
		name             string
		a, b             http.HandlerFunc
		key, body        string
		status           int
		backend, details string
	}{
		{"the first serves", nil, nil, "client-key-of-alice", `{"model":"gpt-4o"}`, 200, "first", "served 1 gpt-4o alice"},
		{"a stream", lbtest.Streams(lbtest.StreamContent, lbtest.StreamEnd), nil, "client-key-of-alice", `{"model":"gpt-4o","stream":true}`, 200, "first", "served 1 gpt-4o alice"},
		{"the client's error", lbtest.Status(400), nil, "client-key-of-alice", `{"model":"gpt-4o"}`, 400, "first", "client_error 1 gpt-4o alice"},
		{"the second serves", lbtest.Throttled("1"), nil, "client-key-of-alice", `{"model":"m"}`, 200, "second", "served 2 m alice"},
		{"nobody serves", lbtest.Throttled("60"), lbtest.Throttled("60"), "client-key-of-alice", `{"model":"n"}`, 429, "", "all_throttled 2 n alice"},
		{"a failure is passed on", lbtest.Status(500), lbtest.Status(500), "client-key-of-alice", `{"model":"o"}`, 500, "second", "failed 2 o alice"},
	} {
		t.Run(c.name, func(t *testing.T) {
			a.Replies(c.a)
			b.Replies(c.b)
			reply := lbtest.Post(lbtest.NewClient(t), "http://"+address+"/v1/chat/completions", c.body, "Api-Key", c.key)
			if reply.Status != c.status {
				t.Errorf("client got %d %s (%v), want %d", reply.Status, reply.Body, reply.Err, c.status)
			}
			for header, want := range map[string]string{"X-Served-By": c.backend, "X-Served-As": c.details} {
				if got := reply.Header.Get(header); got != want {
					t.Errorf("%s is %q, want %q", header, got, want)
				}
			}
		})
	}
	t.Run("without a key", func(t *testing.T) {
		reply := lbtest.Ask(lbtest.NewClient(t), "http://"+address+"/v1/chat/completions")
		if got := reply.Header.Get("X-Served-By") + "," + reply.Header.Get("X-Served-As"); reply.Status != 401 || strings.Contains(got, "{") || !strings.Contains(got, "unauthenticated") {
			t.Errorf("client got %d with %q", reply.Status, got)
		}
	})
}

func TestNamesFromPlaceholdersAreResolvedOrRefused(t *testing.T) {
	t.Setenv("OPENAI_LB_TEST_NAME", "resolved")
	for _, option := range []string{"deployment {env.OPENAI_LB_TEST_NAME}", "name {env.OPENAI_LB_TEST_NAME}", "model gpt-4o {env.OPENAI_LB_TEST_NAME}", "model {env.OPENAI_LB_TEST_NAME}"} {
		block := "openai_lb {\nbackend http://a {\n" + option + "\n}\n}"
		err := lbtest.ValidateCaddyfile(t, ":0 {\n"+block+"\n}\n")
		if err != nil {
			if !strings.Contains(err.Error(), "OPENAI_LB_TEST_NAME") {
				t.Errorf("%s gives %v", option, err)
			}
			continue
		}
		lbtest.InBubble(t, block, func(t *testing.T, w *lbtest.World) {
			model := "gpt-4o"
			if strings.HasPrefix(option, "model {") {
				model = "resolved"
			}
			if reply := w.Post(`{"model":"` + model + `"}`); reply.Status != 200 {
				t.Errorf("%s: client got %d %s", option, reply.Status, reply.Body)
				return
			}
			got := w.Backends["a"].Received()[0]
			switch attempt := w.Logged("attempt")[0].ContextMap()["backend"]; {
			case strings.HasPrefix(option, "name"):
				if attempt != "resolved" {
					t.Errorf("%s: the backend is called %v", option, attempt)
				}
			case got.BodyHash != lbtest.Hash([]byte(`{"model":"resolved"}`)):
				t.Errorf("%s: a got another body, of %d bytes", option, got.BodyBytes)
			}
		})
	}
	for _, option := range []string{"deployment {env.OPENAI_LB_TEST_UNSET}", "name {env.OPENAI_LB_TEST_UNSET}", "model gpt-4o {env.OPENAI_LB_TEST_UNSET}"} {
		err := lbtest.ValidateCaddyfile(t, ":0 {\nopenai_lb {\nbackend http://a {\n"+option+"\n}\n}\n}\n")
		if err == nil || !strings.Contains(err.Error(), "OPENAI_LB_TEST_UNSET") {
			t.Errorf("%s gives %v", option, err)
		}
	}
}

func TestPoliciesThatWouldMisleadAreRefusedInJSON(t *testing.T) {
	for config, want := range map[string]string{
		`{"handler":"openai_lb","backends":[{"url":"http://a"}],"lb_policy":{"policy":"openai_lb"}}`:                                                                                                         "lb_policy",
		`{"handler":"openai_lb","backends":[{"url":"http://a"},{"url":"http://b"},{"url":"http://c"}],"lb_policy":{"policy":"weighted_round_robin","weights":[8,1,1]}}`:                                      "weight",
		`{"handler":"openai_lb","backends":[{"url":"http://a"},{"url":"http://b"},{"url":"http://c"}],"lb_policy":{"policy":"weighted_round_robin","weights":[8,0,1]}}`:                                      "weight",
		`{"handler":"reverse_proxy","upstreams":[{"dial":"a:1"},{"dial":"b:1"}],"load_balancing":{"selection_policy":{"policy":"openai_lb","lb_policy":{"policy":"openai_lb"}}}}`:                            "lb_policy",
		`{"handler":"reverse_proxy","upstreams":[{"dial":"a:1"},{"dial":"b:1"}],"load_balancing":{"selection_policy":{"policy":"openai_lb","lb_policy":{"policy":"weighted_round_robin","weights":[8,1]}}}}`: "weight",
	} {
		err := lbtest.Validate(t, handlerJSON(config))
		if err == nil || !strings.Contains(strings.ReplaceAll(err.Error(), "weighted_round_robin", ""), want) {
			t.Errorf("%s gives %v, want it to speak of %s", config, err, want)
		}
	}
}
