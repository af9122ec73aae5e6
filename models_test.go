package openailb

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"mime/multipart"
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

func TestWhatIsRememberedOfModelsIsBounded(t *testing.T) {
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
		for n := range 3 * maxModels {
			w.chat(fmt.Sprint("bogus-", n, strings.Repeat("x", 10*maxModelName))).wantServed(t, "b")
		}
		h := w.handler.pool.members[0].health
		models := *h.models.Load()
		if len(models) > maxModels {
			t.Errorf("%d models are remembered, want %d at most", len(models), maxModels)
		}
		for name := range models {
			if len(name) > maxModelName {
				t.Errorf("a name of %d bytes is remembered", len(name))
			}
		}
		// a throttle is a promise: no flood of bogus names makes it forgotten
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

func TestDialectsAreTranslated(t *testing.T) {
	const (
		azure   = "backend http://a {\nauth api_key\napi_key k\n%s\n}"
		openai  = "backend http://a {\n%s\n}"
		v1      = "backend http://a/openai/v1 {\nauth api_key\napi_key k\n%s\n}"
		gateway = "backend http://a/team-a {\nauth api_key\napi_key k\n%s\n}"
		below   = "backend http://a/openai {\nauth api_key\napi_key k\n%s\n}"
		asGiven = `{"messages":[],"model":"m"}`
		noModel = `{"messages":[]}`
	)
	for _, c := range []struct {
		name     string
		backend  string
		options  string
		path     string
		body     string
		wantPath string
		wantBody string
	}{
		{"classic to OpenAI", openai, "", "/openai/deployments/m/chat/completions?api-version=2024-10-21", noModel, "/v1/chat/completions", `{"model":"m","messages":[]}`},
		{"classic to OpenAI, with the model in the body", openai, "", "/openai/deployments/m/chat/completions?api-version=1&x=%2F", asGiven, "/v1/chat/completions?x=%2F", asGiven},
		{"classic to OpenAI, with another model in the body", openai, "", "/openai/deployments/m/chat/completions?api-version=1", `{"model":"ignored"}`, "/v1/chat/completions", `{"model":"m"}`},
		{"classic to OpenAI, with a name of its own", openai, "model m its-m", "/openai/deployments/m/embeddings?api-version=1", `{"input":"x"}`, "/v1/embeddings", `{"model":"its-m","input":"x"}`},
		{"classic to an empty object", openai, "", "/openai/deployments/m/embeddings?api-version=1", `{}`, "/v1/embeddings", `{"model":"m"}`},
		{"classic to Azure's v1", v1, "", "/openai/deployments/m/chat/completions?api-version=1", noModel, "/openai/v1/chat/completions", `{"model":"m","messages":[]}`},
		{"classic with a name of its own", azure, "model m its/m", "/openai/deployments/m/chat/completions?api-version=1", asGiven, "/openai/deployments/its%2Fm/chat/completions?api-version=1", asGiven},
		{"classic to a gateway", gateway, "", "/openai/deployments/m/chat/completions?api-version=1", asGiven, "/team-a/openai/deployments/m/chat/completions?api-version=1", asGiven},
		{"classic below a base path that has /openai", below, "", "/openai/deployments/m/chat/completions?api-version=1", asGiven, "/openai/deployments/m/chat/completions?api-version=1", asGiven},
		{"v1 below a base path that has /openai", below, "", "/v1/chat/completions", asGiven, "/openai/v1/chat/completions", asGiven},
		{"v1 with a name of its own", openai, "model m its-m", "/v1/chat/completions", asGiven, "/v1/chat/completions", `{"messages":[],"model":"its-m"}`},
		{"a model's name before the deployment", openai, "model m its-m\ndeployment d", "/v1/chat/completions", asGiven, "/v1/chat/completions", `{"messages":[],"model":"its-m"}`},
		{"the deployment for a model without a name", openai, "model m\ndeployment d", "/v1/chat/completions", asGiven, "/v1/chat/completions", `{"messages":[],"model":"d"}`},
		{"every one of duplicate keys", openai, "model m its-m", "/v1/chat/completions", `{"model":"x","model":"m"}`, "/v1/chat/completions", `{"model":"its-m","model":"its-m"}`},
		{"a deployment named chat", azure, "model chat d", "/openai/deployments/chat/chat/completions?api-version=1", noModel, "/openai/deployments/d/chat/completions?api-version=1", noModel},
		{"a deployment named openai", azure, "model openai d", "/openai/deployments/openai/chat/completions?api-version=1", noModel, "/openai/deployments/d/chat/completions?api-version=1", noModel},
		{"Azure's files", azure, "deployment d", "/openai/files/file-1?api-version=1", noModel, "/openai/files/file-1?api-version=1", noModel},
		{"Azure's threads", azure, "deployment d", "/openai/threads/t/messages?api-version=1", noModel, "/openai/threads/t/messages?api-version=1", noModel},
		{"Azure's threads at OpenAI", openai, "", "/openai/threads/t/messages?api-version=1", noModel, "/v1/threads/t/messages", noModel},
		{"Azure's v1", azure, "deployment d", "/openai/v1/responses", asGiven, "/openai/v1/responses", `{"messages":[],"model":"d"}`},
		{"an empty override", azure, `deployment ""`, "/openai/deployments/m/chat/completions?api-version=1", asGiven, "/openai/deployments/m/chat/completions?api-version=1", asGiven},
		{"a slash within a name", azure, "", "/openai/deployments/a%2Fb/chat/completions?api-version=1", noModel, "/openai/deployments/a%2Fb/chat/completions?api-version=1", noModel},
		{"a slash within a name of its own", azure, "model a/b c", "/openai/deployments/a%2Fb/chat/completions?api-version=1", noModel, "/openai/deployments/c/chat/completions?api-version=1", noModel},
		{"a doubled /openai", azure, "deployment d", "/openai/openai/deployments/m/chat/completions?api-version=1", noModel, "/openai/openai/deployments/m/chat/completions?api-version=1", noModel},
		{"a trailing slash", azure, "deployment d", "/openai/deployments/m/chat/completions/?api-version=1", noModel, "/openai/deployments/d/chat/completions/?api-version=1", noModel},
		{"realtime at Azure", azure, "model m its-m", "/openai/realtime?api-version=1&deployment=m", "", "/openai/realtime?api-version=1&deployment=its-m", ""},
		{"realtime from Azure to OpenAI", openai, "model m its-m", "/openai/realtime?api-version=1&deployment=m", "", "/v1/realtime?model=its-m", ""},
		{"realtime at OpenAI", openai, "model m its-m", "/v1/realtime?model=m&x=1", "", "/v1/realtime?model=its-m&x=1", ""},
		{"realtime at OpenAI, in Azure's words", openai, "model m its-m", "/v1/realtime?deployment=m", "", "/v1/realtime?model=its-m", ""},
		{"realtime at Azure, in OpenAI's words", azure, "model m its-m", "/openai/realtime?api-version=1&model=m", "", "/openai/realtime?api-version=1&deployment=its-m", ""},
		{"a parameter that filters", azure, "model m its-m", "/openai/v1/batches?model=m", "", "/openai/v1/batches?model=its-m", ""},
		{"realtime from OpenAI to Azure", azure, "", "/v1/realtime?model=m", "", "/openai/v1/realtime?model=m", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			inBubble(t, "openai_lb {\n"+fmt.Sprintf(c.backend, c.options)+"\n}", func(t *testing.T, w *world) {
				w.send(w.request(http.MethodPost, c.path, strings.NewReader(c.body))).wantServed(t, "a")
				got := w.backends["a"].received()[0]
				if got.request.RequestURI != c.wantPath {
					t.Errorf("a was asked for %s, want %s", got.request.RequestURI, c.wantPath)
				}
				if got.bodyHash != sha([]byte(c.wantBody)) || got.request.ContentLength != int64(len(c.wantBody)) {
					t.Errorf("a got %d bytes with Content-Length %d, want the %d of %s", got.bodyBytes, got.request.ContentLength, len(c.wantBody), c.wantBody)
				}
			})
		})
	}
}

func TestAFormsModelIsFoundAndReplaced(t *testing.T) {
	audio := bytes.Repeat([]byte("\x00RIFF\r\n--not the boundary"), 50_000)
	form := func(model string, first bool) (string, []byte) {
		var b bytes.Buffer
		w := multipart.NewWriter(&b)
		if err := w.SetBoundary("the-boundary"); err != nil {
			t.Fatal(err)
		}
		if first {
			w.WriteField("model", model)
		}
		part, err := w.CreateFormFile("file", "a.wav")
		if err != nil {
			t.Fatal(err)
		}
		part.Write(audio)
		w.WriteField("language", "en")
		if !first {
			w.WriteField("model", model)
		}
		w.Close()
		return w.FormDataContentType(), b.Bytes()
	}
	for _, first := range []bool{true, false} {
		inBubble(t, mixedPool, func(t *testing.T, w *world) {
			contentType, body := form("whisper-1", first)
			r := w.request(http.MethodPost, "/v1/audio/transcriptions", bytes.NewReader(body))
			r.Header.Set("Content-Type", contentType)
			w.send(r).wantServed(t, "gateway")
			_, want := form("our-whisper", first)
			got := w.backends["gateway"].received()[0]
			if got.bodyHash != sha(want) || got.request.ContentLength != int64(len(want)) {
				t.Errorf("the gateway got %d bytes, Content-Length %d, want %d with only the model replaced", got.bodyBytes, got.request.ContentLength, len(want))
			}
			if got.request.RequestURI != "/team-a/audio/transcriptions" {
				t.Errorf("the gateway was asked for %s", got.request.RequestURI)
			}
		})
	}
}

func TestACompressedBodyGoesWhereNothingInItNeedsReplacing(t *testing.T) {
	compressed := func(w *world, path string) *http.Request {
		r := w.request(http.MethodPost, path, strings.NewReader("\x1f\x8b whatever"))
		r.Header.Set("Content-Encoding", "gzip")
		return r
	}
	inBubble(t, `openai_lb {
		backend http://a {
			deployment x
		}
		backend http://b {
			priority 2
		}
	}`, func(t *testing.T, w *world) {
		w.send(compressed(w, "/v1/chat/completions")).wantServed(t, "b")
		if got := w.backends["b"].received()[0]; got.bodyHash != sha([]byte("\x1f\x8b whatever")) {
			t.Error("the body was changed")
		}
	})
	inBubble(t, mixedPool, func(t *testing.T, w *world) {
		r := w.request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{"model":"gpt-4o"}`))
		r.Header.Set("Content-Encoding", "identity")
		w.send(r).wantServed(t, "azure")
		w.backends["azure"].forget()
		w.send(compressed(w, "/v1/chat/completions")).wantError(t, 415, "unsupported_content_encoding")
		w.wantCalls(map[string]int{"azure": 0, "openai": 0, "gateway": 0})
	})
}

func TestNoPathLeadsOutOfABackendsBasePath(t *testing.T) {
	inBubble(t, "openai_lb {\nbackend http://a/team-a\n}", func(t *testing.T, w *world) {
		for _, path := range []string{"/v1/../../admin", "/v1/%2e%2e/admin", "/..", "/v1/x%2F..%2F..%2Fadmin", "/./v1", "/v1/..%5C..%5Cadmin"} {
			r := w.request(http.MethodPost, "/", nil)
			r.URL.Opaque = "//lb" + path
			w.send(r).wantError(t, 400, "invalid_path")
		}
		w.wantCalls(map[string]int{"a": 0})
		w.send(w.request(http.MethodPost, "/v1/files/..a/.b", nil)).wantServed(t, "a")
	})
}
