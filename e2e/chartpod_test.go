package e2e

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
)

// caddyWithRedis returns a Caddy with the engine redis and the simulator.
var caddyWithRedis = sync.OnceValues(func() (string, error) {
	text, err := os.ReadFile("../cmd/caddy/main.go")
	if err != nil {
		return "", err
	}
	const module = `_ "github.com/openai-lb/caddy-openai-lb"`
	main := filepath.Join(shared, "redis.go")
	text = bytes.Replace(text, []byte(module), []byte(module+"\n"+strings.TrimSuffix(module, `"`)+`/redis"`), 1)
	if err := os.WriteFile(main, text, 0o600); err != nil {
		return "", err
	}
	binary := filepath.Join(shared, "caddy-with-redis")
	build := exec.Command("go", "build", "-o", binary, main)
	build.Dir = "../redis"
	if output, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, output)
	}
	return binary, nil
})

// mounted is a Caddyfile as it is in a pod, with files of keys and a
// certificate in dir, and simulators instead of backends.
type mounted struct{ dir, config, binary string }

// mount renders the chart with a set of values.
func mount(t *testing.T, set string) (m mounted, made objects) {
	t.Helper()
	made, _ = render(t, "--values", set)
	config := string(readFile(t, kubernetes+"/Caddyfile")) // what an existing ConfigMap has
	if strings.Contains(filepath.Base(set), "configmap") {
		if name := only[appsv1.Deployment](t, made).Spec.Template.Spec.Volumes[0].ConfigMap.Name; made["ConfigMap "+name] != nil {
			t.Errorf("the chart makes the ConfigMap %s", name)
		}
	} else {
		config = only[corev1.ConfigMap](t, made, " "+only[appsv1.Deployment](t, made).Name).Data["Caddyfile"]
	}
	m = mounted{dir: t.TempDir(), binary: caddy}
	if strings.Contains(config, "state redis") {
		var err error
		if m.binary, err = caddyWithRedis(); err != nil {
			t.Fatal(err)
		}
	}
	m.checkFormat(t, config)
	for _, file := range regexp.MustCompile(`/run/secrets/openai-lb/([\w-]+)`).FindAllStringSubmatch(config, -1) {
		writeFile(t, filepath.Join(m.dir, file[1]), "right")
	}
	writeFile(t, filepath.Join(m.dir, "client-keys"), "alice the-client-key-of-alice\n")
	writeCertificate(t, m.dir)
	simulator := start(t, []backend{{simulator: "deployments gpt-5.5 gpt-5.5-ptu gpt-5.6-luna gpt-4o gpt-4o-ptu gpt4o-fr gpt-4o-mini"}}).simulators[0]
	config = regexp.MustCompile(`backend https://[\w.-]+\.azure\.com \{`).ReplaceAllString(config, "backend "+simulator+" {\nauth api_key")
	config = strings.NewReplacer("https://api.openai.com", simulator, "{env.AZURE_PTU_URL}", simulator).Replace(config)
	m.config = strings.NewReplacer("/run/secrets/openai-lb", m.dir, "/run/secrets/tls", m.dir).Replace(config)
	return m, made
}

func (m mounted) checkFormat(t *testing.T, config string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "Caddyfile")
	writeFile(t, file, config)
	if output, err := exec.Command(m.binary, "fmt", "--diff", file).CombinedOutput(); err != nil {
		t.Errorf("not formatted:\n%s", output)
	}
}

func TestTheCaddyfilesOfTheChartPassTheirChecks(t *testing.T) {
	t.Parallel()
	for _, set := range setsOfValues(t) {
		t.Run(strings.TrimSuffix(filepath.Base(set), "-values.yaml"), func(t *testing.T) {
			t.Parallel()
			m, _ := mount(t, set)
			file := filepath.Join(m.dir, "Caddyfile")
			writeFile(t, file, m.config)
			for _, command := range [][]string{{"validate"}, {"openai-lb", "check"}} {
				cmd := exec.Command(m.binary, append(command, "--config", file)...)
				cmd.Env = append(os.Environ(), "HOME="+m.dir, "XDG_DATA_HOME="+m.dir, "XDG_CONFIG_HOME="+m.dir)
				for _, variable := range regexp.MustCompile(`api_key \{env\.(\w+)\}`).FindAllStringSubmatch(m.config, -1) {
					cmd.Env = append(cmd.Env, variable[1]+"=right")
				}
				for _, variable := range regexp.MustCompile(`client_key \w+ \{env\.(\w+)\}`).FindAllStringSubmatch(m.config, -1) {
					cmd.Env = append(cmd.Env, variable[1]+"=the-client-key-of-another")
				}
				output, err := cmd.CombinedOutput()
				if err != nil {
					t.Errorf("caddy %v: %v\n%s", command, err, output)
				}
			}
		})
	}
}

// startMounted runs a Caddyfile of the chart, which serves plain HTTP and can
// write nowhere.
func startMounted(t *testing.T, m mounted) *pod {
	t.Helper()
	var err error
	for range 3 { // a port that was free may be taken by the time Caddy starts
		var addresses []string
		if addresses, err = freeAddresses(2); err != nil {
			continue
		}
		config := filepath.Join(m.dir, "Caddyfile")
		writeFile(t, config, strings.NewReplacer(
			"admin localhost:2019", "admin off\ndefault_bind 127.0.0.1",
			":8080", portOf(addresses[0]), ":8081", portOf(addresses[1]),
		).Replace(m.config))
		p := &pod{clients: "http://" + addresses[0], ops: "http://" + addresses[1], client: &http.Client{Timeout: patience}}
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

// TestAPodOfTheChartServesPlainHTTP is about a pod without a certificate. One
// with a certificate runs the Caddyfile of the example.
func TestAPodOfTheChartServesPlainHTTP(t *testing.T) {
	t.Parallel()
	m, made := mount(t, chart+"/ci/minimal-values.yaml")
	p := startMounted(t, m)
	if res := p.chat(t, aChat+"}"); res.StatusCode != http.StatusOK {
		t.Errorf("a client gets %d", res.StatusCode)
	}
	container := only[appsv1.Deployment](t, made).Spec.Template.Spec.Containers[0]
	for _, path := range []string{container.StartupProbe.HTTPGet.Path, container.LivenessProbe.HTTPGet.Path, container.ReadinessProbe.HTTPGet.Path} {
		if code, body := p.page(t, path); code != http.StatusOK {
			t.Errorf("%s answers %d %s", path, code, body)
		}
	}
	if code, body := p.page(t, "/metrics"); !strings.Contains(body, "\ncaddy_openai_lb_requests_in_flight{") {
		t.Errorf("the metrics (%d) have nothing to scale by", code)
	}
	command := only[corev1.Pod](t, made).Spec.Containers[0].Command
	test := exec.Command(command[0], command[1:]...)
	last := len(test.Args) - 1
	test.Args[last] = p.clients + test.Args[last][strings.LastIndex(test.Args[last], "/"):]
	if output, err := test.CombinedOutput(); err != nil {
		t.Errorf("%v: %v\n%s", test.Args, err, output)
	}
}
