package failover

import (
	"bytes"
	"fmt"
	"mime/multipart"
	"net/http"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestWhereARequestGoes(t *testing.T) {
	const body = `{"messages":[],"model":"gpt-4o","seed":9007199254740993}`
	replaced := strings.Replace(body, `"gpt-4o"`, `"dep \"x\""`, 1)
	for _, c := range []struct {
		name    string
		backend string
		path    string
		want    string
		body    string
	}{
		{"OpenAI to OpenAI", "backend http://a", "/v1/chat/completions", "/v1/chat/completions", body},
		{"OpenAI to Azure", "backend http://a {\nauth api_key\napi_key k\n}", "/v1/chat/completions", "/openai/v1/chat/completions", body},
		{"Azure v1 to Azure", "backend http://a {\nauth api_key\napi_key k\n}", "/openai/v1/responses?api-version=preview", "/openai/v1/responses?api-version=preview", body},
		{"Azure v1 to OpenAI", "backend http://a", "/openai/v1/responses", "/v1/responses", body},
		{"to a base path", "backend http://a/team-a/v1", "/v1/chat/completions", "/team-a/v1/chat/completions", body},
		{"to a base path with a trailing slash", "backend http://a/openai/v1/", "/v1/embeddings", "/openai/v1/embeddings", body},
		{"classic to Azure", "backend http://a {\nauth api_key\napi_key k\n}", "/openai/deployments/gpt-4o/chat/completions?api-version=2024-10-21", "/openai/deployments/gpt-4o/chat/completions?api-version=2024-10-21", body},
		{"the deployment on a classic path", "backend http://a {\nauth api_key\napi_key k\ndeployment my/dep\n}", "/openai/deployments/chat/chat/completions?api-version=1", "/openai/deployments/my%2Fdep/chat/completions?api-version=1", body},
		{"a deployment named openai", "backend http://a {\nauth api_key\napi_key k\ndeployment x\n}", "/openai/deployments/openai/chat/completions?api-version=1", "/openai/deployments/x/chat/completions?api-version=1", body},
		{"a slash inside a deployment", "backend http://a {\nauth api_key\napi_key k\n}", "/openai/deployments/a%2Fb/chat/completions?api-version=1", "/openai/deployments/a%2Fb/chat/completions?api-version=1", body},
		{"the deployment as the body's model", "backend http://a {\ndeployment `dep \"x\"`\n}", "/v1/chat/completions", "/v1/chat/completions", replaced},
		{"Azure's files", "backend http://a {\nauth api_key\napi_key k\ndeployment x\n}", "/openai/files/file-1?api-version=1", "/openai/files/file-1?api-version=1", strings.Replace(body, "gpt-4o", "x", 1)},
		{"no prefix", "backend http://a", "/chat/completions", "/v1/chat/completions", body},
		{"anything else of the API", "backend http://a", "/v1/anything", "/v1/anything", body},
	} {
		t.Run(c.name, func(t *testing.T) {
			lbtest.InBubble(t, "openai_lb {\n"+c.backend+"\n}", func(t *testing.T, w *lbtest.World) {
				r := w.Request(http.MethodPost, c.path, strings.NewReader(body))
				w.Send(r).WantServed(t, "a")
				got := w.Backends["a"].Received()[0]
				if got.Request.RequestURI != c.want {
					t.Errorf("a was asked for %s, want %s", got.Request.RequestURI, c.want)
				}
				if got.BodyHash != lbtest.Hash([]byte(c.body)) || got.Request.ContentLength != int64(len(c.body)) {
					t.Errorf("a got %d bytes, Content-Length %d, want the %d of %s", got.BodyBytes, got.Request.ContentLength, len(c.body), c.body)
				}
			})
		})
	}
}

func TestEveryBackendGetsItsOwnModel(t *testing.T) {
	lbtest.InBubble(t, `openai_lb {
		backend http://a {
			deployment four-oh
		}
		backend http://b {
			priority 2
			deployment gpt-4o-global-standard
		}
		backend http://c {
			priority 3
		}
	}`, func(t *testing.T, w *lbtest.World) {
		for _, name := range []string{"a", "b"} {
			w.Backends[name].Replies(lbtest.Throttled("9"))
		}
		body := "\ufeff { \"model\" : \"gpt-4o\", \"x\": 1e-7, \"y\": \"\\u0000\xff\" }\n"
		w.Post(body).WantServed(t, "c")
		for name, model := range map[string]string{"a": "four-oh", "b": "gpt-4o-global-standard", "c": "gpt-4o"} {
			if got := w.Backends[name].Received()[0]; got.BodyHash != lbtest.Hash([]byte(strings.Replace(body, "gpt-4o", model, 1))) {
				t.Errorf("%s did not get the body with just the model %s", name, model)
			}
		}
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
		{"classic to OpenAI, with null in the body", openai, "", "/openai/deployments/m/chat/completions?api-version=1", `{"messages":[],"model":null,"n":1}`, "/v1/chat/completions", `{"messages":[],"model":"m","n":1}`},
		{"classic to OpenAI, with a model and null", openai, "", "/openai/deployments/m/chat/completions?api-version=1", `{"model":"x","model": null }`, "/v1/chat/completions", `{"model":"m","model": "m" }`},
		{"classic to Azure, with null in the body", azure, "", "/openai/deployments/m/chat/completions?api-version=1", `{"model":null}`, "/openai/deployments/m/chat/completions?api-version=1", `{"model":null}`},
		{"v1 with null in the body", openai, "deployment d", "/v1/chat/completions", `{"model":null}`, "/v1/chat/completions", `{"model":null}`},
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
			lbtest.InBubble(t, "openai_lb {\n"+fmt.Sprintf(c.backend, c.options)+"\n}", func(t *testing.T, w *lbtest.World) {
				w.Send(w.Request(http.MethodPost, c.path, strings.NewReader(c.body))).WantServed(t, "a")
				got := w.Backends["a"].Received()[0]
				if got.Request.RequestURI != c.wantPath {
					t.Errorf("a was asked for %s, want %s", got.Request.RequestURI, c.wantPath)
				}
				if got.BodyHash != lbtest.Hash([]byte(c.wantBody)) || got.Request.ContentLength != int64(len(c.wantBody)) {
					t.Errorf("a got %d bytes with Content-Length %d, want the %d of %s", got.BodyBytes, got.Request.ContentLength, len(c.wantBody), c.wantBody)
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
		lbtest.InBubble(t, mixedPool, func(t *testing.T, w *lbtest.World) {
			contentType, body := form("whisper-1", first)
			r := w.Request(http.MethodPost, "/v1/audio/transcriptions", bytes.NewReader(body))
			r.Header.Set("Content-Type", contentType)
			w.Send(r).WantServed(t, "gateway")
			_, want := form("our-whisper", first)
			got := w.Backends["gateway"].Received()[0]
			if got.BodyHash != lbtest.Hash(want) || got.Request.ContentLength != int64(len(want)) {
				t.Errorf("the gateway got %d bytes, Content-Length %d, want %d with only the model replaced", got.BodyBytes, got.Request.ContentLength, len(want))
			}
			if got.Request.RequestURI != "/team-a/audio/transcriptions" {
				t.Errorf("the gateway was asked for %s", got.Request.RequestURI)
			}
		})
	}
}

func TestACompressedBodyGoesWhereNothingInItNeedsReplacing(t *testing.T) {
	compressed := func(w *lbtest.World, path string) *http.Request {
		r := w.Request(http.MethodPost, path, strings.NewReader("\x1f\x8b whatever"))
		r.Header.Set("Content-Encoding", "gzip")
		return r
	}
	lbtest.InBubble(t, `openai_lb {
		backend http://a {
			deployment x
		}
		backend http://b {
			priority 2
		}
	}`, func(t *testing.T, w *lbtest.World) {
		w.Send(compressed(w, "/v1/chat/completions")).WantServed(t, "b")
		if got := w.Backends["b"].Received()[0]; got.BodyHash != lbtest.Hash([]byte("\x1f\x8b whatever")) {
			t.Error("the body was changed")
		}
	})
	lbtest.InBubble(t, mixedPool, func(t *testing.T, w *lbtest.World) {
		r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{"model":"gpt-4o"}`))
		r.Header.Set("Content-Encoding", "identity")
		w.Send(r).WantServed(t, "azure")
		w.Backends["azure"].Forget()
		w.Send(compressed(w, "/v1/chat/completions")).WantError(t, 415, "unsupported_content_encoding")
		w.WantCalls(map[string]int{"azure": 0, "openai": 0, "gateway": 0})
	})
}
