package callers

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/modules/status"
)

// askUsage asks for the use of the caller with this key.
func (w *world) askUsage(method, path, key string) lbtest.Reply {
	r := w.Request(method, path, http.NoBody)
	r.Header.Set("Authorization", "Bearer "+key)
	return w.Send(r)
}

// wantUsage checks what a caller is told of its use. Its windows of minutes
// have begun anew.
func (w *world) wantUsage(t *testing.T, key string, want status.Caller) {
	t.Helper()
	reply := w.askUsage(http.MethodGet, "/v1/usage", key)
	reply.WantStatus(t, http.StatusOK)
	if strings.Contains(reply.Body, "refused") || strings.Contains(reply.Body, "in_flight") {
		t.Errorf("a replica tells of itself alone: %s", reply.Body)
	}
	var got status.Caller
	if err := json.Unmarshal([]byte(reply.Body), &got); err != nil {
		t.Fatalf("%v in %s", err, reply.Body)
	}
	want.Pool = w.Handler.Pool
	for i := range got.Limits {
		got.Limits[i].Ends, got.Limits[i].Resets = time.Time{}, nil
	}
	if got, want := asJSON(t, got), asJSON(t, want); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	wantHeaders(t, reply, "Content-Type", "application/json", "Cache-Control", "no-store")
}

func asJSON(t *testing.T, value any) string {
	t.Helper()
	text, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestATeamSeesItsOwnUseAlsoOverItsLimitAndForNothing(t *testing.T) {
	inBubble(t, "caller alice {\ntokens 150/day\nrequests 2/hour\nmax_requests 3\nmodels gpt-4o\n}\ncaller bob {\ntokens 1k/minute\n}", func(t *testing.T, w *world) {
		bobs := status.Caller{Name: "bob", Limits: []status.CallerLimit{{Kind: "tokens", Window: "minute", Limit: 1000, Left: 1000}}}
		w.wantUsage(t, bobKey, bobs) // who has sent no other request
		w.AllReply(used(60, 40))
		w.chat(prompt(20, `"max_tokens":1,`)).WantServed(t, "a")
		synctest.Wait()
		alices := status.Caller{Name: "alice", MaxRequests: 3, TokensToday: 100, TokensMonth: 100, Limits: []status.CallerLimit{
			{Kind: "requests", Window: "hour", Limit: 2, Used: 1, Left: 1}, {Kind: "tokens", Window: "day", Limit: 150, Used: 100, Left: 50},
		}}
		for range 5 {
			w.wantUsage(t, aliceKey, alices)
		}
		w.chat(prompt(20, `"max_tokens":1,`)).WantServed(t, "a")
		w.chat(prompt(20, `"max_tokens":1,`)).WantError(t, 429, "insufficient_quota")
		synctest.Wait()
		alices.TokensToday, alices.TokensMonth = 200, 200
		alices.Limits[0].Used, alices.Limits[0].Left = 2, 0
		alices.Limits[1].Used, alices.Limits[1].Left = 200, 0
		w.wantUsage(t, aliceKey, alices)
		w.wantUsage(t, bobKey, bobs)
		for _, path := range []string{"/openai/v1/usage", "/v1/usage/", "/openai/usage?api-version=1"} {
			if got := w.askUsage(http.MethodGet, path, aliceKey); got.Status != 200 || got.Header.Get("Content-Length") == "0" {
				t.Errorf("%s: client got %d %s", path, got.Status, got.Body)
			}
		}
		if got := w.askUsage(http.MethodHead, "/v1/usage", aliceKey); got.Status != 200 || got.Body != "" {
			t.Errorf("a HEAD gets %d %s", got.Status, got.Body)
		}
		w.wantUsage(t, aliceKey, alices)
		w.WantCalls(map[string]int{"a": 2})
	})
}

func TestATeamSeesItsUseByModel(t *testing.T) {
	inBubble(t, "caller * {\ntokens 1M/day\n}", func(t *testing.T, w *world) {
		want := func(key, want string) {
			t.Helper()
			time.Sleep(time.Second)
			if got := w.askUsage(http.MethodGet, "/v1/usage", key); !strings.HasSuffix(got.Body, `"replicas_apart":0,"models":[`+want+`]}`) {
				t.Errorf("got %s\nwant %s", got.Body, want)
			}
		}
		use := func(requests int) string {
			return fmt.Sprintf(`{"requests":%d,"input":%d,"cached":0,"output":%d,"reasoning":0,"estimated_input":0,"estimated_output":0}`, requests, 60*requests, 40*requests)
		}
		of := func(model string, today, month int) string {
			return fmt.Sprintf(`{"model":%q,"today":%s,"month":%s}`, model, use(today), use(month))
		}
		w.AllReply(used(60, 40))
		for _, model := range []string{"gpt-4o", "o3", "gpt-4o"} {
			w.post(aliceKey, "/v1/chat/completions", chatOf(model, "")).WantServed(t, "a")
		}
		w.post(bobKey, "/v1/chat/completions", chatOf("o3", "")).WantServed(t, "a")
		want(aliceKey, of("gpt-4o", 2, 2)+","+of("o3", 1, 1))
		want(bobKey, of("o3", 1, 1))
		time.Sleep(24 * time.Hour)
		w.post(aliceKey, "/v1/chat/completions", chatOf("o3", "")).WantServed(t, "a")
		want(aliceKey, of("gpt-4o", 0, 2)+","+of("o3", 1, 2))
		time.Sleep(31 * 24 * time.Hour)
		want(aliceKey, "")
	})
}

func TestOnlyACallerSeesUse(t *testing.T) {
	inBubble(t, "caller alice {\nrequests 1/day\n}\ncaller * deny", func(t *testing.T, w *world) {
		w.askUsage(http.MethodGet, "/v1/usage", bobKey).WantError(t, http.StatusForbidden, "permission_denied")
		w.askUsage(http.MethodGet, "/v1/usage", "sk-nobody-0123456789").WantError(t, http.StatusUnauthorized, "invalid_api_key")
		w.askUsage(http.MethodGet, "/v1/usage?caller=bob", aliceKey).WantStatus(t, http.StatusOK)
		w.askUsage(http.MethodGet, "/v1/usage/bob", aliceKey).WantServed(t, "a") // any other path is a backend's
	})
}

func TestAPoolWithoutCallersHasNoUse(t *testing.T) {
	inBubble(t, "", func(t *testing.T, w *world) {
		w.askUsage(http.MethodGet, "/v1/usage", aliceKey).WantError(t, http.StatusNotFound, "unknown_url")
		w.WantCalls(map[string]int{"a": 0})
	})
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
		w.Send(w.Request(http.MethodGet, "/v1/usage", http.NoBody)).WantError(t, http.StatusNotFound, "unknown_url")
	})
}

func TestATeamSeesItsUseAtAllReplicas(t *testing.T) {
	hub := lbtest.Unique("hub")
	inBubble(t, "caller alice {\ntokens 1000/hour\n}\nstate hub "+hub, func(t *testing.T, w *world) {
		lbtest.Connect(t, hub)
		other := anotherReplica(t, hub, w.Handler.Pool, "1000/hour")
		time.Sleep(3 * time.Second) // they know each other
		other.spend(600)
		pass(late)
		w.wantUsage(t, aliceKey, status.Caller{Name: "alice", TokensToday: 600, TokensMonth: 600, Limits: []status.CallerLimit{
			{Kind: "tokens", Window: "hour", Limit: 1000, Used: 600, Left: 400},
		}})
	})
}

// TestUsageSaysWhereItsModelsAreFrom because replicas have a bill each, unless
// they share a storage.
func TestUsageSaysWhereItsModelsAreFrom(t *testing.T) {
	for state, want := range map[string]bool{"": false, "state hub " + lbtest.Unique("usage"): true} {
		inBubble(t, "caller alice {\nrequests 3/day\n}\n"+state, func(t *testing.T, w *world) {
			got := w.askUsage(http.MethodGet, "/v1/usage", aliceKey)
			if strings.Contains(got.Body, `"models_of":"storage","models":[`) != want {
				t.Errorf("with %q got %s", state, got.Body)
			}
		})
	}
}
