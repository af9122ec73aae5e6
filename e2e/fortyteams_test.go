package e2e

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// TestEveryCommandForFortyTeamsWorks follows docs/forty-teams.md in a copy of
// the repository, on other ports.
func TestEveryCommandForFortyTeamsWorks(t *testing.T) {
	for _, tool := range []string{"redis-server", "jq"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skip(err)
		}
	}
	dir := t.TempDir()
	repository := copyRepository(t, dir)
	page, err := os.ReadFile("../docs/forty-teams.md")
	if err != nil {
		t.Fatal(err)
	}
	addresses, err := freeAddresses(3)
	if err != nil {
		t.Fatal(err)
	}
	var ports []string
	for _, address := range addresses {
		_, port, _ := net.SplitHostPort(address)
		ports = append(ports, port)
	}
	clients, admin := freeTen(t), freeTen(t)
	elsewhere := strings.NewReplacer("808$", clients+"$", "202$", admin+"$", "localhost:202", "localhost:"+admin,
		"localhost:9001", "localhost:"+ports[0], "localhost:9002", "localhost:"+ports[1],
		"redis-server ", "redis-server --port "+ports[2]+" ", "redis-cli ", "redis-cli -p "+ports[2]+" ")
	for _, name := range []string{"Caddyfile", "simulators.Caddyfile"} {
		file := filepath.Join(repository, "examples/forty-teams", name)
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		writeFile(t, file, elsewhere.Replace(string(text)))
	}
	last := regexp.MustCompile("Stop the trial: `(.+)`").FindSubmatch(page)
	if last == nil {
		t.Fatal("the page does not say how to stop")
	}
	script := "stop() { " + string(last[1]) + "; }\ntrap 'stop >/dev/null 2>&1' EXIT\n"
	for _, block := range regexp.MustCompile("(?ms)^```sh\n(.*?)^```$").FindAllSubmatch(page, -1) {
		script += "echo ==\n" + regexp.MustCompile(`(?m)^git clone .*\n`).ReplaceAllString(string(block[1]), "")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	bash := exec.CommandContext(ctx, "bash", "-c", elsewhere.Replace(script))
	bash.Dir = repository
	bash.Env = append(os.Environ(), "REDIS=localhost:"+ports[2], "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir,
		"GOFLAGS="+cmp.Or(os.Getenv("GOFLAGS"), "-trimpath"))
	out, err := bash.CombinedOutput()
	shown := strings.Split(string(out), "==\n")[1:]
	wants := []string{
		`(?s)(Successfully started Caddy .*){4}`,
		`(?s)200 ptu.*( llm [0-9a-f]{12}\n.*){3}`,
		`(?s)429 \n.*team-26 .*team-26\tcaller_limited\ttokens/minute`,
		`401 \n401 \n401 \n`,
		`(?s)Valid configuration.*( llm [0-9a-f]{12}\n.*){3}`,
		`^team-26,\d+,`,
		`(?ms)^CALLER .*\nteam-26 +gpt-5\.5 +\d.* \d+\.\d{4}\n`,
		`(?s)200 .*66\d\d\d\d\d tokens/month`,
		``,
		`(?s)(\{"status":"ready"\}.*){3}`,
	}
	if err != nil || len(shown) != len(wants) {
		t.Fatalf("%v, %d blocks in\n%s", err, len(shown), out)
	}
	for i, want := range wants {
		if !regexp.MustCompile(want).MatchString(shown[i]) {
			t.Errorf("expected %s in\n%s", want, shown[i])
		}
	}
}

// freeTen returns all but the last digit of ten ports, of which the first four
// are free.
func freeTen(t *testing.T) string {
	t.Helper()
	for range 100 {
		addresses, err := freeAddresses(1)
		if err != nil {
			t.Fatal(err)
		}
		_, port, _ := net.SplitHostPort(addresses[0])
		ten := port[:len(port)-1]
		free := true
		for i := range 4 {
			listener, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%s%d", ten, i))
			if err != nil {
				free = false
				break
			}
			listener.Close()
		}
		if free {
			return ten
		}
	}
	t.Fatal("no ten ports are free")
	return ""
}
