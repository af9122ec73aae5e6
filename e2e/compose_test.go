package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/compose-spec/compose-go/v2/loader"
	"github.com/compose-spec/compose-go/v2/types"
)

const compose = "../examples/compose"

func TestTheComposeFileIsValid(t *testing.T) {
	t.Parallel()
	name := compose + "/compose.yaml"
	project, err := loader.LoadWithContext(t.Context(), types.ConfigDetails{
		WorkingDir:  compose,
		ConfigFiles: []types.ConfigFile{{Filename: name, Content: readFile(t, name)}},
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, service := range project.Services {
		for _, port := range service.Ports {
			if port.HostIP != "127.0.0.1" {
				t.Errorf("%s lets other machines reach port %s", service.Name, port.Published)
			}
		}
		for _, mount := range service.Volumes {
			if mount.Type == types.VolumeTypeBind {
				readFile(t, mount.Source)
			}
		}
		if service.Build != nil {
			readFile(t, filepath.Join(service.Build.Context, service.Build.Dockerfile))
		}
	}
}

// composed are the processes of examples/compose, but for Grafana.
type composed struct {
	balancer                     *process
	clients, metrics, prometheus string
}

// startComposed runs them on loopback addresses. Prometheus has the rules of
// examples/prometheus, asks more often, and looks at rates over seconds.
func startComposed(t *testing.T) *composed {
	t.Helper()
	var err error
	for range 3 { // a port that was free may be taken by the time its program starts
		var c *composed
		if c, err = tryCompose(t); err == nil {
			return c
		}
	}
	t.Fatal(err)
	return nil
}

func tryCompose(t *testing.T) (*composed, error) {
	dir := t.TempDir()
	addresses, err := freeAddresses(7)
	if err != nil {
		return nil, err
	}
	c := &composed{clients: "http://" + addresses[0], metrics: "http://" + addresses[1] + "/metrics", prometheus: "http://" + addresses[2]}
	pairs := []string{
		"admin off", "admin off\n\tdefault_bind 127.0.0.1",
		":8080 {", portOf(addresses[0]) + " {", ":9180 {", portOf(addresses[1]) + " {",
		"balancer:9180", addresses[1], "_interval: 5s", "_interval: 500ms", "  - alerts.yml", "  - " + filepath.Join(dir, "alerts.yml"),
	}
	for i, address := range addresses[3:] {
		pairs = append(pairs, fmt.Sprintf("simulators:%d", 9001+i), address, fmt.Sprintf(":%d {", 9001+i), portOf(address)+" {")
	}
	places := strings.NewReplacer(pairs...)
	for from, to := range map[string]string{
		compose + "/Caddyfile": "Caddyfile", compose + "/simulators.Caddyfile": "simulators.Caddyfile",
		compose + "/prometheus.yml": "prometheus.yml", alerts: "alerts.yml",
	} {
		writeFile(t, filepath.Join(dir, to), places.Replace(string(readFile(t, from))))
	}
	answers := func(url string) func() error {
		return func() error {
			res, err := http.Get(url)
			if err != nil {
				return err
			}
			res.Body.Close()
			if res.StatusCode >= http.StatusInternalServerError {
				return errors.New(res.Status)
			}
			return nil
		}
	}
	simulators, err := launch(t, filepath.Join(dir, "simulators.Caddyfile"))
	if err != nil {
		return nil, err
	}
	if err = simulators.await(answers("http://" + addresses[3])); err != nil {
		return nil, err
	}
	if c.balancer, err = launch(t, filepath.Join(dir, "Caddyfile")); err != nil {
		return nil, err
	}
	if err = c.balancer.await(answers(c.metrics)); err != nil {
		return nil, err
	}
	config := filepath.Join(dir, "prometheus.yml")
	prometheus, err := begin(t, exec.Command(tool(t, "prometheus"), "--config.file="+config, "--storage.tsdb.path="+filepath.Join(dir, "data"),
		"--web.listen-address="+addresses[2]), config)
	if err != nil {
		return nil, err
	}
	return c, prometheus.await(answers(c.prometheus + "/-/ready"))
}

// send runs the clients of examples/compose until the test ends.
func (c *composed) send(t *testing.T) {
	t.Helper()
	script, err := filepath.Abs(compose + "/traffic.sh")
	if err != nil {
		t.Fatal(err)
	}
	// whatever becomes of the test, they end
	cmd := exec.Command("timeout", "300", "sh", script)
	cmd.Env = append(os.Environ(), "URL="+c.clients)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		_ = cmd.Wait()
	})
}
