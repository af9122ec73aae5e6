package failover

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// utf16 writes ASCII text in UTF-16, with the less significant byte first or
// last.
func utf16(text string, littleEndian bool) string {
	var b strings.Builder
	for i := range len(text) {
		if littleEndian {
			b.Write([]byte{text[i], 0})
		} else {
			b.Write([]byte{0, text[i]})
		}
	}
	return b.String()
}

// form is a multipart form with these fields, in pairs.
func form(fields ...string) string {
	var b strings.Builder
	for i := 0; i+1 < len(fields); i += 2 {
		b.WriteString("--b\r\nContent-Disposition: form-data; name=\"" + fields[i] + "\"\r\n\r\n" + fields[i+1] + "\r\n")
	}
	return b.String() + "--b--\r\n"
}

// unclear are requests of which the balancer finds no model, or of which a
// backend may read another one.
var unclear = map[string]struct {
	path, body string
	headers    []string
}{
	"JSON that names no model":          {"/v1/chat/completions", `{"messages":[]}`, nil},
	"no body":                           {"/v1/chat/completions", ``, nil},
	"an optional model":                 {"/v1/moderations", `{"input":"x"}`, nil},
	"a model that is a list":            {"/v1/chat/completions", `{"model":["forbidden"]}`, nil},
	"a model that is null":              {"/v1/chat/completions", `{"model":null}`, nil},
	"JSON declared as a form":           {"/v1/chat/completions", `{"model":"forbidden"}`, []string{"Content-Type", "multipart/form-data; boundary=b"}},
	"JSON declared as another form":     {"/v1/chat/completions", `{"model":"listed","x":"&model=forbidden&"}`, []string{"Content-Type", "application/x-www-form-urlencoded"}},
	"JSON before a form":                {"/v1/chat/completions", `{"model":"forbidden"}` + "\r\n" + form("model", "listed"), []string{"Content-Type", "multipart/form-data; boundary=b"}},
	"a form in a string of JSON":        {"/v1/audio/transcriptions", `{"model":"listed","x":"` + "\r\n" + form("model", "forbidden") + `"}`, []string{"Content-Type", "multipart/mixed; boundary=b"}},
	"a form declared as JSON":           {"/v1/audio/transcriptions", form("model", "forbidden"), nil},
	"a form whose type is malformed":    {"/v1/audio/transcriptions", form("model", "forbidden"), []string{"Content-Type", "multipart/form-data; boundary=b; =x"}},
	"a form without an end":             {"/v1/audio/transcriptions", strings.TrimSuffix(form("model", "listed", "x", "y"), "--b--\r\n"), []string{"Content-Type", "multipart/form-data; boundary=b"}},
	"two types":                         {"/v1/audio/transcriptions", `{"model":"listed","x":"` + "\r\n" + form("model", "forbidden") + `"}`, []string{"Content-Type", "application/json", "Content-Type", "multipart/form-data; boundary=b"}},
	"UTF-16":                            {"/v1/chat/completions", utf16(`{"model":"forbidden"}`, true), nil},
	"UTF-16, the other way round":       {"/v1/chat/completions", utf16(`{"model":"forbidden"}`, false), nil},
	"UTF-16 with a byte order mark":     {"/v1/chat/completions", "\xff\xfe" + utf16(`{"model":"forbidden"}`, true), nil},
	"a comment":                         {"/v1/chat/completions", `{/* x */"model":"forbidden"}`, nil},
	"a comment after a model":           {"/v1/chat/completions", `{"model":"listed", // x` + "\n" + `"model":"forbidden"}`, nil},
	"comments that hide a model":        {"/v1/chat/completions", `{"model":"listed","x":[/*"*/],"model":"forbidden","y":[/*"*/]}`, nil},
	"a comment after a number":          {"/v1/chat/completions", `{"n":1/*,"model":"listed"}*/,"model":"forbidden"}`, nil},
	"comments after a number sign":      {"/v1/chat/completions", "{\"x\":[\n#\"\n],\"model\":\"forbidden\",\"y\":[\n#\"\n],\"model\":\"listed\"}", nil},
	"strings in single quotes":          {"/v1/chat/completions", `{"model":"listed","x":['"'],"model":"forbidden","y":['"']}`, nil},
	"two models, the last one null":     {"/v1/chat/completions", `{"model":"forbidden","model":null}`, nil},
	"a model and a Model":               {"/v1/chat/completions", `{"model":"listed","Model":"forbidden"}`, nil},
	"JSON that is cut off":              {"/v1/chat/completions", `{"model":"listed","messages":[`, nil},
	"a model in a query":                {"/v1/chat/completions?model=listed", `{/**/"model":"forbidden"}`, nil},
	"a form after its end":              {"/v1/audio/transcriptions", form("model", "listed") + form("model", "forbidden"), []string{"Content-Type", "multipart/form-data; boundary=b"}},
	"a part that cannot be read":        {"/v1/audio/transcriptions", form("model", "listed", `model"; a=1; a=2; b="`, "forbidden"), []string{"Content-Type", "multipart/form-data; boundary=b"}},
	"a model that is a file":            {"/v1/audio/transcriptions", form("model", "listed", `model"; filename="`, "forbidden"), []string{"Content-Type", "multipart/form-data; boundary=b"}},
	"capital letters in the path":       {"/v1/Embeddings", `{/**/"model":"forbidden"}`, nil},
	"an escaped letter in the path":     {"/v1/%65mbeddings", `{/**/"model":"forbidden"}`, nil},
	"an escaped slash in the path":      {"/v1/images%2Fgenerations", `{/**/"model":"forbidden"}`, nil},
	"a semicolon in the path":           {"/v1/embeddings;x", `{/**/"model":"forbidden"}`, nil},
	"Azure's path without a deployment": {"/openai/responses?api-version=1", `{/**/"model":"forbidden"}`, nil},
}

// oddModels are names that only some servers read as model, as JSON writes
// them: they ignore letters' case (Go), drop blanks (PHP, C), or make lists of
// such names (PHP, Rack).
var oddModels = []string{"Model", "MODEL", "model ", " model", `model\t`, `\u006dODEL`, `model\u0000`, `model\u0000x`, `\u00a0model`, "model[]", "model[0]", "Model []"}

func init() {
	for _, name := range oddModels {
		var decoded string
		if err := json.Unmarshal([]byte(`"`+name+`"`), &decoded); err != nil {
			panic(err)
		}
		type request = struct {
			path, body string
			headers    []string
		}
		multipart := []string{"Content-Type", "multipart/form-data; boundary=b"}
		unclear["JSON with a model and a "+name] = request{"/v1/chat/completions", `{"model":"listed","` + name + `":"forbidden"}`, nil}
		unclear["JSON with a "+name] = request{"/v1/chat/completions", `{"` + name + `":"listed"}`, nil}
		unclear["a form with a model and a "+name] = request{"/v1/audio/transcriptions", form("model", "listed", decoded, "forbidden"), multipart}
		unclear["a form with a "+name] = request{"/v1/audio/transcriptions", form(decoded, "listed"), multipart}
		unclear["a form with a file that is a "+name] = request{"/v1/audio/transcriptions", form("model", "listed", decoded+`"; filename="`, "forbidden"), multipart}
	}
}

func TestARequestWithoutAModelGoesOnlyToBackendsThatServeAnyModel(t *testing.T) {
	const lists = "openai_lb {\nbackend http://a {\nmodel listed\n}\nbackend http://b {\nauth api_key\napi_key k\nmodel listed deployed\n}\n"
	for name, c := range unclear {
		t.Run(name, func(t *testing.T) {
			ask := func(w *lbtest.World) lbtest.Reply {
				r := w.Request(http.MethodPost, c.path, strings.NewReader(c.body))
				for i := 0; i+1 < len(c.headers); i += 2 {
					if i == 0 {
						r.Header.Del(c.headers[i])
					}
					r.Header.Add(c.headers[i], c.headers[i+1])
				}
				return w.Send(r)
			}
			lbtest.InBubble(t, lists+"}", func(t *testing.T, w *lbtest.World) {
				reply := ask(w)
				reply.WantError(t, 400, "missing_required_parameter")
				if !strings.Contains(reply.Body, "Available models: listed.") {
					t.Errorf("the error is %s, want it to list the models", reply.Body)
				}
				w.WantCalls(map[string]int{"a": 0, "b": 0})
			})
			lbtest.InBubble(t, lists+"backend http://any {\npriority 2\n}\n}", func(t *testing.T, w *lbtest.World) {
				ask(w).WantServed(t, "any")
				if got := w.Backends["any"].Received()[0].BodyHash; got != lbtest.Hash([]byte(c.body)) {
					t.Error("the body was changed")
				}
			})
		})
	}
}

func TestAnOddlySpelledPathOfStoredObjectsIsAnInvalidPath(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
		for _, path := range []string{"/v1/Chat/Completions", "/v1/ch%61t/completions", "/v1/chat%2Fcompletions", "/v1/chat/completions;x"} {
			reply := w.Send(w.Request(http.MethodPost, path, strings.NewReader(`{"model":"m"}`)))
			reply.WantError(t, 400, "invalid_path")
		}
		w.WantCalls(map[string]int{"a": 0})
	})
}

func TestOfSeveralModelsOnlyTheOneThatIsListedReachesABackend(t *testing.T) {
	multipart := "multipart/form-data; boundary=b"
	lbtest.InBubble(t, "openai_lb {\nbackend http://a {\nmodel listed\n}\n}", func(t *testing.T, w *lbtest.World) {
		for _, c := range [][3]string{
			{"application/json", `{"model":"forbidden","n":1,"model":"listed"}`, `{"model":"listed","n":1,"model":"listed"}`},
			{multipart, form("model", "forbidden", "n", "1", "model", "listed"), form("model", "listed", "n", "1", "model", "listed")},
		} {
			w.Backends["a"].Forget()
			r := w.Request(http.MethodPost, "/v1/images/edits", strings.NewReader(c[1]))
			r.Header.Set("Content-Type", c[0])
			w.Send(r).WantServed(t, "a")
			if got := w.Backends["a"].Received()[0].BodyHash; got != lbtest.Hash([]byte(c[2])) {
				t.Errorf("of %s, a did not get %s", c[1], c[2])
			}
		}
	})
}

// An Azure path names the model, but the path of an OpenAI backend does not:
// the body would.
func TestABodyThatCannotBeReadIsNotSentWhereItNamesTheModel(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a {\nmodel listed\n}\nbackend http://b\n}", func(t *testing.T, w *lbtest.World) {
		r := w.Request(http.MethodPost, "/openai/deployments/listed/chat/completions?api-version=1", strings.NewReader(`{/**/"model":"forbidden"}`))
		reply := w.Send(r)
		reply.WantError(t, 400, "missing_required_parameter")
		w.WantCalls(map[string]int{"a": 0, "b": 0})
	})
}

func TestEveryLineOfContentEncodingCounts(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a {\nmodel listed\n}\n}", func(t *testing.T, w *lbtest.World) {
		for _, c := range []struct {
			codings []string
			body    string
			status  int
			code    string
		}{
			{[]string{"gzip"}, lbtest.Gzipped(`{"model":"forbidden"}`), 415, "unsupported_content_encoding"},
			{[]string{"identity", "gzip"}, lbtest.Gzipped(`{"model":"forbidden"}`), 415, "unsupported_content_encoding"},
			{[]string{"", "gzip"}, `{"model":"listed"}`, 415, "unsupported_content_encoding"},
			{[]string{"none, X-Gzip"}, `{"model":"listed"}`, 415, "unsupported_content_encoding"},
			{[]string{"br"}, `{"model":"listed"}`, 415, "unsupported_content_encoding"},
			{[]string{"identity", "identity"}, `{"model":"listed"}`, 200, ""},
			{[]string{"utf-8"}, `{"model":"listed"}`, 200, ""},
			{[]string{"none"}, `{"model":"forbidden"}`, 404, "model_not_found"},
			{[]string{"utf-8", "none"}, `{"model":"forbidden"}`, 404, "model_not_found"},
			{[]string{"unknown"}, lbtest.Gzipped(`{"model":"forbidden"}`), 400, "missing_required_parameter"},
		} {
			r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(c.body))
			r.Header["Content-Encoding"] = c.codings
			if reply := w.Send(r); c.status != 200 {
				reply.WantError(t, c.status, c.code)
			} else {
				reply.WantServed(t, "a")
			}
		}
		w.WantCalls(map[string]int{"a": 2})
	})
}

func TestWhatNeedsNoModelGoesToAnyBackend(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a {\nmodel listed\n}\n}", func(t *testing.T, w *lbtest.World) {
		for _, asked := range [][2]string{
			{"GET", "/v1/files"}, {"POST", "/v1/files"}, {"GET", "/v1/responses/resp_12345678"}, {"POST", "/v1/responses/resp_12345678/cancel"},
			{"POST", "/v1/batches"}, {"POST", "/v1/conversations"}, {"GET", "/v1/realtime?call_id=rtc_12345678"}, {"POST", "/v1/realtime/client_secrets"},
			{"DELETE", "/v1/files/file-12345678"}, {"OPTIONS", "/v1/chat/completions"},
		} {
			w.Send(w.Request(asked[0], asked[1], strings.NewReader(`{}`))).WantServed(t, "a")
		}
	})
}
