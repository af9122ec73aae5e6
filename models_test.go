package openailb

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"
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
func (w *world) chat(model string) clientReply {
	return w.post(fmt.Sprintf(`{"model":%q,"messages":[]}`, model))
}

func TestARequestGoesToABackendThatServesItsModel(t *testing.T) {
	inBubble(t, mixedPool, func(t *testing.T, w *world) {
		for model, backend := range map[string]string{
			"gpt-4o": "azure", "gpt-4o-mini": "azure", "text-embedding-3-small": "openai", "whisper-1": "gateway",
		} {
			w.chat(model).wantServed(t, backend)
		}
		reply := w.chat("gpt-5")
		reply.wantError(t, 404, "model_not_found")
		for _, want := range []string{"gpt-5", "gpt-4o, gpt-4o-mini, text-embedding-3-small, whisper-1"} {
			if !strings.Contains(reply.body, want) {
				t.Errorf("the error is %s, want it to name %s", reply.body, want)
			}
		}
		w.wantCalls(map[string]int{"azure": 2, "openai": 1, "gateway": 1})
		w.backends["azure"].replies(throttled("9"))
		w.chat("gpt-4o").wantServed(t, "openai")
	})
}

func TestABackendWithoutModelsServesAny(t *testing.T) {
	inBubble(t, `openai_lb {
		backend http://a {
			model gpt-4o
		}
		backend http://b {
			priority 2
		}
	}`, func(t *testing.T, w *world) {
		w.chat("gpt-4o").wantServed(t, "a")
		w.chat("gpt-5").wantServed(t, "b")
		w.send(w.request(http.MethodGet, "/v1/files", nil)).wantServed(t, "a")
	})
}

func TestAThrottledModelLeavesTheOthersOfItsBackendInUse(t *testing.T) {
	inBubble(t, mixedPool, func(t *testing.T, w *world) {
		w.backends["azure"].replies(func(rw http.ResponseWriter, r *http.Request) {
			if r.Header.Get("X-Wants") == "4o" {
				throttled("20")(rw, r)
			}
		})
		ask := func(model, wants string) clientReply {
			r := w.request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{"model":"`+model+`"}`))
			r.Header.Set("X-Wants", wants)
			return w.send(r)
		}
		for range 5 {
			ask("gpt-4o", "4o").wantServed(t, "openai")
			ask("gpt-4o-mini", "").wantServed(t, "azure")
		}
		w.wantCalls(map[string]int{"azure": 6})
		benched := w.logged("backend benched")
		if len(benched) != 1 || benched[0].ContextMap()["model"] != "gpt-4o-ptu" {
			t.Errorf("logged %v, want one bench of gpt-4o-ptu", benched)
		}
		w.backends["azure"].recovers()
		time.Sleep(20 * time.Second)
		ask("gpt-4o", "4o").wantServed(t, "azure")
	})
}

func TestABenchOfTheWholeBackendCountsForAllItsModels(t *testing.T) {
	for name, reply := range map[string]http.HandlerFunc{"a refused key": status(401), "an empty account": status(402)} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, `openai_lb {
				backend http://a
				backend http://b {
					priority 2
				}
			}`, func(t *testing.T, w *world) {
				w.backends["a"].replies(reply)
				for _, model := range []string{"gpt-4o", "gpt-4o-mini", "o3"} {
					w.chat(model).wantServed(t, "b")
				}
				w.wantCalls(map[string]int{"a": 1})
				if got := len(w.logged("backend benched")); got != 1 {
					t.Errorf("logged %d benches, want 1", got)
				}
			})
		})
	}
}

func TestNoFloodOfMadeUpNamesMakesAThrottleForgotten(t *testing.T) {
	inBubble(t, `openai_lb {
		backend http://a
		backend http://b {
			priority 2
		}
	}`, func(t *testing.T, w *world) {
		w.backends["a"].replies(throttled("60"))
		w.chat("gpt-4o").wantServed(t, "b")
		w.backends["a"].replies(func(rw http.ResponseWriter, r *http.Request) {
			rw.WriteHeader(404)
			io.WriteString(rw, `{"error":{"code":"model_not_found"}}`)
		})
		for n := range 400 {
			w.chat(fmt.Sprint("bogus-", n, strings.Repeat("x", 3000))).wantServed(t, "b")
		}
		calls := len(w.backends["a"].received())
		w.chat("gpt-4o").wantServed(t, "b")
		w.wantCalls(map[string]int{"a": calls})
	})
}

func TestModelsAreListedWhenEveryBackendNamesIts(t *testing.T) {
	inBubble(t, mixedPool, func(t *testing.T, w *world) {
		for _, path := range []string{"/v1/models", "/openai/v1/models", "/openai/models?api-version=2024-10-21", "/v1/models/"} {
			reply := w.send(w.request(http.MethodGet, path, nil))
			var list struct {
				Object string
				Data   []struct{ ID, Object string }
			}
			if err := json.Unmarshal([]byte(reply.body), &list); err != nil || reply.status != 200 || list.Object != "list" {
				t.Fatalf("GET %s gives %d %s", path, reply.status, reply.body)
			}
			var ids []string
			for _, m := range list.Data {
				ids = append(ids, m.ID)
			}
			if want := []string{"gpt-4o", "gpt-4o-mini", "text-embedding-3-small", "whisper-1"}; !slices.Equal(ids, want) {
				t.Errorf("GET %s lists %v, want %v", path, ids, want)
			}
		}
		if reply := w.send(w.request(http.MethodGet, "/v1/models/gpt-4o", nil)); reply.status != 200 || !strings.Contains(reply.body, `"id":"gpt-4o"`) {
			t.Errorf("GET /v1/models/gpt-4o gives %d %s", reply.status, reply.body)
		}
		w.send(w.request(http.MethodGet, "/v1/models/gpt-5", nil)).wantError(t, 404, "model_not_found")
		w.wantCalls(map[string]int{"azure": 0, "openai": 0, "gateway": 0})
	})
	inBubble(t, "openai_lb {\nbackend http://a {\nmodel x\n}\nbackend http://b\n}", func(t *testing.T, w *world) {
		w.send(w.request(http.MethodGet, "/v1/models", nil)).wantServed(t, "a", "b")
	})
}
