package affinity

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// madeInNewAPIs are requests that make an object in an API of which nothing is
// known here, the replies to them, and requests that use the object.
var madeInNewAPIs = map[string]struct {
	made exchanged
	uses []string
}{
	"an agent": {exchanged{`POST /v1/agents {"model":"m"}`, `{"id":"agent_68f0","object":"agent"}`},
		[]string{"GET /v1/agents/agent_68f0", "POST /v1/agents/agent_68f0 {}", "DELETE /v1/agents/agent_68f0", "PATCH /v1/agents/agent_68f0 {}", "GET /v1/agents/agent_68f0/versions/3", "GET /openai/v1/agents/agent_68f0",
			`POST /v1/live/sessions {"agent_id":"agent_68f0"}`, `POST /v1/live/sessions {"config":[{"agents":{"agent_ids":["other-word","agent_68f0"]}}]}`, "POST /v1/live/sessions?agent_id=agent_68f0 {}", "GET /openai/agents/agent_68f0?api-version=1"}},
	"a session":          {exchanged{"POST /v1/live/sessions {}", `{"session":{"id":"live-68f0"},"value":"x"}`}, []string{"GET /v1/live/sessions/live-68f0", "POST /v1/live/sessions/live-68f0/end {}"}},
	"a vault":            {exchanged{`POST /v1/vaults {"kind":"x"}`, `{"id":"vault_68f0"}`}, []string{"GET /v1/vaults/vault_68f0/secrets", `POST /v1/agents {"vault_ids":["vault_68f0"]}`, `POST /v1/responses {"model":"m","tools":[{"type":"mcp","vault_id":"vault_68f0"}]}`}},
	"a tunnel":           {exchanged{"POST /v1/tunnels {}", `{"id":"tunnel_68f0"}`}, []string{`POST /v1/responses {"model":"m","input":"hi","tools":[{"type":"mcp","tunnel_id":"tunnel_68f0"}]}`, "DELETE /v1/tunnels/tunnel_68f0"}},
	"a batch of another": {exchanged{`POST /v1/messages/batches {"requests":[]}`, `{"id":"msgbatch_013","type":"message_batch"}`}, []string{"GET /v1/messages/batches/msgbatch_013", "GET /v1/messages/batches/msgbatch_013/results"}},
	"what has a number":  {exchanged{"POST /v1/boards {}", `{"id":"7"}`}, []string{"GET /v1/boards/7", "DELETE /v1/boards/7"}},
	"what has a word":    {exchanged{`POST /v1/boards {}`, `{"id":"helper"}`}, []string{"GET /v1/boards/helper", "POST /v1/boards/helper/run {}"}},
	"the same in a form": {exchanged{"POST /v1/boards {}", `{"id":"my-helper"}`}, []string{"GET /v1/boards/my-helper", `POST /v1/agents {"board_id":"my-helper"}`}},
	"a stream":           {exchanged{`POST /v1/runs {"stream":true}`, "event: run.created\ndata: {\"run\":{\"id\":\"run-68f0\"}}\n\n"}, []string{"GET /v1/runs/run-68f0"}},
}

// TestFollowUpsInANewAPIReachTheAccountOfTheirObject although nobody has told
// the balancer of that API.
func TestFollowUpsInANewAPIReachTheAccountOfTheirObject(t *testing.T) {
	for name, c := range madeInNewAPIs {
		t.Run(name, func(t *testing.T) {
			for _, config := range []string{threeAccountsInOrder, strings.ReplaceAll(threeAccountsInOrder, "client_key", "# client_key")} {
				inBubble(t, config, func(t *testing.T, w *world) {
					w.Backends["a"].Replies(lbtest.Throttled("1"))
					reply := lbtest.Says(200, c.made.reply)
					if strings.HasPrefix(c.made.reply, "event: ") {
						reply = lbtest.Streams(c.made.reply)
					}
					w.Backends["b"].Replies(reply)
					w.ask(alice, c.made.request).WantServed(t, "b")
					w.AllReply(nil)
					time.Sleep(2 * time.Second)
					for _, use := range c.uses {
						before := w.TotalCalls()
						if got := w.ask(alice, use); got.Status != 200 || got.Backend != "b" || w.TotalCalls() != before+1 {
							t.Errorf("%s: client got %d of %q: %s", use, got.Status, got.Backend, got.Body)
						}
					}
				})
			}
		})
	}
}

// TestACallerReachesNoObjectOfAnotherInANewAPI by its name, wherever that is.
func TestACallerReachesNoObjectOfAnotherInANewAPI(t *testing.T) {
	for name, c := range madeInNewAPIs {
		t.Run(name, func(t *testing.T) {
			inBubble(t, oneAccount, func(t *testing.T, w *world) {
				w.do(alice, c.made)
				for _, use := range c.uses {
					before := w.TotalCalls()
					if got := w.ask(bob, use); got.Status != 404 || w.TotalCalls() != before {
						t.Errorf("%s: bob got %d of %q: %s", use, got.Status, got.Backend, got.Body)
					}
				}
			})
		})
	}
}

// TestWithClientKeysANewAPIShowsOnlyWhatWasTaught refuses lists, and names that
// no reply has taught the caller. Without keys, the accounts are asked.
func TestWithClientKeysANewAPIShowsOnlyWhatWasTaught(t *testing.T) {
	refused := map[string]string{
		"GET /v1/agents": "callers_kept_apart", "HEAD /v1/agents": "", "GET /v1/live/sessions?limit=3": "callers_kept_apart", "DELETE /v1/vaults": "callers_kept_apart", "PUT /v1/vaults/mine {}": "callers_kept_apart",
		"GET /v1/messages/batches": "callers_kept_apart", "GET /v1/agents/helper": "callers_kept_apart", "GET /v1/agents?agent_id=agent_68f0": "callers_kept_apart", "GET /openai/agents?api-version=1": "callers_kept_apart",
		"GET /v1/agents/agent_7": "not_found", "POST /v1/agents/agent_7 {}": "not_found", "DELETE /v1/agents/7": "not_found", "GET /v1/agents/Agent": "not_found", "GET /v1/agents/agent%5F7": "not_found",
		"GET /v1/agents/agent_7;agent_68f0": "not_found", "GET /v1/agents/helper/sessions/agent_7": "not_found", "GET /v1/AGENTS": "callers_kept_apart", "GET /v1/agents/agent_68F0": "not_found", "PATCH /v1/agents/agent_7/agent_68f0 {}": "not_found",
		"GET /v1/agents%2Fagent_7": "not_found", `POST /v1/agents/agent_68f0;x {}`: "invalid_path",
	}
	inBubble(t, oneAccount, func(t *testing.T, w *world) {
		w.do(alice, exchanged{"POST /v1/agents {}", `{"id":"agent_68f0"}`})
		for request, code := range refused {
			before := w.TotalCalls()
			if got := w.ask(alice, request); got.Status < 400 || !strings.Contains(got.Body, code) || w.TotalCalls() != before {
				t.Errorf("%s: alice got %d %s, want %s", request, got.Status, got.Body, code)
			}
		}
		for _, request := range []string{"POST /v1/agents/search {}", "POST /v1/audio/v2/speech {}", "POST /v1/classify {}", "GET /v1/models", "GET /v1/models/gpt-4o", "GET /v1/files", "GET /v1/agents/agent_68f0/sessions", "GET /v1/agents/agent_68f0/sessions/sess_7", "OPTIONS /v1/agents"} {
			w.ask(alice, request).WantServed(t, "a")
		}
	})
	inBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *world) {
		for request := range refused {
			if strings.Contains(request, "%2F") { // a path that servers read in different ways
				continue
			}
			w.ask("", request).WantServed(t, "a")
		}
	})
}

// TestNothingTakesAnObjectOfANewAPIFromItsOwner when a reply shows it.
func TestNothingTakesAnObjectOfANewAPIFromItsOwner(t *testing.T) {
	for name, bobs := range map[string]exchanged{
		"an echo":               {`POST /v1/agents {"copy":"agent_68f0"}`, `{"id":"agent_99","agent":{"id":"agent_68f0"}}`},
		"what the reply claims": {`POST /v1/agents {}`, `{"id":"agent_68f0"}`},
		"another API's reply":   {`POST /v1/vaults {}`, `{"agent":{"id":"agent_68f0"}}`},
		"a known API's reply":   {`POST /v1/files {}`, `{"id":"agent_68f0"}`},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, oneAccount, func(t *testing.T, w *world) {
				w.do(alice, exchanged{"POST /v1/agents {}", `{"id":"agent_68f0"}`})
				w.do(bob, bobs)
				w.ask(bob, "GET /v1/agents/agent_68f0").WantError(t, 404, "not_found")
				w.do(alice, exchanged{`POST /v1/agents/agent_68f0 {"name":"x"}`, `{"id":"agent_68f0"}`}, exchanged{"GET /v1/agents/agent_68f0", `{"id":"agent_68f0"}`})
			})
		})
	}
	for name, bobs := range map[string]exchanged{
		"a member":          {`POST /v1/agents {"copy":"agent_outside7"}`, `{"id":"agent_99","agent":{"id":"agent_outside7"}}`},
		"an escaped member": {`POST /v1/agents {"copy":"agent\u005foutside7"}`, `{"id":"agent_outside7"}`},
		"a list":            {`POST /v1/agents/search {}`, `{"data":[{"id":"agent_outside7"}],"agents":[{"id":"agent_outside7"}]}`},
		"metadata":          {`POST /v1/agents {}`, `{"id":"agent_99","metadata":{"id":"agent_outside7"}}`},
		"deeper":            {`POST /v1/agents {}`, `{"id":"agent_99","session":{"agent":{"id":"agent_outside7"}}}`},
		"a GET":             {`GET /v1/models`, `{"id":"agent_outside7"}`},
		"inference":         {`POST /v1/embeddings {}`, `{"id":"agent_outside7"}`},
		"what failed":       {`POST /v1/agents/search {}`, `{"error":{"id":"agent_outside7"}}`},
		"a message":         {`POST /v1/messages {}`, `{"id":"agent_outside7"}`},
		"a parameter":       {`POST /v1/agents?copy_id=agent_outside7 {}`, `{"id":"agent_outside7"}`},
	} {
		t.Run("of nobody: "+name, func(t *testing.T) {
			inBubble(t, oneAccount, func(t *testing.T, w *world) {
				w.do(bob, bobs)
				w.ask(bob, "GET /v1/agents/agent_outside7").WantError(t, 404, "not_found")
			})
		})
	}
}

// TestIDsInANewAPIAreFoundOnlyWhereObjectsAreNamed and not in a text, nor where
// a reply has taught nothing.
func TestIDsInANewAPIAreFoundOnlyWhereObjectsAreNamed(t *testing.T) {
	inBubble(t, threeAccountsInOrder, func(t *testing.T, w *world) {
		w.Backends["a"].Replies(lbtest.Throttled("1"))
		w.Backends["b"].Replies(lbtest.Says(200, `{"id":"agent_68f0"}`))
		w.ask(alice, "POST /v1/agents {}").WantServed(t, "b")
		w.AllReply(nil)
		time.Sleep(2 * time.Second)
		for _, request := range []string{
			`POST /v1/agents {"content":[{"agent_id":"agent_68f0"}]}`, `POST /v1/agents {"metadata":{"agent_id":"agent_68f0"}}`, `POST /v1/agents {"name":"agent_68f0"}`, `POST /v1/agents {"trace_id":"trace_12345"}`,
			`POST /v1/chat/completions {"model":"m","messages":[{"role":"tool","tool_call_id":"agent_68f0"}]}`, `POST /v1/responses {"model":"m","metadata":{"agent_id":"agent_68f0"}}`,
			`POST /v1/responses {"model":"m","tools":[{"type":"mcp","connector_id":"connector_googledrive"}]}`, `POST /v1/responses {"model":"m","unknown_id":"connector_12345"}`,
		} {
			w.ask(alice, request).WantServed(t, "a")
		}
	})
}

// TestManyRepliesOfANewAPIPushNothingOut of what is remembered of others. See
// also TestGuessedIDsOfACallerAreBounded.
func TestManyRepliesOfANewAPIPushNothingOut(t *testing.T) {
	inBubble(t, oneAccount, func(t *testing.T, w *world) {
		w.do(alice, exchanged{"POST /v1/agents {}", `{"id":"agent_68f0"}`})
		n := 0
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			n++
			lbtest.Says(200, fmt.Sprintf(`{"id":"score-%d"}`, n))(rw, r)
		})
		for range 200 {
			w.ask(bob, "POST /v1/score {}").WantServed(t, "a")
		}
		w.Backends["a"].Recovers()
		w.ask(alice, "GET /v1/agents/agent_68f0").WantServed(t, "a")
	})
}
