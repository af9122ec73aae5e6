package redis

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// toxiproxy is Shopify's, of the version that tools.mod names.
type toxiproxy struct {
	t   *testing.T
	api string
}

func startToxiproxy(t *testing.T) toxiproxy {
	t.Helper()
	path := filepath.Join(t.TempDir(), "toxiproxy")
	build := exec.CommandContext(t.Context(), "go", "build", "-modfile=tools.mod", "-o", path, "github.com/Shopify/toxiproxy/v2/cmd/server")
	build.Dir = ".."
	if output, err := build.CombinedOutput(); err != nil {
		t.Fatalf("building toxiproxy: %v\n%s", err, output)
	}
	port := fmt.Sprint(lbtest.FreePort(t))
	process := exec.Command(path, "-port", port)
	if err := process.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		process.Process.Kill()
		process.Wait()
	})
	p := toxiproxy{t, "http://127.0.0.1:" + port}
	lbtest.WaitFor(t, func() bool {
		res, err := http.Get(p.api + "/version")
		if err == nil {
			res.Body.Close()
		}
		return err == nil
	})
	return p
}

// call asks its API.
func (p toxiproxy) call(method, path string, body any) {
	p.t.Helper()
	text, err := json.Marshal(body)
	if err != nil {
		p.t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(p.t.Context(), method, p.api+path, bytes.NewReader(text))
	if err != nil {
		p.t.Fatal(err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		p.t.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode >= 300 {
		answer, _ := io.ReadAll(res.Body)
		p.t.Fatalf("%s %s: %s %s", method, path, res.Status, answer)
	}
}

// before puts a proxy before a server, and returns its address.
func (p toxiproxy) before(name, address string) string {
	p.t.Helper()
	listen := fmt.Sprintf("127.0.0.1:%d", lbtest.FreePort(p.t))
	p.call(http.MethodPost, "/proxies", map[string]string{"name": name, "listen": listen, "upstream": address})
	return listen
}

// toxic is done to what a server sends.
type toxic struct {
	name       string
	attributes map[string]int
	// serves is the backend that serves while it is done to one of them.
	serves string
}

var toxics = []toxic{
	{"latency", map[string]int{"latency": 150, "jitter": 50}, "poisoned"},
	{"slicer", map[string]int{"average_size": 64, "size_variation": 32, "delay": 500}, "poisoned"},
	{"bandwidth", map[string]int{"rate": 100}, "poisoned"}, // KB/s
	{"reset_peer", map[string]int{"timeout": 0}, "healthy"},
}

// with poisons a proxy during a test.
func (p toxiproxy) with(proxy string, it toxic, test func()) {
	p.t.Helper()
	p.call(http.MethodPost, "/proxies/"+proxy+"/toxics", map[string]any{"name": "it", "type": it.name, "stream": "downstream", "attributes": it.attributes})
	test()
	p.call(http.MethodDelete, "/proxies/"+proxy+"/toxics/it", nil)
}

// TestNoReplyIsLostWhateverTheNetworkDoes has toxiproxy between two replicas,
// their backends and their Redis. Whatever it does to one backend, each reply
// is whole, and whatever it does to Redis, no request waits for it.
func TestNoReplyIsLostWhateverTheNetworkDoes(t *testing.T) {
	const soon = 10 * time.Second // on a busy machine
	whole := fmt.Sprintf(`{"id":"chatcmpl-1","object":"chat.completion","choices":[{"message":{"content":%q}}]}`, strings.Repeat("word ", 4000))
	stream := strings.Repeat("data: {\"choices\":[{\"delta\":{\"content\":\"word \"}}]}\n\n", 300) + "data: [DONE]\n\n"
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.Header().Set("X-Backend", strings.Split(r.URL.Path, "/")[1])
		if bytes.Contains(body, []byte(`"stream":true`)) {
			w.Header().Set("Content-Type", "text/event-stream")
			for _, part := range []string{stream[:4000], stream[4000:]} {
				io.WriteString(w, part)
				w.(http.Flusher).Flush()
			}
			return
		}
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, whole)
	}))
	t.Cleanup(backend.Close)
	u, err := url.Parse(backend.URL)
	if err != nil {
		t.Fatal(err)
	}
	s, p := startServer(t), startToxiproxy(t)
	poisoned := p.before("backend", u.Host)
	options := fmt.Sprintf("backend http://%s/poisoned/v1 {\nname poisoned\napi_key s3cret-of-one\n}\nbackend %s/healthy/v1 {\nname healthy\npriority 2\napi_key s3cret-of-two\n}\nstate redis {\naddress %s\n}",
		poisoned, backend.URL, p.before("redis", s.address))
	replicas := startReplicas(t, 2, options)
	ask := func(what, serves string) {
		t.Helper()
		for _, r := range replicas {
			for body, want := range map[string]string{`{"model":"m"}`: whole, `{"model":"m","stream":true}`: stream} {
				began := time.Now()
				res, err := r.client.Post(r.address+"/v1/chat/completions", "application/json", strings.NewReader(body))
				if err != nil {
					t.Fatalf("%s: %v", what, err)
				}
				got, err := io.ReadAll(res.Body)
				res.Body.Close()
				if by := res.Header.Get("X-Backend"); err != nil || res.StatusCode != http.StatusOK || string(got) != want || by != serves {
					t.Errorf("%s: the client got %d with %d of %d bytes from %s, %v", what, res.StatusCode, len(got), len(want), by, err)
				}
				if took := time.Since(began); took > soon {
					t.Errorf("%s: it took %s", what, took)
				}
			}
		}
	}
	ask("before", "poisoned")
	for _, toxic := range toxics {
		p.with("redis", toxic, func() { ask(toxic.name+" of Redis", "poisoned") })
		p.with("backend", toxic, func() { ask(toxic.name+" of a backend", toxic.serves) })
	}
	for _, r := range replicas { // which have found each other again
		lbtest.WaitFor(t, func() bool { return r.metric("caddy_openai_lb_state_replicas") == 2 })
	}
}
