package e2e

import (
	"bufio"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"io"
	"math/big"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A pod is a Caddy that runs the Caddyfile of examples/kubernetes, with the
// files that Kubernetes would mount, and can write nowhere.
type pod struct {
	*process
	clients, ops string
	simulator    *site
	client       *http.Client
}

// startPod runs one whose ports close this long after it is told to stop.
func startPod(t *testing.T, shutdownDelay string) *pod {
	t.Helper()
	dir := t.TempDir()
	m := readManifests(t)
	for file, text := range m.secret.StringData {
		writeFile(t, filepath.Join(dir, file), text)
	}
	writeCertificate(t, dir)
	s := start(t, []backend{{simulator: "api_key the-key-of-contoso-ptu\n token_latency 400ms"}})
	var err error
	for range 3 { // a port that was free may be taken by the time Caddy starts
		var addresses []string
		if addresses, err = freeAddresses(2); err != nil {
			continue
		}
		config := filepath.Join(dir, "Caddyfile")
		writeFile(t, config, strings.NewReplacer(
			"admin localhost:2019", "admin off\ndefault_bind 127.0.0.1",
			":8443", portOf(addresses[0]), ":8081", portOf(addresses[1]),
			"/run/secrets/tls", dir, "/run/secrets/openai-lb", dir,
			"shutdown_delay 15s", "shutdown_delay "+shutdownDelay,
			"https://contoso-ptu.openai.azure.com {", s.simulators[0]+" {\nauth api_key",
		).Replace(string(readFile(t, kubernetes+"/Caddyfile"))))
		p := &pod{clients: "https://" + addresses[0], ops: "http://" + addresses[1], simulator: s, client: &http.Client{
			Timeout:   patience,
			Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ForceAttemptHTTP2: true},
		}}
		nowhere := filepath.Join(os.DevNull, "nowhere")
		if p.process, err = launch(t, config, "HOME="+nowhere, "XDG_DATA_HOME="+nowhere, "XDG_CONFIG_HOME="+nowhere); err != nil {
			continue
		}
		err = p.await(func() error {
			res, err := p.client.Get(p.ops + "/readyz")
			if err == nil {
				res.Body.Close()
			}
			return err
		})
		if err == nil {
			return p
		}
	}
	t.Fatal(err)
	return nil
}

// portOf is the part of an address that begins with the colon.
func portOf(address string) string { return address[strings.LastIndexByte(address, ':'):] }

func writeFile(t *testing.T, name, text string) {
	t.Helper()
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// writeCertificate writes what a Secret of type kubernetes.io/tls has.
func writeCertificate(t *testing.T, dir string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), DNSNames: []string{"llm.example.com"}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	writeFile(t, filepath.Join(dir, "tls.crt"), string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})))
	writeFile(t, filepath.Join(dir, "tls.key"), string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private})))
}

// page asks for one on the port of probes and Prometheus.
func (p *pod) page(t *testing.T, path string) (int, string) {
	t.Helper()
	res, body := get(t, p.ops+path)
	return res.StatusCode, body
}

// chat is a client's request.
func (p *pod) chat(t *testing.T, body string) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, p.clients+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer the-client-key-of-alice")
	req.Header.Set("Content-Type", "application/json")
	res, err := p.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { res.Body.Close() })
	return res
}

const aChat = `{"model":"gpt-5.5","messages":[{"role":"user","content":"Hello"}]`

func TestAPodAnswersProbesAndPrometheus(t *testing.T) {
	t.Parallel()
	p := startPod(t, "15s")
	res := p.chat(t, aChat+"}")
	if res.StatusCode != http.StatusOK || res.ProtoMajor != 2 || res.Header.Get("Alt-Svc") != "" {
		t.Errorf("a client gets %d by %s, %v", res.StatusCode, res.Proto, res.Header)
	}
	container := readManifests(t).deployment.Spec.Template.Spec.Containers[0]
	for _, path := range []string{container.StartupProbe.HTTPGet.Path, container.LivenessProbe.HTTPGet.Path, container.ReadinessProbe.HTTPGet.Path} {
		if code, body := p.page(t, path); code != http.StatusOK {
			t.Errorf("%s answers %d %s", path, code, body)
		}
	}
	code, body := p.page(t, readManifests(t).monitor.Spec.Endpoints[0].Path)
	for _, metric := range []string{"caddy_openai_lb_requests_total{", "caddy_http_requests_total{"} {
		if !strings.Contains(body, "\n"+metric) {
			t.Errorf("the metrics (%d) have no %s", code, metric)
		}
	}
	for _, path := range []string{"/", "/v1/chat/completions", "/config/"} {
		if code, body := p.page(t, path); code != http.StatusNotFound {
			t.Errorf("%s answers %d %s on the port that is not for clients", path, code, body)
		}
	}
}

func TestAPodThatStopsIsNotReadyAndStillServes(t *testing.T) {
	t.Parallel()
	p := startPod(t, "10m")
	if code, body := p.page(t, "/readyz"); code != http.StatusOK {
		t.Fatalf("/readyz answers %d %s before the stop", code, body)
	}
	p.stop(t)
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		code, body := p.page(t, "/readyz")
		if code == http.StatusServiceUnavailable {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("/readyz answers %d %s after the stop", code, body)
		}
	}
	if code, _ := p.page(t, "/healthz"); code != http.StatusOK {
		t.Errorf("/healthz answers %d: the kubelet would kill the pod", code)
	}
	// clients are served, and go elsewhere with their next request
	if res := p.chat(t, aChat+"}"); res.StatusCode != http.StatusOK || res.ProtoMajor != 2 {
		t.Errorf("a client of HTTP/2 gets %d by %s", res.StatusCode, res.Proto)
	}
	p.client.Transport = &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	if res := p.chat(t, aChat+"}"); res.StatusCode != http.StatusOK || res.ProtoMajor != 1 || !res.Close {
		t.Errorf("a client of HTTP/1 gets %d by %s, and is asked to connect anew: %v", res.StatusCode, res.Proto, res.Close)
	}
}

func TestAPodThatStopsFinishesItsStreams(t *testing.T) {
	t.Parallel()
	p := startPod(t, "100ms")
	res := p.chat(t, aChat+`,"stream":true}`)
	reader := bufio.NewReader(res.Body)
	if line, err := reader.ReadString('\n'); err != nil {
		t.Fatalf("the stream begins with %q: %v", line, err)
	}
	p.stop(t)
	rest, err := io.ReadAll(reader)
	if err != nil || !strings.HasSuffix(string(rest), "data: [DONE]\n\n") {
		t.Errorf("the stream ends with %q: %v", rest[max(0, len(rest)-40):], err)
	}
	select {
	case <-p.exited:
	case <-time.After(patience):
		t.Error("Caddy does not end after its last stream")
	}
}
