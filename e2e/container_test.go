package e2e

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// startContainer runs what the image of examples/container runs, and returns
// its URL. It may write nowhere.
func startContainer(t *testing.T, env ...string) string {
	t.Helper()
	config, err := filepath.Abs("../examples/container/Caddyfile")
	if err != nil {
		t.Fatal(err)
	}
	nowhere := filepath.Join(os.DevNull, "nowhere")
	env = append(env, "HOME="+nowhere, "XDG_DATA_HOME="+nowhere, "XDG_CONFIG_HOME="+nowhere)
	for range 3 { // a port that was free may be taken by the time Caddy starts
		var addresses []string
		if addresses, err = freeAddresses(1); err != nil {
			continue
		}
		_, port, _ := net.SplitHostPort(addresses[0])
		var p *process
		if p, err = launch(t, config, append(env, "PORT="+port)...); err != nil {
			continue
		}
		err = p.await(func() error {
			conn, err := net.DialTimeout("tcp", addresses[0], patience)
			if err == nil {
				err = conn.Close()
			}
			return err
		})
		if err == nil {
			return "http://" + addresses[0]
		}
	}
	t.Fatal(err)
	return ""
}

// variables describe a backend as the container wants it.
func variables(n int, url string, more ...string) []string {
	env := []string{fmt.Sprintf("BACKEND_%d_URL=%s", n, url), fmt.Sprintf("BACKEND_%d_PRIORITY=%[1]d", n)}
	for _, pair := range more {
		env = append(env, fmt.Sprintf("BACKEND_%d_%s", n, pair))
	}
	return env
}

func TestTheContainerServesClientsOfTheSampleItReplaces(t *testing.T) {
	sc := scenario{
		backends: []backend{
			{simulator: "fault status:429:44", sees: []int{429}},
			{simulator: "deployments gpt-4o-eu\n fault status:429:30 2", sees: []int{200, 429}, models: []string{"gpt-4o-eu", "gpt-4o-eu"}},
			{sees: []int{200, 200}, models: []string{"gpt-4o", "gpt-4o"}},
		},
		calls: []call{
			{name: "chat", from: "second"},
			{name: "streamed chat", from: "third"},
			{name: "embeddings", from: "third"},
		},
	}
	for _, client := range everyKind {
		for _, language := range languages {
			t.Run(client+"/"+language.name, func(t *testing.T) {
				t.Parallel()
				s := start(t, sc.backends)
				url := startContainer(t, slices.Concat(
					variables(1, s.simulators[0], "APIKEY=right"),
					variables(2, s.simulators[1]+"/", "APIKEY= right\n", "DEPLOYMENT_NAME=gpt-4o-eu"),
					variables(3, s.simulators[2], "APIKEY=right"),
					// what Kubernetes sets for a service called backend
					[]string{"BACKEND_SERVICE_HOST=10.0.0.1", "BACKEND_SERVICE_PORT=80", "BACKEND_PORT=tcp://10.0.0.1:80",
						"BACKEND_PORT_80_TCP_ADDR=10.0.0.1"},
				)...)
				sc.checkClient(t, language.run(t, s, sc.order(url, client)))
				sc.checkBackends(t, s)
				for path, want := range map[string]string{"/healthz": "Healthy", "/readyz": `{"status":"ready"}`} {
					if res, body := get(t, url+path); res.StatusCode != http.StatusOK || body != want {
						t.Errorf("%s answers %d %s", path, res.StatusCode, body)
					}
				}
			})
		}
	}
}

func TestTheContainerIsReadyWhileABackendCanBeUsed(t *testing.T) {
	t.Parallel()
	s := start(t, []backend{{}})
	addresses, err := freeAddresses(1)
	if err != nil {
		t.Fatal(err)
	}
	lb := startContainer(t, append(variables(1, s.simulators[0], "APIKEY=wrong"), variables(2, "http://"+addresses[0], "APIKEY=right")...)...)
	if res, _ := get(t, lb+"/readyz"); res.StatusCode != http.StatusOK {
		t.Errorf("before any request /readyz answers %d", res.StatusCode)
	}
	if res, body := s.post(t, lb); res.StatusCode != http.StatusBadGateway {
		t.Fatalf("without a backend a client gets %d %s", res.StatusCode, body)
	}
	res, body := get(t, lb+"/readyz")
	if seconds, err := strconv.Atoi(res.Header.Get("Retry-After")); res.StatusCode != http.StatusServiceUnavailable ||
		!strings.Contains(body, `"code":"no_backend_usable"`) || err != nil || seconds < 1 || seconds > 10 {
		t.Errorf("without a backend /readyz answers %d %v %s", res.StatusCode, res.Header, body)
	}
	if res, _ := get(t, lb+"/healthz"); res.StatusCode != http.StatusOK {
		t.Errorf("without a backend /healthz answers %d", res.StatusCode)
	}

	listener, err := net.Listen("tcp", addresses[0])
	if err != nil {
		t.Skip("somebody else listens there now:", err)
	}
	target, err := url.Parse(s.simulators[0])
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: httputil.NewSingleHostReverseProxy(target)}
	go server.Serve(listener)
	defer server.Close()
	for deadline := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		if res, body = get(t, lb+"/readyz"); res.StatusCode == http.StatusOK {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("/readyz still answers %d %v %s", res.StatusCode, res.Header, body)
		}
	}
	if res, body := s.post(t, lb); res.StatusCode != http.StatusOK {
		t.Errorf("a client gets %d %s", res.StatusCode, body)
	}
}

// get asks for a page of the container.
func get(t *testing.T, url string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res, string(body)
}
