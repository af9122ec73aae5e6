package observe

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestTheAccessLogSaysWhatBecameOfARequest(t *testing.T) {
	for _, format := range []string{"", "format openai_lb", "format json"} {
		t.Run(format, func(t *testing.T) {
			a, serverA := lbtest.Listen(t, "a")
			b, serverB := lbtest.Listen(t, "b")
			a.Replies(lbtest.Throttled("60"))
			b.Replies(lbtest.Says(200, `{"usage":{"prompt_tokens":12,"completion_tokens":3}}`))
			file := filepath.Join(t.TempDir(), "access.log")
			address := lbtest.ServeAt(t, fmt.Sprintf(`
				log {
					output file %s
					%s
				}
				log_append classes {http.openai_lb.classes}
				log_append input {http.openai_lb.tokens_input}
				log_append first_byte {http.openai_lb.time_to_first_byte}
				openai_lb {
					pool logged
					client_key alice client-key-of-alice
					backend %s {
						name ptu
					}
					backend %s {
						name east
						priority 2
					}
					affinity {
						prompt_cache
					}
				}`, file, format, serverA.URL, serverB.URL))
			lbtest.Post(lbtest.NewClient(t), "http://"+address+"/v1/chat/completions", `{"model":"gpt-4o","prompt_cache_key":"x"}`, "Api-Key", "client-key-of-alice").WantServed(t, "b")
			lbtest.Post(lbtest.NewClient(t), "http://"+address+"/v1/chat/completions", `{"model":"gpt-4o"}`)
			var lines []map[string]any
			lbtest.WaitFor(t, func() bool {
				text, _ := os.ReadFile(file)
				lines = nil
				for line := range strings.Lines(string(text)) {
					var fields map[string]any
					if json.Unmarshal([]byte(line), &fields) == nil {
						lines = append(lines, fields)
					}
				}
				return len(lines) == 2
			})
			its, _ := lines[0]["openai_lb"].(map[string]any)
			first, _ := its["time_to_first_byte"].(float64)
			delete(its, "time_to_first_byte")
			if got, want := fmt.Sprint(its), "map[affinity:cache affinity_result:move attempts:2 backend:east class:served classes:ptu=throttled,east=served model:gpt-4o pool:logged tokens_cached:0 tokens_input:12 tokens_output:3 tokens_reasoning:0]"; got != want {
				t.Errorf("it says %s, want %s", got, want)
			}
			if lines[0]["classes"] != "ptu=throttled,east=served" || lines[0]["caller"] != "alice" || lines[0]["input"] != 12.0 || lines[0]["first_byte"] != first {
				t.Errorf("it says %v", lines[0])
			}
			if got := fmt.Sprint(lines[1]["openai_lb"]); got != "map[attempts:0 class:unauthenticated pool:logged]" {
				t.Errorf("of a request without a key it says %s", got)
			}
		})
	}
}

func TestTheAccessLogSaysWhichLimitRefusedARequest(t *testing.T) {
	a, server := lbtest.Listen(t, "a")
	file := filepath.Join(t.TempDir(), "access.log")
	address := lbtest.ServeAt(t, fmt.Sprintf(`
		log {
			output file %s
		}
		log_append limit {http.openai_lb.limit}
		openai_lb {
			pool %s
			backend %s
			client_key alice client-key-of-alice
			client_key bob client-key-of-bob
			client_key carol client-key-of-carol
			caller alice {
				requests 1/hour
				tokens 100k/minute
			}
			caller bob {
				max_requests 1
			}
			caller carol {
				tokens 5/day
			}
		}`, file, lbtest.Unique("limited"), server.URL))
	ask := func(caller, body string, want int) {
		t.Helper()
		reply := lbtest.Post(lbtest.NewClient(t), "http://"+address+"/v1/chat/completions", body, "Api-Key", "client-key-of-"+caller)
		reply.WantStatus(t, want)
	}
	ask("alice", `{}`, 200)
	ask("alice", `{}`, 429)
	ask("carol", `{"messages":[{"content":"a prompt of more than five tokens"}]}`, 429)
	goOn, arrived := make(chan struct{}), make(chan struct{})
	a.Replies(lbtest.Streams(lbtest.StreamContent, func() { close(arrived); <-goOn }))
	over := make(chan lbtest.Reply)
	go func() {
		over <- lbtest.Post(lbtest.NewClient(t), "http://"+address+"/v1/chat/completions", `{"stream":true}`, "Api-Key", "client-key-of-bob")
	}()
	<-arrived
	ask("bob", `{}`, 429)
	close(goOn)
	<-over
	want := map[string]string{"alice 200": "", "alice 429": "requests/hour", "carol 429": "tokens/day", "bob 429": "max_requests", "bob 200": ""}
	got := make(map[string]string)
	lbtest.WaitFor(t, func() bool {
		text, _ := os.ReadFile(file)
		for line := range strings.Lines(string(text)) {
			var its struct {
				Caller, Limit string
				Status        int
				Balancer      struct{ Limit string } `json:"openai_lb"`
			}
			if json.Unmarshal([]byte(line), &its) == nil {
				if its.Limit != its.Balancer.Limit {
					t.Errorf("the placeholder is %q, and the field %q", its.Limit, its.Balancer.Limit)
				}
				got[fmt.Sprint(its.Caller, " ", its.Status)] = its.Balancer.Limit
			}
		}
		return len(got) == len(want)
	})
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("it says %q, want %q", got, want)
	}
}
