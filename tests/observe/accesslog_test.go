package observe

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

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

// TestOneLineAnswersWhyACallerGotA429 runs the line of docs/callers.md, and
// compares what it shows with the errors.
func TestOneLineAnswersWhyACallerGotA429(t *testing.T) {
	_, server := lbtest.Listen(t, "a")
	file := filepath.Join(t.TempDir(), "access.log")
	address := lbtest.ServeAt(t, fmt.Sprintf(`
		log {
			output file %s
		}
		openai_lb {
			pool %s
			backend %s
			client_key team-41 client-key-of-team-41
			client_key team-42 client-key-of-team-42
			caller team-41 {
				requests 3/hour
				tokens 20/day
			}
		}`, file, lbtest.Unique("why"), server.URL))
	ask := func(team, body string, status int) string {
		reply := lbtest.Post(lbtest.NewClient(t), "http://"+address+"/v1/embeddings", body, "Api-Key", "client-key-of-"+team)
		reply.WantStatus(t, status)
		return reply.Body
	}
	ask("team-42", `{}`, 200)
	for range 2 {
		ask("team-41", `{"input":"a"}`, 200)
	}
	day := ask("team-41", `{"input":"`+strings.Repeat("sixty ", 10)+`"}`, 429)
	numbers := regexp.MustCompile(`has used (\d+) of (\d+) tokens per day, and this request needs (\d+)`).FindStringSubmatch(day)
	ask("team-41", `{"input":"a"}`, 200)
	hour := ask("team-41", `{"input":"a"}`, 429)
	other := regexp.MustCompile(`Limit (\d+), Used (\d+), Requested (\d+)`).FindStringSubmatch(hour)
	if numbers == nil || other == nil {
		t.Fatalf("the errors have no numbers: %s, %s", day, hour)
	}
	line := regexp.MustCompile("(?m)^jq -r '(.+)' /var/log/caddy/llm.log").FindSubmatch(lbtest.ReadFile(t, "../../docs/callers.md"))
	if line == nil {
		t.Fatal("the page has no jq line")
	}
	jq, err := exec.LookPath("jq")
	if err != nil {
		t.Skip(err)
	}
	var shown []byte
	lbtest.WaitFor(t, func() bool {
		shown, err = exec.CommandContext(t.Context(), jq, "-r", string(line[1]), file).Output()
		return err != nil || bytes.Count(shown, []byte("\n")) == 2
	})
	want := fmt.Sprintf("caller_limited\ttokens/day\t%s\t%s\t%s\n.*Z\tcaller_limited\trequests/hour\t%s\t%s\t%s\n$", numbers[2], numbers[1], numbers[3], other[1], other[2], other[3])
	if now := time.Now().UTC().Format("2006-01-02T15:"); err != nil || !regexp.MustCompile("^"+now+".*Z\t"+want).Match(shown) {
		t.Errorf("the line shows %q (%v), want %q", shown, err, want)
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
