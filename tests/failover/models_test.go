package failover

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

const mixedPool = `openai_lb {
	backend http://azure {
		auth api_key
		api_key k
		model gpt-4o gpt-4o-ptu
		model gpt-4o-mini
	}
	backend http://openai/v1 {
		priority 2
		model gpt-4o
		model text-embedding-3-small
	}
	backend http://gateway/team-a {
		priority 3
		model whisper-1 our-whisper
	}
}`

// chat asks for a model through the balancer.
func chat(w *lbtest.World, model string) lbtest.Reply {
	return w.Post(fmt.Sprintf(`{"model":%q,"messages":[]}`, model))
}

func TestARequestGoesToABackendThatServesItsModel(t *testing.T) {
	lbtest.InBubble(t, mixedPool, func(t *testing.T, w *lbtest.World) {
		for model, backend := range map[string]string{
			"gpt-4o": "azure", "gpt-4o-mini": "azure", "text-embedding-3-small": "openai", "whisper-1": "gateway",
		} {
			chat(w, model).WantServed(t, backend)
		}
		reply := chat(w, "gpt-5")
		reply.WantError(t, 404, "model_not_found")
		for _, want := range []string{"gpt-5", "gpt-4o, gpt-4o-mini, text-embedding-3-small, whisper-1"} {
			if !strings.Contains(reply.Body, want) {
				t.Errorf("the error is %s, want it to name %s", reply.Body, want)
			}
		}
		w.WantCalls(map[string]int{"azure": 2, "openai": 1, "gateway": 1})
		w.Backends["azure"].Replies(lbtest.Throttled("9"))
		chat(w, "gpt-4o").WantServed(t, "openai")
	})
}

func TestABackendWithoutModelsServesAny(t *testing.T) {
	lbtest.InBubble(t, `openai_lb {
		backend http://a {
			model gpt-4o
		}
		backend http://b {
			priority 2
		}
	}`, func(t *testing.T, w *lbtest.World) {
		chat(w, "gpt-4o").WantServed(t, "a")
		chat(w, "gpt-5").WantServed(t, "b")
		w.Send(w.Request(http.MethodGet, "/v1/files/file-12345678", nil)).WantServed(t, "a")
	})
}

func TestAThrottledModelLeavesTheOthersOfItsBackendInUse(t *testing.T) {
	lbtest.InBubble(t, mixedPool, func(t *testing.T, w *lbtest.World) {
		w.Backends["azure"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			if r.Header.Get("X-Wants") == "4o" {
				lbtest.Throttled("20")(rw, r)
			}
		})
		ask := func(model, wants string) lbtest.Reply {
			r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{"model":"`+model+`"}`))
			r.Header.Set("X-Wants", wants)
			return w.Send(r)
		}
		for range 5 {
			ask("gpt-4o", "4o").WantServed(t, "openai")
			ask("gpt-4o-mini", "").WantServed(t, "azure")
		}
		w.WantCalls(map[string]int{"azure": 6})
		cooldowns := w.Logged("cooldown started")
		if len(cooldowns) != 1 || cooldowns[0].ContextMap()["deployment"] != "gpt-4o-ptu" {
			t.Errorf("logged %v, want one cooldown of gpt-4o-ptu", cooldowns)
		}
		w.Backends["azure"].Recovers()
		time.Sleep(20 * time.Second)
		ask("gpt-4o", "4o").WantServed(t, "azure")
	})
}

func TestACooldownOfTheWholeBackendCountsForAllItsModels(t *testing.T) {
	for name, reply := range map[string]http.HandlerFunc{"a refused key": lbtest.Status(401), "an empty account": lbtest.Status(402)} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.InOrder("a b", ""), func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(reply)
				for _, model := range []string{"gpt-4o", "gpt-4o-mini", "o3"} {
					chat(w, model).WantServed(t, "b")
				}
				w.WantCalls(map[string]int{"a": 1})
				if got := len(w.Logged("cooldown started")); got != 1 {
					t.Errorf("logged %d cooldowns, want 1", got)
				}
			})
		})
	}
}

func TestNoFloodOfMadeUpNamesMakesAThrottleForgotten(t *testing.T) {
	lbtest.InBubble(t, lbtest.InOrder("a b", ""), func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Throttled("60"))
		chat(w, "gpt-4o").WantServed(t, "b")
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			rw.WriteHeader(404)
			io.WriteString(rw, `{"error":{"code":"model_not_found"}}`)
		})
		for n := range 400 {
			chat(w, fmt.Sprint("bogus-", n, strings.Repeat("x", 3000))).WantServed(t, "b")
		}
		calls := len(w.Backends["a"].Received())
		chat(w, "gpt-4o").WantServed(t, "b")
		w.WantCalls(map[string]int{"a": calls})
	})
}

func TestModelsAreListedWhenEveryBackendNamesIts(t *testing.T) {
	lbtest.InBubble(t, mixedPool, func(t *testing.T, w *lbtest.World) {
		for _, path := range []string{"/v1/models", "/openai/v1/models", "/openai/models?api-version=2024-10-21", "/v1/models/"} {
			reply := w.Send(w.Request(http.MethodGet, path, nil))
			var list struct {
				Object string
				Data   []struct{ ID, Object string }
			}
			if err := json.Unmarshal([]byte(reply.Body), &list); err != nil || reply.Status != 200 || list.Object != "list" {
				t.Fatalf("GET %s gives %d %s", path, reply.Status, reply.Body)
			}
			var ids []string
			for _, m := range list.Data {
				ids = append(ids, m.ID)
			}
			if want := []string{"gpt-4o", "gpt-4o-mini", "text-embedding-3-small", "whisper-1"}; !slices.Equal(ids, want) {
				t.Errorf("GET %s lists %v, want %v", path, ids, want)
			}
		}
		if reply := w.Send(w.Request(http.MethodGet, "/v1/models/gpt-4o", nil)); reply.Status != 200 || !strings.Contains(reply.Body, `"id":"gpt-4o"`) {
			t.Errorf("GET /v1/models/gpt-4o gives %d %s", reply.Status, reply.Body)
		}
		w.Send(w.Request(http.MethodGet, "/v1/models/gpt-5", nil)).WantError(t, 404, "model_not_found")
		w.WantCalls(map[string]int{"azure": 0, "openai": 0, "gateway": 0})
	})
	lbtest.InBubble(t, "openai_lb {\nbackend http://a {\nmodel x\n}\nbackend http://b\n}", func(t *testing.T, w *lbtest.World) {
		w.Send(w.Request(http.MethodGet, "/v1/models", nil)).WantServed(t, "a", "b")
	})
}
